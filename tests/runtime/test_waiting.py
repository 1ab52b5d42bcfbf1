"""Waiting for what is parked: what it costs, and what is said where nothing will ever wake it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

import loomfast as lf
from loomfast.stores import EventStoreDecorator
from tests.conftest import OpenStore
from tests.nodes.harness import memory_store, node, now_s, virtually
from tests.runtime.harness import runtime


class Looked(EventStoreDecorator):
    """A store that notes when an execution is looked at."""

    def __init__(self, inner: lf.EventStore) -> None:
        super().__init__(inner)
        self.at_s: list[float] = []

    async def fold(self, execution_id: str, state: lf.State | None = None) -> lf.State | None:
        self.at_s.append(now_s())
        return await super().fold(execution_id, state)


@lf.flow
async def asks(ctx: lf.WorkflowContext, input: Any) -> Any:
    return await ctx.suspend("go")


@lf.flow
async def naps(ctx: lf.WorkflowContext, seconds: float) -> None:
    await ctx.sleep(seconds)


def test_who_waits_for_long_looks_seldom_and_hears_soon_again_once_something_happened() -> None:
    async def main() -> None:
        store = memory_store()
        looked = Looked(store)
        async with node(looked, 1, asks) as here, node(store, 2, asks) as there:
            await (await here.start(asks, execution_id="x")).rest()
            waiting = asyncio.create_task(here.handle("x").result())
            await asyncio.sleep(600)
            pauses = [after - before for before, after in pairwise(looked.at_s)]
            assert pauses[0] == pytest.approx(0.25, abs=0.01)
            assert all(after > before - 0.001 for before, after in pairwise(pauses))
            assert pauses[-1] == pytest.approx(2.0, abs=0.01)
            await there.resume("x", "go", 7)
            answered_s = now_s()
            assert await waiting == 7
            assert now_s() - answered_s <= 2.01

    virtually(main)


def test_a_timer_that_nothing_fires_is_named_to_whoever_waits(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with node(memory_store(), 1, naps) as rt:
            handle = await rt.start(naps, 30, execution_id="x")
            waiting = asyncio.create_task(handle.result())
            await asyncio.sleep(34)
            assert caplog.records == []
            await asyncio.sleep(600)
            waiting.cancel()
            await asyncio.wait((waiting,))

    virtually(main)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("execution 'x' is waited for, and has been due since 20")
    assert "TimerService" in record.getMessage()


async def test_a_decorator_that_changes_batches_changes_all_that_is_written(open_store: OpenStore) -> None:
    class Audited(EventStoreDecorator):
        async def append_batch(self, envelopes: Sequence[lf.Envelope]) -> None:
            seen.extend(envelopes)
            await super().append_batch(envelopes)

    seen: list[lf.Envelope] = []
    async with open_store() as store, runtime(Audited(store), asks) as rt:
        await (await rt.start(asks, execution_id="x")).rest()
        await (await rt.resume("x", "go", 1)).result()
        assert seen == await store.read("x")
