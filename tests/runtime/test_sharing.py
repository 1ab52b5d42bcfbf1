"""A flow shares no object with its effects, its deciders, its schemas or the log: F04, F11, F30."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import loomfast as lf
from loomfast.stores import EventStoreDecorator
from tests.conftest import OpenStore
from tests.runtime.harness import kinds, runtime, turns


async def test_an_effect_gets_the_json_form_of_its_input_and_cannot_change_the_flows(
    open_store: OpenStore,
) -> None:
    seen: list[Any] = []

    @lf.step
    async def spoil(order: Any) -> None:
        seen.append(repr(order))
        order["n"] = 1

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        order = {"n": 0, "pair": (1, 2)}
        task = asyncio.ensure_future(ctx.run(spoil, order))
        await asyncio.sleep(0)
        order["n"] = 99
        await task
        await ctx.suspend("go")
        return order["n"]

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        await handle.rest()
        await rt.resume(handle.execution_id, "go")
        assert await handle.result() == 99
    assert seen == ["{'n': 0, 'pair': [1, 2]}"]


async def test_a_decider_cannot_change_the_grounds_that_are_recorded(open_store: OpenStore) -> None:
    def spoil(context: Any) -> str:
        context["n"] = 7
        return "x"

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        await ctx.decide("d", spoil, context={"n": 0})

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        await handle.result()
        assert (await store.read(handle.execution_id))[1].payload["context"] == {"n": 0}


@pytest.mark.parametrize(
    "grounds", [{"context": object()}, {"alternatives": {}}, {"policy": "x"}, {"policy": [1]}]
)
async def test_grounds_that_cannot_be_recorded_are_refused_before_the_decider_runs(
    open_store: OpenStore, grounds: Any
) -> None:
    called: list[int] = []

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        with pytest.raises(lf.BadInputError):
            await ctx.decide("d", lambda: called.append(1), **grounds)
        return "refused"

    async with open_store() as store, runtime(store) as rt:
        assert await (await rt.start(flow)).result() == "refused"
    assert called == []


async def test_a_choice_made_beside_a_gate_is_made_once(open_store: OpenStore) -> None:
    made: list[int] = []

    async def choose() -> str:
        made.append(1)
        await asyncio.sleep(0.01)
        return "left"

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        return await asyncio.gather(ctx.decide("way", choose), ctx.suspend("go"))

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        await handle.rest()
        await rt.resume(handle.execution_id, "go", "on")
        assert await handle.result() == ["left", "on"]
        assert kinds(await store.read(handle.execution_id)).count("DECISION_RECORDED") == 1
    assert made == [1]


async def test_a_schema_judges_what_is_stored_and_cannot_change_it(open_store: OpenStore) -> None:
    def finite(answer: Any) -> None:
        if answer.pop("amount") is None:
            raise ValueError("amount must be a number")

    @lf.flow(gates={"go": finite})
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        return await ctx.suspend("go")

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        await handle.rest()
        with pytest.raises(lf.InputValidationError, match="amount must be a number"):
            await rt.resume(handle.execution_id, "go", {"amount": float("nan")})
        with pytest.raises(lf.InputValidationError, match="KeyError"):
            await rt.resume(handle.execution_id, "go", {})
        await rt.resume(handle.execution_id, "go", {"amount": 1.5})
        assert await handle.result() == {"amount": 1.5}


async def test_two_calls_of_a_run_cannot_share_a_key(open_store: OpenStore) -> None:
    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        await ctx.run(lf.step(id="one")(lambda: 1))
        with pytest.raises(lf.BadInputError, match="names two calls"):
            await ctx.run(lf.step(id="two")(lambda: 2), key="one")
        return "refused"

    async with open_store() as store, runtime(store) as rt:
        assert await (await rt.start(flow)).result() == "refused"


async def test_a_hook_may_come_back_with_an_event_of_its_own(open_store: OpenStore) -> None:
    contexts: list[lf.WorkflowContext] = []

    def echo(event: lf.Envelope) -> None:
        if event.event_type == "note":
            contexts[0].emit("echo", event.sequence)

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        contexts.append(ctx)
        ctx.emit("note", 1)
        ctx.emit("note", 2)

    async with open_store() as store, runtime(store, on_event=echo) as rt:
        handle = await rt.start(flow)
        await handle.result()
        assert kinds(await store.read(handle.execution_id)) == [
            *("EXECUTION_STARTED", "note*", "echo*", "note*", "echo*", "EXECUTION_COMPLETED")
        ]


async def test_an_append_that_is_cancelled_counts_as_failed() -> None:
    class Cancelled(lf.MemoryEventStore):
        async def append_batch(self, envelopes: Any) -> None:
            raise asyncio.CancelledError

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        await asyncio.sleep(3600)

    async with runtime(Cancelled()) as rt:
        handle = await rt.start(flow)
        with pytest.raises(lf.StorageWriteError, match="CancelledError"):
            await handle.rest()


async def test_closing_lets_no_flow_go_on_and_records_nothing(open_store: OpenStore) -> None:
    """F19: whatever a flow makes of the cancellation it sees."""
    begun = asyncio.Event()
    cleaned: list[int] = []

    @lf.step
    async def long(_: None) -> None:
        begun.set()
        await asyncio.sleep(3600)

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        try:
            await ctx.run(long)
        except asyncio.CancelledError:
            return "gave up"
        finally:
            await ctx.run(lf.step(id="cleanup")(lambda: cleaned.append(1)))
        return "done"

    async with open_store() as store:
        async with runtime(store) as rt:
            handle = await rt.start(flow)
            await begun.wait()
        assert kinds(await store.read(handle.execution_id)) == ["EXECUTION_STARTED", "STEP_STARTED"]
    assert cleaned == []


async def test_a_start_that_a_close_overtakes_is_left_to_recovery(open_store: OpenStore) -> None:
    ran: list[int] = []

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        ran.append(1)

    class Slow(EventStoreDecorator):
        async def append(self, envelope: lf.Envelope) -> None:
            await turns(5)
            await super().append(envelope)

    async with open_store() as store:
        rt = runtime(Slow(store))
        starting = asyncio.ensure_future(rt.start(flow, execution_id="x"))
        await asyncio.sleep(0)
        await rt.close()
        with pytest.raises(lf.RuntimeClosedError):
            await starting
        assert ran == []
        assert kinds(await store.read("x")) == ["EXECUTION_STARTED"]
        async with runtime(store, flow) as other:
            await (await other.recover("x")).result()
    assert ran == [1]
