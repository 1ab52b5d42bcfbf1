"""Group commit for any store (F22): who shares a flush, who waits, who is rejected, and who is told what."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from loomfast._errors import (
    BadInputError,
    DuplicateSequenceError,
    StaleFenceError,
    StorageWriteError,
    StoreBusyError,
    StoreClosedError,
)
from loomfast._kernels import Envelope
from loomfast.stores import CoalescingEventStore
from tests.runtime.harness import ScriptedStore, turns

from .logs import event, log


class HeldStore(ScriptedStore):
    """A memory store whose appends wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def _play(self, verb: str, envelopes: Sequence[Envelope]) -> None:
        await super()._play(verb, envelopes)
        await self.go.wait()


def started(*calls: Any) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(call) for call in calls]


# --- what goes together --------------------------------------------------------------------------


async def test_appends_of_independent_callers_share_one_batch() -> None:
    inner = ScriptedStore()
    store = CoalescingEventStore(inner)
    await asyncio.gather(
        *(store.append(event(f"x{n}", 0)) for n in range(10)), store.append_batch(log("y", 2))
    )
    assert inner.appends == [("append_batch", [*(f"x{n}-0" for n in range(10)), "y-0", "y-1"])]


async def test_nobody_is_told_stored_before_the_commit_that_holds_their_events() -> None:
    inner = HeldStore()
    store = CoalescingEventStore(inner)
    tasks = started(*(store.append(event(f"x{n}", 0)) for n in range(5)))
    await turns(20)
    assert len(inner.appends) == 1
    assert not any(task.done() for task in tasks)
    assert await inner.read_all() == []
    inner.go.set()
    await asyncio.gather(*tasks)
    assert len(await inner.read_all()) == 5


async def test_what_comes_while_a_batch_is_under_way_goes_into_the_next_one() -> None:
    inner = HeldStore()
    store = CoalescingEventStore(inner)
    tasks = started(store.append(event("a", 0)))
    await turns(3)
    tasks += started(*(store.append(event(f"b{n}", 0)) for n in range(4)))
    await turns(3)
    inner.go.set()
    await asyncio.gather(*tasks)
    assert [ids for _, ids in inner.appends] == [["a-0"], ["b0-0", "b1-0", "b2-0", "b3-0"]]


async def test_a_one_envelope_batch_is_flushed_alone_and_in_its_turn() -> None:
    """ADR 0103, D2: the single retry of a start must not share a batch with anybody."""
    inner = ScriptedStore()
    store = CoalescingEventStore(inner)
    await asyncio.gather(
        store.append(event("a", 0)),
        store.append(event("b", 0)),
        store.append_batch([event("alone", 0)]),
        store.append_batch([event("alone too", 0)]),
        store.append(event("a", 1)),
        store.append(event("c", 0)),
    )
    assert inner.appends == [
        ("append_batch", ["a-0", "b-0"]),
        ("append_batch", ["alone-0"]),
        ("append_batch", ["alone too-0"]),
        ("append_batch", ["a-1", "c-0"]),
    ]


async def test_a_callers_batch_is_never_split_and_may_be_larger_than_a_batch() -> None:
    inner = ScriptedStore()
    store = CoalescingEventStore(inner, max_events=5)
    await asyncio.gather(
        store.append_batch(log("a", 3)),
        store.append_batch(log("b", 4)),
        store.append_batch(log("c", 20)),
        store.append(event("d", 0)),
        store.append_batch(log("e", 4)),
    )
    assert [len(ids) for _, ids in inner.appends] == [3, 4, 20, 5]


async def test_the_order_of_one_executions_appends_is_kept() -> None:
    store = CoalescingEventStore(ScriptedStore(), max_events=7, max_waiting_events=20)
    calls = [
        store.append(event("x", n)) if n % 3 else store.append_batch([event("x", n)]) for n in range(100)
    ]
    await asyncio.gather(*calls)
    assert [one.sequence for one in await store.read("x")] == list(range(100))


async def test_the_queue_is_bounded_and_whoever_comes_later_gets_in_in_order() -> None:
    inner = ScriptedStore()
    store = CoalescingEventStore(inner, max_events=4, max_waiting_events=10)
    most: list[int] = []
    inner.script = {n: lambda _: most.append(store.waiting_events) for n in range(100)}
    await asyncio.gather(
        *(store.append(event("x", n)) for n in range(50)), store.append_batch(log("large", 30))
    )
    assert max(most) == 30  # by itself, since it would never fit otherwise
    assert all(waiting <= 10 for waiting in most[:-1])
    assert [p.event.id for p in await store.read_all()] == [
        *(f"x-{n}" for n in range(50)),
        *(f"large-{n}" for n in range(30)),
    ]
    assert store.waiting_events == 0


# --- refusals ------------------------------------------------------------------------------------


async def test_of_64_appends_of_which_one_is_a_duplicate_63_are_stored() -> None:
    inner = ScriptedStore()
    store = CoalescingEventStore(inner)
    await inner.append(event("x30", 0))
    inner.appends.clear()
    results = await asyncio.gather(
        *(store.append(event(f"x{n}", 0)) for n in range(64)), return_exceptions=True
    )
    assert [n for n, result in enumerate(results) if result is not None] == [30]
    refused = results[30]
    assert isinstance(refused, DuplicateSequenceError)
    assert refused.execution_id == "x30"
    assert len(await inner.read_all()) == 64
    assert len(inner.appends[0][1]) == 64
    assert len(inner.appends) == 1 + 2 * 6  # halved until the offender stands alone


async def test_of_64_appends_of_which_one_is_a_duplicate_all_are_rejected_without_isolation() -> None:
    inner = ScriptedStore()
    store = CoalescingEventStore(inner, isolate=False)
    await inner.append(event("x30", 0))
    inner.appends.clear()
    results = await asyncio.gather(
        *(store.append(event(f"x{n}", 0)) for n in range(64)), return_exceptions=True
    )
    assert all(isinstance(r, DuplicateSequenceError) and r.execution_id == "x30" for r in results)
    assert len(await inner.read_all()) == 1
    assert len(inner.appends) == 1


async def test_an_outage_is_waited_for_once_and_told_to_everybody() -> None:
    def lost(envelopes: Any) -> None:
        raise StorageWriteError("x", 0, "no server") from ConnectionRefusedError()

    inner = ScriptedStore(dict.fromkeys(range(9), lost))
    async with CoalescingEventStore(inner) as store:
        calls = started(*(store.append(event(f"x{n}", 0)) for n in range(16)))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {StorageWriteError}
    assert len(inner.appends) <= 2


async def test_isolation_keeps_the_order_and_finds_every_offender() -> None:
    inner = ScriptedStore()
    store = CoalescingEventStore(inner)
    await inner.append_batch([event("taken", 0), event("fenced", 0)])
    await inner.acquire_fence("fenced")
    calls = []
    for n in range(20):
        calls.append(store.append(event("x", n)))
        calls.append(store.append(event("taken", 0) if n % 2 else event("fenced", 1)))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results[0::2]] == [type(None)] * 20
    assert {type(result) for result in results[1::4]} == {StaleFenceError}
    assert {type(result) for result in results[3::4]} == {DuplicateSequenceError}
    assert [one.sequence for one in await store.read("x")] == list(range(20))


async def test_a_caller_whose_predecessor_was_rejected_leaves_no_gap() -> None:
    inner = ScriptedStore()
    store = CoalescingEventStore(inner)
    await inner.append(event("x", 0))
    results = await asyncio.gather(
        store.append(event("x", 0)),
        store.append(event("x", 1)),
        store.append(event("x", 3)),
        return_exceptions=True,
    )
    assert [type(result).__name__ for result in results] == [
        "DuplicateSequenceError",
        "NoneType",
        "MalformedEventError",
    ]


def doubtful() -> StorageWriteError:
    error = StorageWriteError("x0", 0, "the server was lost before it answered")
    error.doubtful = True
    return error


@pytest.mark.parametrize(
    "error",
    [StoreBusyError("x0", 0, "locked"), StoreClosedError("x0", "gone"), doubtful()],
    ids=["busy", "closed", "doubtful"],
)
async def test_an_error_that_blames_no_event_is_everybodys_at_once(
    error: Exception,
) -> None:
    inner = ScriptedStore({0: error})
    store = CoalescingEventStore(inner)
    calls = [store.append(event(f"x{n}", 0)) for n in range(8)]
    assert await asyncio.gather(*calls, return_exceptions=True) == [error] * 8
    assert len(inner.appends) == 1
    await store.append(event("x", 0))


async def test_an_event_that_the_storage_cannot_take_is_isolated_too() -> None:
    """F22, beyond the contract: also for errors that show only when the batch is written."""

    class Picky(ScriptedStore):
        async def _play(self, verb: str, envelopes: Sequence[Envelope]) -> None:
            await super()._play(verb, envelopes)
            if any(one.execution_id == "large" for one in envelopes):
                raise StorageWriteError(envelopes[0].execution_id, 0, "string or blob too big")

    inner = Picky()
    store = CoalescingEventStore(inner)
    names = ["a", "b", "large", "c", "d"]
    results = await asyncio.gather(*(store.append(event(n, 0)) for n in names), return_exceptions=True)
    assert [type(result) for result in results].count(StorageWriteError) == 1
    assert {p.event.execution_id for p in await store.read_all()} == {"a", "b", "c", "d"}


async def test_a_write_that_is_not_waited_for_shares_the_batch_and_is_not_recalled() -> None:
    inner = HeldStore()
    store = CoalescingEventStore(inner)
    answers = [store.write((event(f"x{n}", 0),)) for n in range(3)]
    answers.append(store.write(tuple(log("y", 2))))
    answers[1].cancel()
    inner.go.set()
    await store.append(event("z", 0))
    assert [await answers[n] for n in (0, 2, 3)] == [None] * 3
    assert inner.appends == [("append_batch", ["x0-0", "x1-0", "x2-0", "y-0", "y-1", "z-0"])]
    refused = await store.write((event("z", 0),))
    assert isinstance(refused, DuplicateSequenceError)
    await store.close()
    with pytest.raises(StoreClosedError):
        store.write((event("z", 1),))


async def test_buffered_writes_are_refused_at_the_flush_once_their_execution_is_fenced() -> None:
    inner = ScriptedStore()
    store = CoalescingEventStore(inner)
    await store.append(event("x", 0))
    waiting = asyncio.ensure_future(store.append(event("x", 1)))
    token = await store.acquire_fence("x")
    with pytest.raises(StaleFenceError) as caught:
        await waiting
    assert (caught.value.fence, caught.value.current) == (None, token)
    await store.append(event("x", 1, fence=token))


# --- cancelling, closing, loops ------------------------------------------------------------------


async def test_a_caller_that_goes_away_before_its_batch_began_is_taken_back() -> None:
    inner = HeldStore()
    store = CoalescingEventStore(inner, max_waiting_events=3)
    tasks = started(*(store.append(event(f"x{n}", 0)) for n in range(6)))
    late = started(store.append_batch(log("y", 2)))
    await turns(3)
    under_way, queued, before_the_queue = tasks[0], late[0], tasks[4]
    assert len(inner.appends[0][1]) == 3
    for task in (under_way, queued, before_the_queue):
        task.cancel()
    await asyncio.wait((under_way, queued, before_the_queue), timeout=5)
    assert all(task.cancelled() for task in (under_way, queued, before_the_queue))  # at once
    inner.go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    stored = {p.event.execution_id for p in await store.read_all()}
    assert stored == {"x0", "x1", "x2", "x3", "x5"}  # x0 was under way, and happened whole
    assert store.waiting_events == 0


async def test_who_gives_up_before_a_full_queue_is_kept_no_longer() -> None:
    inner = HeldStore()
    store = CoalescingEventStore(inner, max_waiting_events=3)
    first = started(*(store.append_batch(log(f"x{n}", 3)) for n in range(2)))
    await turns(5)
    body = event("y", 0).body
    held = sys.getrefcount(body)
    given_up = started(*(store.append(Envelope("y", n, "note", body, 0)) for n in range(100)))
    await turns(5)
    assert sys.getrefcount(body) == held + 100
    for task in given_up:
        task.cancel()
    await asyncio.wait(given_up)
    del given_up, task
    assert sys.getrefcount(body) == held
    inner.go.set()
    await asyncio.gather(*first)
    assert [written for _, written in inner.appends] == [[f"x{n}-{k}" for k in range(3)] for n in range(2)]


async def test_closing_flushes_what_waits_and_refuses_what_comes_after() -> None:
    inner = HeldStore()
    store = CoalescingEventStore(inner, max_linger_ms=60_000, max_events=3, max_waiting_events=6)
    tasks = started(*(store.append(event(f"x{n}", 0)) for n in range(10)))
    await turns(3)
    closing = started(store.close(), store.close())
    await turns(3)
    with pytest.raises(StoreClosedError):
        await store.append(event("late", 0))
    assert not any(task.done() for task in (*tasks, *closing))
    inner.go.set()
    await asyncio.gather(*tasks, *closing)
    assert len(inner._order) == 10


async def test_whoever_waits_when_the_loop_ends_is_rejected_and_not_forgotten() -> None:
    inner = HeldStore()
    store = CoalescingEventStore(inner, max_waiting_events=2)
    tasks = started(*(store.append(event(f"x{n}", 0)) for n in range(5)))
    await turns(3)
    flusher = store._flusher
    assert flusher is not None
    flusher.cancel()  # what asyncio.run does at its end
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [StoreClosedError] * 5
    inner.go.set()
    await store.append(event("y", 0))
    assert store.waiting_events == 0


async def test_whoever_waits_is_rejected_also_when_the_flush_never_had_a_turn() -> None:
    store = CoalescingEventStore(ScriptedStore())
    waiting = store.write((event("x", 0),))
    flusher = store._flusher
    assert flusher is not None
    flusher.cancel()
    assert isinstance(await waiting, StoreClosedError)
    await store.append(event("y", 0))  # and whoever goes on can


@pytest.mark.parametrize(("linger_ms", "begun"), [(0, 1), (60_000, 0)])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_loop_closed_under_a_flush_ends_what_waited_there_and_nothing_else(
    goes_on: bool, linger_ms: int, begun: int
) -> None:
    inner = HeldStore()
    store = CoalescingEventStore(inner, max_linger_ms=linger_ms)

    async def begin() -> None:
        store.write((event("x", 0),))
        await turns(3)

    async def go_on() -> None:
        inner.go = asyncio.Event()  # the other one is bound to its loop
        inner.go.set()
        if goes_on:
            await store.append_batch((event("y", 0),))
            gc.collect()  # what the other loop left behind is of no effect
            await store.append_batch((event("y", 1),))
        await store.close()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    assert len(inner.appends) == begun
    asyncio.run(go_on())
    written = [ids for _, ids in inner.appends[begun:]]
    assert written == ([["y-0"], ["y-1"]] if goes_on else [])
    with pytest.raises(StoreClosedError):
        asyncio.run(inner.read("y"))


async def test_a_second_event_loop_is_refused_while_the_first_one_waits() -> None:
    inner = HeldStore()
    store = CoalescingEventStore(inner)
    waiting = asyncio.ensure_future(store.append(event("x", 0)))
    await turns(3)
    with pytest.raises(BadInputError, match="one event loop"):
        await asyncio.to_thread(lambda: asyncio.run(store.append(event("y", 0))))
    inner.go.set()
    await waiting
    await asyncio.to_thread(lambda: asyncio.run(store.append(event("y", 0))))


async def test_the_error_of_a_refused_append_is_freed_without_the_cycle_collector() -> None:
    """F37."""
    store = CoalescingEventStore(ScriptedStore())
    await store.append(event("x", 0))
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(o, DuplicateSequenceError) for o in gc.get_objects())
        for _ in range(50):
            with pytest.raises(DuplicateSequenceError):
                await store.append(event("x", 0))
            await turns(2)
        after = sum(isinstance(o, DuplicateSequenceError) for o in gc.get_objects())
    finally:
        gc.enable()
    assert after - before <= 2


@pytest.mark.parametrize(
    "options",
    [{"max_linger_ms": -1}, {"max_linger_ms": float("nan")}, {"max_events": 0}, {"max_waiting_events": 0}],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInputError, match=next(iter(options))):
        CoalescingEventStore(ScriptedStore(), **options)


def test_only_a_store_can_be_decorated() -> None:
    with pytest.raises(BadInputError, match="EventStore"):
        CoalescingEventStore("sqlite:///x")  # type: ignore[arg-type]  # what a user might try
