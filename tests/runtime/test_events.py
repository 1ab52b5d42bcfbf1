"""Following one execution: every durable event once, in order, whoever drives it, however often one stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import loomfast as lf
from loomfast._runtime import polling
from tests.conftest import OpenStore
from tests.runtime.harness import DyingStore, runtime, turns


@lf.step
async def word(n: int) -> str:
    await turns(3)
    return f"word {n}"


@lf.flow(id="tell")
async def tell(ctx: lf.WorkflowContext, words: int) -> str:
    for n in range(words):
        await ctx.stream("text", await ctx.run(word, n))
    await ctx.suspend("go")
    for n in range(words):
        await ctx.stream("text", f"and {n}")
    return "told"


@pytest.fixture
def never_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a poll take for ever: whoever is not told of a change hangs."""
    monkeypatch.setattr(polling, "POLL_S", 1_000_000)


async def collected(events: AsyncIterator[lf.Envelope], until: str | None = None) -> list[int]:
    """The sequences of what comes, to its end or to the first event of a type."""
    sequences = []
    async for event in events:
        sequences.append(event.sequence)
        if event.event_type == until:
            break
    return sequences


async def test_who_follows_an_execution_that_runs_here_is_told_of_every_event_and_never_polls(
    open_store: OpenStore, never_polled: None
) -> None:
    async with open_store() as store, lf.WorkflowRuntime(store) as rt:
        handle = await rt.start(tell, 5, execution_id="x")
        following = asyncio.create_task(collected(handle.events()))
        await handle.rest()
        late = asyncio.create_task(collected(rt.handle("x").events(after=4)))
        await rt.resume("x", "go")
        log = [event.sequence for event in await _whole(store)]
        assert await following == log
        assert await late == log[5:]


async def _whole(store: lf.EventStore) -> list[lf.Envelope]:
    while (await store.fold("x")).ended is None:  # type: ignore[union-attr]  # it has been started
        await asyncio.sleep(0)
    return await store.read("x")


async def test_who_follows_an_execution_that_rests_is_told_of_its_cancellation(
    open_store: OpenStore, never_polled: None
) -> None:
    async with open_store() as store, lf.WorkflowRuntime(store) as rt:
        handle = await rt.start(tell, 1, execution_id="x")
        rested = await handle.rest()
        events = rt.handle("x").events(after=rested.sequence)
        coming = asyncio.create_task(anext(events))
        await turns(20)
        assert not coming.done()
        await rt.cancel("x", "enough")
        assert (await coming).event_type == "EXECUTION_CANCELLED"
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_an_execution_started_without_an_id_can_be_followed_before_anything_of_it_is_durable(
    open_store: OpenStore, never_polled: None
) -> None:
    async with open_store() as store, lf.WorkflowRuntime(store) as rt:
        handle = await rt.start(tell, 1)
        rested = await collected(handle.events(), until="EXECUTION_SUSPENDED")
        assert rested == [event.sequence for event in await store.read(handle.execution_id)]


async def test_what_another_process_drives_is_found_by_looking(open_store: OpenStore) -> None:
    async with open_store() as store, lf.WorkflowRuntime(store) as driving, runtime(store) as watching:
        await driving.start(tell, 3, execution_id="x")
        events = asyncio.create_task(collected(watching.handle("x").events()))
        await driving.handle("x").rest()
        await driving.resume("x", "go")
        await driving.handle("x").result()
        assert await events == [event.sequence for event in await store.read("x")]


async def test_from_any_event_on_it_goes_on_with_the_next_one_and_behind_the_end_there_is_none(
    open_store: OpenStore,
) -> None:
    async with open_store() as store, lf.WorkflowRuntime(store) as rt:
        await (await rt.start(tell, 2, execution_id="x")).rest()
        await (await rt.resume("x", "go")).result()
        whole = [event.sequence for event in await store.read("x")]
        for seen in whole:
            assert await collected(rt.handle("x").events(after=seen)) == whole[seen + 1 :]


async def test_an_iteration_that_is_cancelled_anywhere_goes_on_where_it_was(open_store: OpenStore) -> None:
    async with open_store() as store, lf.WorkflowRuntime(store) as rt:
        await rt.start(tell, 12, execution_id="x")
        events = rt.handle("x").events(page_events=3)
        seen: list[int] = []
        patience = 0
        while True:
            coming = asyncio.ensure_future(anext(events))
            await turns(patience)
            coming.cancel()
            try:
                event = await coming
            except asyncio.CancelledError:
                patience += 1 + patience // 4  # one turn more each time, until it is enough
                continue
            patience = 0
            seen.append(event.sequence)
            if event.event_type == "EXECUTION_SUSPENDED":
                break
        assert seen == [event.sequence for event in await store.read("x")]
        assert rt._driven.watchers == {}


async def test_a_heartbeat_is_a_timeout_around_the_next_event(open_store: OpenStore) -> None:
    async with open_store() as store, lf.WorkflowRuntime(store) as rt:
        rested = await (await rt.start(tell, 1, execution_id="x")).rest()
        events = rt.handle("x").events(after=rested.sequence)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(events)
        assert events.sequence == rested.sequence
        await rt.resume("x", "go")
        assert (await anext(events)).sequence == rested.sequence + 1


async def test_a_slow_follower_holds_one_page_and_nobody_up(open_store: OpenStore) -> None:
    async with open_store() as store, lf.WorkflowRuntime(store) as rt:
        handle = await rt.start(tell, 50, execution_id="x")
        events = handle.events(page_events=4)
        first = await anext(events)
        await handle.rest()  # the execution does not wait for who follows it
        seen = [first.sequence]
        while seen[-1] < 20:
            seen.append((await anext(events)).sequence)
            assert len(events._page) <= 3
            assert rt._driven.watchers == {}
        seen += await collected(events, until="EXECUTION_SUSPENDED")
        assert seen == [event.sequence for event in await store.read("x")]


async def test_who_waits_is_stopped_from_outside_and_another_one_goes_on_from_there(
    open_store: OpenStore, never_polled: None
) -> None:
    async with open_store() as store, lf.WorkflowRuntime(store) as rt:
        rested = await (await rt.start(tell, 1, execution_id="x")).rest()
        waiting, reading = rt.handle("x").events(after=rested.sequence), rt.handle("x").events()
        coming = asyncio.create_task(collected(waiting))
        await anext(reading)
        while rt._driven.watchers == {}:
            await asyncio.sleep(0)
        for events in (waiting, reading):
            events.stop()
            events.stop()
        assert await coming == []
        assert await collected(reading) == []
        assert await collected(rt.handle("x").events(after=reading.sequence), "EXECUTION_SUSPENDED") == list(
            range(1, rested.sequence + 1)
        )


async def test_what_is_not_there_to_be_followed_is_said(open_store: OpenStore) -> None:
    async with open_store() as store, lf.WorkflowRuntime(store) as rt:
        with pytest.raises(lf.UnknownExecutionError):
            await anext(rt.handle("y").events())
        with pytest.raises(lf.UnknownExecutionError):
            await anext(rt.handle("y").events(after=3))
        rested = await (await rt.start(tell, 1, execution_id="x")).rest()
        with pytest.raises(lf.BeyondLogError) as beyond:
            await anext(rt.handle("x").events(after=rested.sequence + 1))
        assert beyond.value.last_sequence == rested.sequence
        for wrong in (-1, True, "3", 1.0):
            with pytest.raises(lf.BadInputError, match="after="):
                rt.handle("x").events(after=wrong)  # type: ignore[arg-type]  # that is the point
        for wrong in (0, True, None):
            with pytest.raises(lf.BadInputError, match="page_events="):
                rt.handle("x").events(page_events=wrong)  # type: ignore[arg-type]  # that is the point


async def test_who_asks_for_what_was_truncated_is_told_where_to_go_on(open_store: OpenStore) -> None:
    async with open_store() as store, lf.WorkflowRuntime(store) as rt:
        rested = await (await rt.start(tell, 3, execution_id="x")).rest()
        await rt.snapshot("x")
        await rt.truncate_prefix("x", 6)
        with pytest.raises(lf.PrefixTruncatedError) as gone:
            await anext(rt.handle("x").events(after=2))
        events = rt.handle("x").events(after=gone.value.first_available - 1)
        assert await collected(events, until="EXECUTION_SUSPENDED") == list(range(6, rested.sequence + 1))


async def test_a_run_that_cannot_go_on_is_said_behind_what_it_left_and_its_recovery_is_followed(
    never_polled: None,
) -> None:
    async with DyingStore(events=4) as store, lf.WorkflowRuntime(store, batch_events=1) as rt:
        events = (await rt.start(tell, 3, execution_id="x")).events()
        seen = []
        with pytest.raises(lf.StorageWriteError):  # noqa: PT012  # the point is what came before
            async for event in events:
                seen.append(event.sequence)
        assert seen == [0, 1, 2, 3]
        store.left = 1_000
        handle = await rt.recover("x")
        seen += await collected(events, until="EXECUTION_SUSPENDED")
        assert seen == list(range((await handle.rest()).sequence + 1))


async def test_who_follows_a_run_that_is_closed_is_told_so_and_another_runtime_goes_on(
    open_store: OpenStore, never_polled: None
) -> None:
    begun = asyncio.Event()

    @lf.step
    async def endless() -> None:
        begun.set()
        await asyncio.Event().wait()

    @lf.flow(id="stuck")
    async def stuck(ctx: lf.WorkflowContext, _: Any) -> None:
        await ctx.stream("text", "so far")
        await ctx.run(endless)

    @lf.flow(id="stuck")
    async def mended(ctx: lf.WorkflowContext, _: Any) -> None:
        await ctx.stream("text", "so far")

    async with open_store() as store:
        async with lf.WorkflowRuntime(store, close_grace_s=0) as rt:
            events = (await rt.start(stuck, execution_id="x")).events()
            chunk = await anext(events)
            while chunk.event_type != "STREAM_CHUNK":
                chunk = await anext(events)
            await begun.wait()
            coming = asyncio.create_task(collected(events))
        with pytest.raises(lf.RuntimeClosedError):
            await coming
        async with lf.WorkflowRuntime(store, flows=[mended]) as rt:
            await rt.recover("x")
            left = await collected(rt.handle("x").events(after=events.sequence))
            assert [chunk.sequence, *left][-1] == await store.last_sequence("x")


async def test_who_follows_a_run_that_another_process_takes_over_goes_on_with_what_that_one_does(
    open_store: OpenStore,
) -> None:
    begun, end = asyncio.Event(), asyncio.Event()

    @lf.step(id="work")
    async def slow() -> str:
        begun.set()
        await end.wait()
        return "mine"

    @lf.step(id="work")
    async def quick() -> str:
        return "the other's"

    @lf.flow(id="contested")
    async def left(ctx: lf.WorkflowContext, _: Any) -> Any:
        return await ctx.run(slow)

    @lf.flow(id="contested")
    async def taken(ctx: lf.WorkflowContext, _: Any) -> Any:
        return await ctx.run(quick)

    async with open_store() as store, lf.WorkflowRuntime(store) as here:
        coming = asyncio.create_task(collected((await here.start(left, execution_id="x")).events()))
        await begun.wait()
        async with lf.WorkflowRuntime(store, flows=[taken]) as there:
            assert await (await there.recover("x")).result() == "the other's"
        end.set()  # and the next write here is refused
        assert await coming == [event.sequence for event in await store.read("x")]


async def test_who_follows_behind_a_replica_reads_what_is_durable(never_polled: None) -> None:
    class Behind(lf.MemoryEventStore):
        """A replica that never hears of anything."""

    store = lf.ReplicaReadEventStore(lf.MemoryEventStore(), Behind())
    async with store, lf.WorkflowRuntime(store) as rt:
        handle = await rt.start(tell, 1, execution_id="x")
        seen = await collected(handle.events(), until="EXECUTION_SUSPENDED")
        assert seen == list(range((await handle.rest()).sequence + 1))
