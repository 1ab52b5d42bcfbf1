"""What a run sees of its surroundings: context variables, time, randomness, sleeps, decisions."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

import loomfast as lf
from tests.conftest import OpenStore
from tests.runtime.harness import (
    StillClock,
    deployed,
    kinds,
    parking,
    run_through,
    runtime,
)

# --- context variables ---------------------------------------------------------------------------


who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


async def test_a_thousand_interleaved_executions_each_see_their_own_variables(open_store: OpenStore) -> None:
    """F36."""

    @lf.step
    async def in_task(fx: lf.EffectContext) -> list[str]:
        seen = who.get()
        who.set("leaked by a step")
        await asyncio.sleep(0)
        return [seen, fx.execution_id]

    @lf.step
    def in_thread(fx: lf.EffectContext) -> list[str]:
        seen = who.get()
        who.set("leaked by a thread")
        return [seen, fx.execution_id]

    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        who.set(input)
        await asyncio.sleep(0)
        pairs = await asyncio.gather(ctx.run(in_task), ctx.run(in_task), ctx.run(in_thread))
        return [who.get(), *pairs]

    async with open_store() as store, runtime(store) as rt:
        handles = [await rt.start(flow, f"flow-{n}") for n in range(1_000)]
        for n, handle in enumerate(handles):
            pair = [f"flow-{n}", handle.execution_id]
            assert await handle.result() == [f"flow-{n}", pair, pair, pair]


async def test_a_later_run_sees_the_runtimes_variables_and_not_those_of_whoever_answers(
    open_store: OpenStore,
) -> None:
    """F36."""
    seen: list[str] = []
    early = asyncio.Event()

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        seen.append(who.get())
        who.set("set by an earlier run")
        try:
            await ctx.suspend("first")
            await ctx.suspend("second")
        finally:
            if len(seen) == 1:
                await early.wait()

    who.set("the owner of the runtime")
    async with open_store() as store, runtime(store) as rt:
        who.set("whoever starts")
        await rt.start(flow, execution_id="x")
        who.set("whoever answers")
        while await store.last_sequence("x") != 1:
            await asyncio.sleep(0)
        await rt.resume("x", "first")  # while the first run still unwinds
        early.set()
        await rt.handle("x").rest()
        await (await rt.resume("x", "second")).result()
    assert seen == ["whoever starts", "the owner of the runtime", "the owner of the runtime"]


# --- replay-stable values ------------------------------------------------------------------------


async def test_now_random_and_uuid_are_the_same_on_every_run(open_store: OpenStore) -> None:
    seen: list[Any] = []

    async def flow(ctx: lf.WorkflowContext) -> None:
        seen.append([ctx.now(), ctx.random(), ctx.uuid(), ctx.now(), ctx.random(), ctx.uuid()])

    async with open_store() as store:
        await run_through(store, flow, flow, flow)
    assert seen[0] == seen[1] == seen[2]
    now, number, identity, later, other, another = seen[0]
    assert now < later
    assert now.utcoffset().total_seconds() == 0
    assert 0 <= number < 1
    assert 0 <= other < 1
    assert number != other
    assert (identity.version, another.version) == (4, 4)
    assert identity != another


@pytest.mark.parametrize(
    "seconds",
    [-1, -0.001, float("nan"), float("inf"), 1e306, 10**400, 10**12, "1", None, True, [1]],
    ids=lambda value: repr(value)[:12],
)
async def test_a_sleep_of_no_sensible_length_is_refused_and_nothing_is_logged(
    open_store: OpenStore, seconds: Any
) -> None:
    async def flow(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(lf.BadInputError, match="sleep"):
            await ctx.sleep(seconds)

    async with open_store() as store:
        [log] = await run_through(store, flow)
    assert kinds(log) == ["EXECUTION_STARTED", "EXECUTION_SUSPENDED"]


@pytest.mark.parametrize(
    "gate", [{"wake_at": -1}, {"wake_at": 1.5}, {"wake_at": "x"}, {"correlation_key": 1}]
)
async def test_a_gate_that_no_log_could_hold_is_refused_and_nothing_is_logged(
    open_store: OpenStore, gate: dict[str, Any]
) -> None:
    async def flow(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(lf.BadInputError):
            await ctx.suspend("go", **gate)

    async with open_store() as store:
        [log] = await run_through(store, flow)
    assert kinds(log) == ["EXECUTION_STARTED", "EXECUTION_SUSPENDED"]


class SetClock(StillClock):
    def now_ms(self) -> int:
        return self.time


async def test_a_sleep_ends_when_it_is_due_and_not_before(open_store: OpenStore) -> None:
    clock = SetClock()
    due: list[int | None] = []

    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        await ctx.sleep(0.0005)
        await ctx.sleep(60)
        return "slept"

    async with open_store() as store, runtime(store, clock=clock) as rt:
        begun = clock.time
        handle = await rt.start(flow, execution_id="x")
        for wait_ms in (1, 60_000):
            state = await handle.rest()
            assert state.pending is not None
            due.append(state.pending.wake_at)
            with pytest.raises(lf.GateRefusedError, match="not due"):
                await rt.fire("x")
            clock.time += wait_ms
            outcomes = await asyncio.gather(rt.fire("x"), rt.fire("x"), return_exceptions=True)
            assert sorted(type(outcome).__name__ for outcome in outcomes) == [
                "ExecutionHandle",
                "GateRefusedError",
            ]
        assert await handle.result() == "slept"
        assert due == [begun + 1, begun + 1 + 60_000]
        with pytest.raises(lf.GateRefusedError, match="no gate waits for a timer"):
            await rt.fire("x")


async def test_a_gate_without_a_due_time_is_not_passed_by_a_timer(open_store: OpenStore) -> None:
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        return await ctx.suspend("go", wake_at=input)

    clock = SetClock()
    async with open_store() as store, runtime(store, clock=clock) as rt:
        await (await rt.start(flow, execution_id="never")).rest()
        with pytest.raises(lf.GateRefusedError, match="no gate waits for a timer"):
            await rt.fire("never")
        handle = await rt.start(flow, clock.time, execution_id="now")
        await handle.rest()
        await rt.fire("now")
        assert await handle.result() is None


# --- decisions -----------------------------------------------------------------------------------


async def test_a_decider_gets_the_context_only_when_it_requires_a_parameter(open_store: OpenStore) -> None:
    async def flow(ctx: lf.WorkflowContext) -> None:
        chosen = [await ctx.decide(f"d{n}", lambda n=n: n) for n in range(3)]
        assert chosen == [0, 1, 2]
        assert await ctx.decide("given", lambda grounds: grounds, context={"kg": 1}) == {"kg": 1}
        assert await ctx.decide("starred", lambda *grounds: grounds, context=5) == [5]

    async with open_store() as store:
        await run_through(store, flow, flow)


async def test_a_flow_of_parked_branches_runs_on_with_what_is_known(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store) as rt:

        async def flow(ctx: lf.WorkflowContext) -> None:
            await asyncio.gather(ctx.suspend("go"), ctx.run(lambda: 1))

        await (await rt.start(deployed(*[parking(flow)] * 2), execution_id="x")).rest()
        state = await (await rt.resume("x", "go")).rest()
    assert state.status == "suspended"
