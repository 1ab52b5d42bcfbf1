"""Write-behind: order, drains, failures, and closing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import loomfast as lf
from loomfast._runtime.hooks import Hooks
from tests.conftest import OpenStore
from tests.runtime.harness import ScriptedStore, StillClock, kinds, runtime


async def test_events_reach_the_store_in_order_and_in_few_appends() -> None:
    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        for n in range(2_000):
            ctx.emit("note", n)

    store = ScriptedStore()
    async with runtime(store) as rt:
        handle = await rt.start(flow)
        await handle.result()
        events = await store.read(handle.execution_id)
        assert [event.payload for event in events[1:-1]] == list(range(2_000))
    assert len(store.appends) < 10


async def test_a_flow_that_awaits_its_emits_is_held_back_by_a_slow_store() -> None:
    from loomfast._runtime.journal import QUEUE_EVENTS

    written = 0
    most = 0

    class Slow(lf.MemoryEventStore):
        async def append_batch(self, envelopes: Any) -> None:
            nonlocal written
            await asyncio.sleep(0)
            await super().append_batch(envelopes)
            written += len(envelopes)

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        nonlocal most
        for n in range(4 * QUEUE_EVENTS):
            await ctx.emit("note", n)
            most = max(most, n - written)

    async with runtime(Slow()) as rt:
        await (await rt.start(flow)).result()
    assert most <= QUEUE_EVENTS + 1


async def test_a_failed_write_ends_the_run_whatever_the_flow_catches() -> None:
    reported: list[lf.StorageWriteError] = []
    reached: list[str] = []

    @lf.step
    async def after(_: None) -> None:
        reached.append("effect")

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        ctx.emit("note")
        for _ in range(3):
            try:
                await asyncio.sleep(0.01)
                await ctx.run(after)
            except BaseException as error:
                reached.append(type(error).__name__)

    store = ScriptedStore({1: OSError("disk gone")})
    async with runtime(store, on_storage_error=reported.append, batch_events=1) as rt:
        handle = await rt.start(flow)
        with pytest.raises(lf.StorageWriteError, match="disk gone") as caught:
            await handle.rest()
        assert (caught.value.execution_id, caught.value.sequence) == (handle.execution_id, 1)
        assert reported == [caught.value]
        assert "effect" not in reached
        assert kinds(await store.read(handle.execution_id)) == ["EXECUTION_STARTED"]


async def test_an_execution_that_lost_its_store_is_finished_by_recovery() -> None:
    calls: list[str] = []

    @lf.step
    async def effect(_: None) -> str:
        calls.append("effect")
        return "done"

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        ctx.emit("before")
        outcome = await ctx.run(effect)
        ctx.emit("after")
        return outcome

    lost = 0
    while True:
        calls.clear()
        store = ScriptedStore({lost: OSError("gone")})
        async with runtime(store, flow, batch_events=1) as rt:
            handle = await rt.start(flow)
            try:
                await handle.rest()
            except (lf.StorageWriteError, lf.UnknownExecutionError) as error:
                failed = error
            else:
                break  # there is no append of this number: every one has been lost once
            store.script = {}
            if lost:
                assert isinstance(failed, lf.StorageWriteError)
                await rt.recover(handle.execution_id)
                assert await handle.result() == "done"
                stamped = [kind for kind in kinds(await store.read(handle.execution_id)) if "*" in kind]
                assert stamped == ["before*", "after*"]
        lost += 1
    assert lost == 6  # one for each event of the log


async def test_closing_records_no_outcome_and_recovery_goes_on_from_there(open_store: OpenStore) -> None:
    """F19, the part that is about the log."""
    calls: list[str] = []
    begun = asyncio.Event()

    @lf.step
    async def long(_: None) -> str:
        calls.append("long")
        begun.set()
        if len(calls) == 1:
            await asyncio.sleep(3600)
        return "done"

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        ctx.emit("before")
        return await ctx.run(long)

    async with open_store() as store:
        async with runtime(store, flow) as rt:
            handle = await rt.start(flow)
            await begun.wait()
        assert kinds(await store.read(handle.execution_id)) == [
            "EXECUTION_STARTED",
            "before*",
            "STEP_STARTED",
        ]
        with pytest.raises(lf.RuntimeClosedError):
            await rt.start(flow)
        async with runtime(store, flow) as rt:
            await rt.recover(handle.execution_id)
            assert await rt.handle(handle.execution_id).result() == "done"
    assert calls == ["long", "long"]


async def test_a_loop_that_is_torn_down_records_no_outcome(tmp_path: Any) -> None:
    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        ctx.emit("before")
        await asyncio.sleep(3600)

    def first_process() -> str:
        async def main() -> str:
            store = await lf.SqliteEventStore.open(tmp_path / "log.db")
            try:
                rt = runtime(store, flow)
                handle = await rt.start(flow, execution_id="x")
                while await store.last_sequence("x") != 1:
                    await asyncio.sleep(0)
                return handle.execution_id
            finally:
                await store.close()

        return asyncio.run(main())

    execution = await asyncio.to_thread(first_process)
    async with await lf.SqliteEventStore.open(tmp_path / "log.db") as store:
        assert kinds(await store.read(execution)) == ["EXECUTION_STARTED", "before*"]


async def test_cancelling_a_waiter_does_not_cancel_the_execution(open_store: OpenStore) -> None:
    going = asyncio.Event()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        await going.wait()
        return "done"

    async with open_store() as store, runtime(store, clock=StillClock()) as rt:
        handle = await rt.start(flow)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await handle.result()
        going.set()
        assert await handle.result() == "done"


async def test_a_step_cancelled_by_the_flow_is_recorded_and_unsettled(open_store: OpenStore) -> None:
    @lf.step
    async def slow(_: None) -> None:
        await asyncio.sleep(3600)

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        try:
            async with asyncio.timeout(0.01):
                await ctx.run(slow)
        except TimeoutError:
            ctx.emit("late")
        return "done"

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        assert await handle.result() == "done"
        assert kinds(await store.read(handle.execution_id)) == [
            *("EXECUTION_STARTED", "STEP_STARTED", "STEP_CANCELLED", "late", "EXECUTION_COMPLETED")
        ]


async def test_a_finished_execution_leaves_nothing_in_the_runtime(open_store: OpenStore) -> None:
    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        return await ctx.suspend("go") if input else None

    async with open_store() as store, runtime(store) as rt:
        for n in range(20):
            await (await rt.start(flow, n % 2)).rest()
        await asyncio.sleep(0)
        driven = rt._driven
        assert (driven.executions, driven.calls, driven.watchers) == ({}, set(), {})


async def test_nobody_waits_for_a_write_that_was_stopped_with_its_loop() -> None:
    """On its way out, `asyncio.run` cancels the append and the run that waits for it alike."""

    class Stuck(lf.MemoryEventStore):
        async def append(self, envelope: lf.Envelope) -> None:
            await asyncio.get_running_loop().create_future()

    reported: list[lf.StorageWriteError] = []
    hooks = Hooks(on_storage_error=reported.append)
    journal = lf.ExecutionJournal("x", Stuck(), StillClock(), hooks)
    journal.commit("EXECUTION_STARTED", lf.encode({"flowId": "f", "flowVersion": "1", "input": None}))
    drained = asyncio.create_task(journal.drain())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert journal._writing is not None
    journal._writing.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(lf.StorageWriteError, match="CancelledError") as caught:
            await drained
    assert (caught.value.execution_id, caught.value.sequence) == ("x", 0)
    assert reported == [caught.value]


async def test_a_batch_carries_as_many_events_as_it_was_told() -> None:
    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        for n in range(10):
            ctx.emit("note", n)
        await ctx.suspend("go")

    sizes: dict[int, list[int]] = {}
    for size in (1, 3):
        store = ScriptedStore()
        async with runtime(store, batch_events=size) as rt:
            handle = await rt.start(flow)
            await handle.rest()
            await rt.resume(handle.execution_id, "go")
            await handle.result()
        sizes[size] = [len(ids) for _, ids in store.appends]
    # An answer is one append of two events, whatever the size of a batch.
    assert sizes == {1: [1] * 12 + [2, 1], 3: [3, 3, 3, 3, 2, 1]}
    with pytest.raises(lf.BadInputError, match="batch_events"):
        runtime(ScriptedStore(), batch_events=0)


async def test_an_effect_that_waits_for_nothing_is_one_append_with_its_outcome_and_the_end() -> None:
    @lf.step
    async def step() -> int:
        return 1

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        if input == "ask":
            await ctx.suspend("go")
        return await ctx.run(step)

    store = ScriptedStore()
    async with runtime(store, flow) as rt:
        minted = (await rt.start(flow)).execution_id
        await rt.handle(minted).result()
        await (await rt.start(flow, execution_id="chosen")).result()
        await (await rt.start(flow, "ask", execution_id="asked")).rest()
        await (await rt.resume("asked", "go")).result()
    assert [ids for _, ids in store.appends] == [
        [f"{minted}-0", f"{minted}-1", f"{minted}-2", f"{minted}-3"],
        ["chosen-0"],
        ["chosen-1", "chosen-2", "chosen-3"],
        ["asked-0"],
        ["asked-1"],
        ["asked-2", "asked-3"],
        ["asked-4", "asked-5", "asked-6"],
    ]
