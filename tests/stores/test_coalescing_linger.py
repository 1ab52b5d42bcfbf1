"""Group commit with a linger, under virtual time (F22): nobody is held back for longer than was said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loomfast.stores import CoalescingEventStore
from loomfast.testing import run_virtual
from tests.runtime.harness import ScriptedStore

from .logs import event, log


def test_with_linger_0_a_lone_append_is_not_held_back() -> None:
    async def main() -> None:
        store = CoalescingEventStore(ScriptedStore())
        await store.append(event("x", 0))
        await store.append_batch([event("x", 1)])
        assert asyncio.get_running_loop().time() == 0

    run_virtual(main())


def test_an_append_is_held_back_for_company_by_at_most_the_linger() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        inner = ScriptedStore()
        store = CoalescingEventStore(inner, max_linger_ms=50)

        async def later(seconds: float, name: str) -> float:
            await asyncio.sleep(seconds)
            await store.append(event(name, 0))
            return loop.time()

        ends = await asyncio.gather(later(0, "a"), later(0.03, "b"), later(0.049, "c"), later(0.051, "d"))
        assert [round(end, 6) for end in ends] == [0.05, 0.05, 0.05, 0.101]
        assert [ids for _, ids in inner.appends] == [["a-0", "b-0", "c-0"], ["d-0"]]

    run_virtual(main())


def test_the_time_an_append_waited_behind_a_flush_counts_as_linger() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        inner = ScriptedStore({0: lambda _: slow()})
        store = CoalescingEventStore(inner, max_linger_ms=50)
        first = asyncio.ensure_future(store.append(event("a", 0)))
        await asyncio.sleep(0.1)
        await store.append(event("b", 0))
        assert round(loop.time(), 6) == 0.25  # when a's flush, which began at 0.05, was over
        await first

    async def slow() -> None:
        await asyncio.sleep(0.2)

    run_virtual(main())


@pytest.mark.parametrize(
    "ending",
    [
        lambda store: store.append_batch(log("full", 9)),
        lambda store: store.append_batch([event("alone", 0)]),
        lambda store: store.close(),
    ],
    ids=["a full batch", "a batch that is alone", "closing"],
)
def test_the_linger_is_ended_at_once_by(ending: Any) -> None:
    async def main() -> None:
        store = CoalescingEventStore(ScriptedStore(), max_linger_ms=1_000, max_events=10)
        waiting = asyncio.ensure_future(store.append(event("x", 0)))
        await asyncio.sleep(0.1)
        await ending(store)
        await waiting
        assert round(asyncio.get_running_loop().time(), 6) == 0.1

    run_virtual(main())


def test_the_linger_is_waited_with_the_sleep_that_was_injected() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))

    async def main() -> None:
        store = CoalescingEventStore(ScriptedStore(), max_linger_ms=250, sleep=sleep)
        await store.append(event("x", 0))
        assert asyncio.get_running_loop().time() == 0

    run_virtual(main())
    assert slept == [0.25]
