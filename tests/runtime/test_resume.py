"""Answering gates: what fits, what is refused, and that of two answers one counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import loomfast as lf
from tests.conftest import OpenStore
from tests.runtime.harness import ScriptedStore, kinds, runtime

runs: list[str] = []


def approval(answer: Any) -> None:
    if not isinstance(answer, dict) or not isinstance(answer.get("approved"), bool):
        raise ValueError("approved must be true or false")


@lf.flow(gates={"approve": approval})
async def two_gates(ctx: lf.WorkflowContext, input: Any) -> Any:
    runs.append(ctx.execution_id)
    first = await ctx.suspend("approve", correlation_key="po-9")
    second = await ctx.suspend("go")
    return [first, second]


@pytest.fixture(autouse=True)
def no_runs() -> None:
    runs.clear()


async def parked(rt: lf.WorkflowRuntime) -> str:
    handle = await rt.start(two_gates)
    await handle.rest()
    return handle.execution_id


async def test_after_the_first_answer_exactly_the_second_gate_is_pending(open_store: OpenStore) -> None:
    """F08."""
    async with open_store() as store, runtime(store) as rt:
        execution = await parked(rt)
        handle = await rt.resume(execution, "approve", {"approved": True}, correlation_key="po-9")
        state = await handle.rest()
        assert state.status == "suspended"
        assert state.pending is not None
        assert (state.pending.ordinal, state.pending.on, state.pending.correlation_key) == (1, "go", None)
        await rt.resume(execution, "go", 2, gate=1)
        assert await handle.result() == [{"approved": True}, 2]


async def test_an_answer_that_does_not_fit_is_refused_and_changes_nothing(open_store: OpenStore) -> None:
    """F11."""
    async with open_store() as store, runtime(store) as rt:
        execution = await parked(rt)
        before = await store.read(execution)
        right = {"approved": True}
        with pytest.raises(lf.GateRefusedError, match="waits for 'approve'"):
            await rt.resume(execution, "go", right)
        with pytest.raises(lf.GateRefusedError, match="correlation key 'po-9'"):
            await rt.resume(execution, "approve", right, correlation_key="po-8")
        with pytest.raises(lf.GateRefusedError, match="the open gate is 0, not 1"):
            await rt.resume(execution, "approve", right, correlation_key="po-9", gate=1)
        with pytest.raises(lf.InputValidationError, match="approved must be true or false"):
            await rt.resume(execution, "approve", {"approved": "yes"}, correlation_key="po-9")
        with pytest.raises(lf.JsonFormError):
            await rt.resume(execution, "approve", right | {"x": object()}, correlation_key="po-9")
        with pytest.raises(lf.UnknownExecutionError):
            await rt.resume("nobody", "approve", right)
        assert await store.read(execution) == before
        state = await (await rt.resume(execution, "approve", right, correlation_key="po-9")).rest()
        assert len(state.gates) == 1


@pytest.mark.parametrize("apart", [False, True], ids=["one runtime", "two runtimes"])
async def test_of_many_concurrent_answers_one_counts(open_store: OpenStore, apart: bool) -> None:
    """F09."""
    async with open_store() as store, runtime(store, two_gates) as one, runtime(store, two_gates) as two:
        execution = await parked(one)
        others = (one, two) if apart else (one,)
        answers = [
            rt.resume(execution, "approve", {"approved": True, "n": n}, correlation_key="po-9")
            for n in range(25)
            for rt in others
        ]
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        assert [type(o) for o in outcomes].count(lf.ExecutionHandle) == 1
        assert [type(o) for o in outcomes].count(lf.GateRefusedError) == len(answers) - 1
        await one.handle(execution).rest()
        logged = kinds(await store.read(execution))
        assert (logged.count("approve"), logged.count("EXECUTION_RESUMED")) == (1, 1)
    assert len(runs) == 2


async def test_an_answer_that_loses_is_not_delivered_to_anybody() -> None:
    store, heard = ScriptedStore(), []
    async with runtime(store, on_event=lambda event: heard.append(event.id)) as rt:
        execution = await parked(rt)
        heard.clear()
        store.script = {len(store.appends): lf.DuplicateSequenceError(execution, 2)}
        with pytest.raises(lf.GateRefusedError, match="another writer was first"):
            await rt.resume(execution, "approve", {"approved": True}, correlation_key="po-9")
    assert heard == []
    assert len(runs) == 1


async def test_an_answer_while_the_first_run_still_unwinds_leads_to_one_further_run(
    open_store: OpenStore,
) -> None:
    """F10 (c)."""
    leaving = asyncio.Event()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        runs.append("run")
        try:
            return await ctx.suspend("go")
        finally:
            await leaving.wait()

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        while (await store.last_sequence(handle.execution_id)) != 1:
            await asyncio.sleep(0)
        await rt.resume(handle.execution_id, "go", "early")
        with pytest.raises(lf.GateRefusedError, match="no gate is open"):
            await rt.resume(handle.execution_id, "go", "again")
        leaving.set()
        assert await handle.result() == "early"
    assert runs == ["run", "run"]


async def test_an_answer_before_any_gate_or_after_the_end_is_refused(open_store: OpenStore) -> None:
    """F10 (b), (d) and F12."""
    going = asyncio.Event()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        await going.wait()
        return "ended"

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        with pytest.raises(lf.GateRefusedError, match="no gate is open"):
            await rt.resume(handle.execution_id, "go")
        going.set()
        await handle.result()
        with pytest.raises(lf.GateRefusedError, match="it has completed"):
            await rt.resume(handle.execution_id, "go")
        assert kinds(await store.read(handle.execution_id)) == ["EXECUTION_STARTED", "EXECUTION_COMPLETED"]


async def test_an_answer_reaches_an_execution_that_another_runtime_parked(open_store: OpenStore) -> None:
    async with open_store() as store:
        async with runtime(store) as rt:
            execution = await parked(rt)
        async with runtime(store, two_gates) as rt:
            await rt.resume(execution, "approve", {"approved": False}, correlation_key="po-9")
            await rt.handle(execution).rest()
            await rt.resume(execution, "go")
            assert await rt.handle(execution).result() == [{"approved": False}, None]


async def test_a_flow_this_runtime_does_not_know_is_named(open_store: OpenStore) -> None:
    async with open_store() as store:
        async with runtime(store) as rt:
            execution = await parked(rt)
        async with runtime(store) as rt:
            with pytest.raises(lf.UnknownFlowError, match="two_gates"):
                await rt.resume(execution, "approve")


async def test_a_waiter_sees_the_end_of_an_execution_that_is_driven_elsewhere(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store, two_gates) as one, runtime(store, two_gates) as two:
        execution = await parked(one)
        waiter = asyncio.create_task(one.handle(execution).result())
        handle = await two.resume(execution, "approve", {"approved": True}, correlation_key="po-9")
        await handle.rest()
        await two.resume(execution, "go", 1)
        assert await waiter == [{"approved": True}, 1]


async def test_nobody_answers_a_sleep_but_time(open_store: OpenStore) -> None:
    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        await ctx.sleep(10**6)
        return "woken"

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        state = await handle.rest()
        assert state.pending is not None
        with pytest.raises(lf.GateRefusedError, match="only time"):
            await rt.resume(handle.execution_id, state.pending.on)
        with pytest.raises(lf.GateRefusedError, match="not due"):
            await rt.fire(handle.execution_id)
        rt._driven.deps.clock.time += 10**9 + 10
        await rt.fire(handle.execution_id)
        assert await handle.result() == "woken"


async def test_an_answer_before_the_start_is_refused_and_the_same_one_fits_later(
    open_store: OpenStore,
) -> None:
    """F10 (a)."""
    async with open_store() as store, runtime(store, two_gates) as rt:
        right = {"approved": True}
        with pytest.raises(lf.UnknownExecutionError):
            await rt.resume("x", "approve", right, correlation_key="po-9")
        assert await store.read("x") == []
        await (await rt.start(two_gates, execution_id="x")).rest()
        handle = await rt.resume("x", "approve", right, correlation_key="po-9")
        assert len((await handle.rest()).gates) == 1


async def test_an_answer_while_the_suspension_is_on_its_way_to_the_store_waits_for_it() -> None:
    """F10 (c): once the flow has come to its gate no fitting answer is refused."""
    arrived, durable, answered = asyncio.Event(), asyncio.Event(), list[str]()

    class Slow(lf.MemoryEventStore):
        async def append_batch(self, envelopes: Any) -> None:
            if envelopes[-1].event_type == "EXECUTION_SUSPENDED" and not durable.is_set():
                arrived.set()
                await durable.wait()
            await super().append_batch(envelopes)

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        runs.append("run")
        return await ctx.suspend("go")

    store = Slow()
    async with runtime(store, on_commit=lambda event: answered.append(event.event_type)) as rt:
        handle = await rt.start(flow, execution_id="x")
        await arrived.wait()
        answer = asyncio.create_task(rt.resume("x", "go", 7))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not answer.done()
        durable.set()
        await answer
        assert await handle.result() == 7
        assert answered.index("EXECUTION_SUSPENDED") < answered.index("go")
    assert runs == ["run", "run"]


async def test_an_answer_that_waits_ends_typed_when_the_flow_ends_without_that_gate() -> None:
    """F10 (d): it waits for what is on its way to the store, and that turns out to be the end."""
    arrived, durable = asyncio.Event(), asyncio.Event()

    class Slow(lf.MemoryEventStore):
        async def append_batch(self, envelopes: Any) -> None:
            if envelopes[-1].event_type == "EXECUTION_COMPLETED":
                arrived.set()
                await durable.wait()
            await super().append_batch(envelopes)

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        return "ended"

    async with runtime(Slow()) as rt:
        handle = await rt.start(flow, execution_id="x")
        await arrived.wait()
        answer = asyncio.create_task(rt.resume("x", "go", 7))
        await asyncio.sleep(0)
        durable.set()
        with pytest.raises(lf.GateRefusedError, match="it has completed"):
            await answer
        assert await handle.result() == "ended"


async def test_a_recorded_answer_is_not_checked_against_a_newer_schema(open_store: OpenStore) -> None:
    """F11."""

    def never(answer: Any) -> None:
        raise ValueError("nothing is valid any more")

    async with open_store() as store:
        async with runtime(store) as rt:
            execution = await parked(rt)
            await (await rt.resume(execution, "approve", {"approved": True}, correlation_key="po-9")).rest()
        newer = lf.flow(id=two_gates.id, gates={"approve": never})(two_gates.function)
        async with runtime(store, newer) as rt:
            assert await (await rt.resume(execution, "go", 1)).result() == [{"approved": True}, 1]


async def test_an_answer_that_the_store_could_not_write_says_what_the_store_met() -> None:
    """SPEC 9: `__cause__` is the store's own error."""
    met = OSError(28, "no space left")

    class Full(lf.MemoryEventStore):
        async def append_batch(self, envelopes: Any) -> None:
            if envelopes[-1].event_type == "EXECUTION_RESUMED":
                raise lf.StoreFullError("x", envelopes[0].sequence, "no room") from met
            await super().append_batch(envelopes)

    async with runtime(Full()) as rt:
        await (await rt.start(two_gates, execution_id="x")).rest()
        with pytest.raises(lf.StoreFullError) as caught:
            await rt.resume("x", "approve", {"approved": True}, correlation_key="po-9")
        assert caught.value.__cause__ is met
