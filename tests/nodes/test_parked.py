"""What a wake costs does not depend on how many executions are parked, and these cost no memory (F37).

Nothing is timed: what is asked of the store is counted, and what the process holds.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import loomfast as lf
from loomfast.stores import EventStoreDecorator, Wake
from loomfast.stores import _sqlite_writer as writer
from loomfast.stores._memory_shared import Shared
from loomfast.stores._memory_timers import MemoryTimerStore
from loomfast.testing import VirtualClock
from tests.nodes.harness import DAY, MINUTE, memory_store, node, virtually
from tests.runtime.harness import runtime

WOKEN = 10


@lf.step
async def noted() -> None:
    pass


@lf.flow
async def sleeper(ctx: lf.WorkflowContext, seconds: float) -> None:
    await ctx.sleep(seconds)
    await ctx.run(noted)


class CountingTimers(MemoryTimerStore):
    """Counts the looks for what is due, and what these find."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.asked: Counter[str] = Counter()

    async def due_wakes(self, at_ms: int, *, after: Wake | None = None, limit: int = 100) -> list[Wake]:
        found = await super().due_wakes(at_ms, after=after, limit=limit)
        self.asked.update(look=1, due=len(found))
        return found


class CountingStore(EventStoreDecorator):
    """Counts what else is asked of a memory store, and the events it is given."""

    def __init__(self) -> None:
        inner = memory_store()
        inner._timers = counting = CountingTimers(inner._shared)
        super().__init__(inner)
        self.asked = counting.asked

    async def append_batch(self, envelopes: Sequence[lf.Envelope]) -> None:
        self.asked.update(append=1, event=len(envelopes))
        await super().append_batch(envelopes)

    def write(self, envelopes: Sequence[lf.Envelope]) -> asyncio.Future[Exception | None] | None:
        self.asked.update(append=1, event=len(envelopes))
        return super().write(envelopes)

    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[lf.Envelope]:
        self.asked["read"] += 1
        return await super().read_range(execution_id, first, last)

    async def fold(self, execution_id: str, state: lf.State | None = None) -> lf.State | None:
        self.asked["fold"] += 1
        return await super().fold(execution_id, state)

    async def list_executions(self, **page: Any) -> list[lf.ExecutionSummary]:
        self.asked["list"] += 1
        return await super().list_executions(**page)


def asked_by_wakes(parked: int) -> Counter[str]:
    """What is asked of the store to wake 10 of so many."""
    asked: Counter[str] = Counter()

    async def main() -> None:
        store = CountingStore()
        async with node(store, 1, sleeper) as rt:
            for number in range(parked):
                seconds = MINUTE if number % (parked // WOKEN) == 0 else DAY
                await (await rt.start(sleeper, seconds, execution_id=f"x{number}")).rest()
            await VirtualClock().sleep(2 * MINUTE)
            service = lf.TimerService(rt)
            store.asked.clear()
            await service.tick()
            for number in range(0, parked, parked // WOKEN):
                await rt.handle(f"x{number}").result()
                store.asked["fold"] -= 1  # the handle's own
            await service.tick()
            await service.close()
            asked.update(store.asked)

    virtually(main)
    return asked


def test_a_wake_asks_the_store_for_the_same_however_many_are_parked() -> None:
    few, many = asked_by_wakes(100), asked_by_wakes(2_000)
    assert few == many
    assert few["fold"] == WOKEN
    assert few["append"] == 2 * WOKEN  # the answer; the step and the end
    assert few["event"] == 5 * WOKEN
    assert few["due"] == WOKEN
    assert few["look"] == 4  # what is due, and what will be next, twice


async def test_parked_executions_cost_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_HEADS", 100)
    path = tmp_path / "parked.db"
    async with (
        await lf.SqliteEventStore.open(path, synchronous="NORMAL") as store,
        runtime(store) as rt,
    ):
        service = lf.TimerService(rt)

        async def park(first: int, count: int) -> None:
            for at in range(first, first + count, 50):
                await asyncio.gather(*(start(number) for number in range(at, at + 50)))

        async def start(number: int) -> None:
            await (await rt.start(sleeper, DAY, execution_id=f"x{number}")).rest()

        await park(0, 500)
        gc.collect()
        tracemalloc.start()
        await park(500, 500)
        gc.collect()
        objects, (memory, _) = len(gc.get_objects()), tracemalloc.get_traced_memory()
        await park(1_000, 1_000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - memory
        tracemalloc.stop()
        await service.close()
        assert len(gc.get_objects()) - objects < 200
        assert grown < 100_000
