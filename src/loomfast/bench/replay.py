"""Benchmarks of replay: a whole log folded at once, from memory and from SQLite's rows."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from pathlib import Path
from time import perf_counter

from loomfast import _kernels
from loomfast.bench import logs
from loomfast.stores import SqliteEventStore

# How much of the log is compared in full: the JSON form of a state is far dearer than the fold.
COMPARED = 100_000
# The pure twin is timed in so many of the rounds: it takes seconds for a log of full size.
PURE_ROUNDS = 2


def in_memory(size: int, rounds: int) -> dict[str, float]:
    """Per event: a mixed log of `size` events folded by the compiled kernel, and by its twin.

    Letting go of the state is not timed. The collector is off: it would slow the twin alone, whose objects it
    walks.
    """
    kernels = {name: _kernels.load(name)["fold"] for name in ("native", "pure")}
    events = {name: list(logs.mixed(kernel, size)) for name, kernel in kernels.items()}
    folded = [kernel.fold_events(None, events[name][:COMPARED]) for name, kernel in kernels.items()]
    if folded[0].to_json() != folded[1].to_json():
        raise AssertionError("the kernels fold the log to different states")
    del folded
    best = dict.fromkeys(kernels, float("inf"))
    for number in range(rounds):
        for name, kernel in kernels.items():
            if name == "native" or number < PURE_ROUNDS:
                gc.disable()
                try:
                    begun = perf_counter()
                    state = kernel.fold_events(None, events[name])
                    best[name] = min(best[name], (perf_counter() - begun) / size)
                finally:
                    gc.enable()
                if state.sequence != size - 1:
                    raise AssertionError(f"the {name} kernel folded another number of events")
                del state
    return best


def from_sqlite(size: int, rounds: int) -> dict[str, float]:
    """Per event: a mixed log of `size` events folded from a SQLite file, by the kernels in use."""
    with tempfile.TemporaryDirectory(prefix="loomfast-bench-") as folder:
        return {"loomfast": asyncio.run(_from_sqlite(Path(folder) / "log.db", size, rounds))}


async def _from_sqlite(path: Path, size: int, rounds: int) -> float:
    kernel = _kernels
    events = list(logs.mixed(kernel, size))
    async with await SqliteEventStore.open(path, synchronous="NORMAL") as store:
        for first in range(0, size, 10_000):
            await store.append_batch(events[first : first + 10_000])
        if await store.fold(logs.EXECUTION) != _kernels.fold_events(None, events):
            raise AssertionError("the rows fold to another state than the events")
        del events
        best = float("inf")
        for _ in range(rounds):
            begun = perf_counter()
            await store.fold(logs.EXECUTION)
            best = min(best, (perf_counter() - begun) / size)
    return best
