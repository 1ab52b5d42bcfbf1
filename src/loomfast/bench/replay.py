"""Benchmarks of replay: a whole log folded at once, from memory and from SQLite's rows."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from time import perf_counter

from loomfast import _kernels
from loomfast.bench import logs
from loomfast.bench.timing import interleaved_timers
from loomfast.stores import SqliteEventStore

# The pure twin folds a log of this size, and its time per event stands for longer ones: its pass changes its
# maps in place, so a replay is linear in it too.
PURE_EVENTS = 100_000


def in_memory(size: int, rounds: int) -> dict[str, float]:
    """Per event: a mixed log of `size` events folded by the compiled kernel, a shorter one by its twin."""
    native = _kernels.load("native")["fold"]
    pure = _kernels.load("pure")["fold"]
    short = min(size, PURE_EVENTS)
    for_native, for_pure = list(logs.mixed(native, size)), list(logs.mixed(pure, short))
    if native.fold_events(None, for_native[:short]).to_json() != pure.fold_events(None, for_pure).to_json():
        raise AssertionError("the kernels fold the log to different states")

    def fold_native(number: int) -> float:
        begun = perf_counter()
        native.fold_events(None, for_native)
        return (perf_counter() - begun) / size

    def fold_pure(number: int) -> float:
        begun = perf_counter()
        pure.fold_events(None, for_pure)
        return (perf_counter() - begun) / short

    return interleaved_timers({"native": fold_native, "pure": fold_pure}, rounds, 1)


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
