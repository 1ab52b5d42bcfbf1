"""What one more held version costs in memory, seen from outside: the growth of a fresh process.

Run as `python -m loomfast.bench.memory VARIANT VERSIONS`, it is that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from loomfast.bench import logs

SIZE = 50_000
VARIANTS = ("loomfast", "immutables")


def held_versions(versions: int) -> dict[str, float]:
    """Bytes per version, for a state of 50,000 stamps and for an `immutables.Map` of the same keys."""
    import immutables  # noqa: F401  # so that a missing peer is known before a process is started

    return {name: _grown(name, versions) / versions for name in VARIANTS}


def _grown(variant: str, versions: int) -> int:
    command = [sys.executable, "-m", "loomfast.bench.memory", variant, str(versions)]
    grown, held = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    if int(held) != versions:
        raise AssertionError(f"{variant} holds {held} versions of {versions}")
    return int(grown)


def resident_bytes() -> int:
    """Return how much of this process is in memory. Raises `ImportError` on a system that does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as numbers:
            return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError as error:
        raise ImportError("this system does not tell a process's memory in /proc") from error


def _hold(variant: str, versions: int) -> None:
    held: list[Any] = [None] * versions
    new = range(SIZE, SIZE + versions)
    if variant == "loomfast":
        from loomfast.bench.fold import LiveLog

        log = LiveLog(SIZE, logs.emit())
        version: Any = log.state.emits
        keys = [logs.spread(n) for n in new]
        before = resident_bytes()
        for place, key in enumerate(keys):
            held[place] = version = version.bump(key)
    else:
        import immutables

        version = immutables.Map({logs.spread(n): 1 for n in range(SIZE)})
        keys = [logs.spread(n) for n in new]
        before = resident_bytes()
        for place, key in enumerate(keys):
            held[place] = version = version.set(key, 1)
    grown = resident_bytes() - before
    print(grown, sum(len(version) == SIZE + place + 1 for place, version in enumerate(held)))


if __name__ == "__main__":
    _hold(sys.argv[1], int(sys.argv[2]))
