"""Cancelling: the execution ends `cancelled`, once, and no effect starts after that (F12, F34).

The choice made: an execution that is parked ends at once, and no `finally` block of its flow runs. One that
runs unwinds first.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

import loomfast as lf
from loomfast.testing import VirtualClock, run_virtual, seeded_entropy
from tests.conftest import OpenStore
from tests.runtime.harness import StillClock, kinds, of, runtime, turns


@lf.step
async def other() -> None:
    raise AssertionError("no effect starts after a cancel")


async def test_a_running_execution_unwinds_and_what_it_ran_is_recorded_as_cancelled(
    open_store: OpenStore,
) -> None:
    began, order = asyncio.Event(), list[str]()

    @lf.step
    async def endless() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await turns(5)  # a cancellation that came twice would end this
            order.append("step cleaned up")

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        try:
            await ctx.run(endless)
        finally:
            order.append("finally of the flow")
            with contextlib.suppress(BaseException):
                await ctx.run(other)
            with contextlib.suppress(BaseException):
                ctx.emit("too late")
            await turns(2)
            order.append("finally is over")

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow, execution_id="x")
        await began.wait()
        state = await rt.cancel("x", {"by": "operator"})
        assert (state.status, state.reason) == ("cancelled", {"by": "operator"})
        with pytest.raises(lf.ExecutionCancelledError, match="operator"):
            await handle.result()
        assert kinds(await store.read("x")) == [
            *("EXECUTION_STARTED", "STEP_STARTED", "STEP_CANCELLED", "EXECUTION_CANCELLED")
        ]
        assert await rt.load_state("x") is not None
        assert (await rt.load_state("x")).status == "cancelled"  # type: ignore[union-attr]
    assert order == ["step cleaned up", "finally of the flow", "finally is over"]


@pytest.mark.parametrize("ending", ["returns", "raises", "raises what is declared", "times out"])
async def test_a_step_that_swallows_its_cancellation_does_not_save_its_execution(
    open_store: OpenStore, ending: str
) -> None:
    """F34: it may record its outcome, and it is not tried again."""
    began, attempts = asyncio.Event(), list[int]()

    @lf.step(
        failures=(LookupError,),
        retry=lf.RetryPolicy(max_attempts=5, initial_s=0),
        timeout_s=1_000 if ending == "times out" else None,
    )
    async def stubborn(fx: lf.EffectContext) -> str:
        attempts.append(fx.attempt)
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if ending == "raises":
                raise OSError("turned into an error") from None
            if ending == "raises what is declared":
                raise LookupError("turned into a result") from None
        return "done"

    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        with contextlib.suppress(BaseException):
            await ctx.run(stubborn)
        await ctx.run(other)
        return "finished"

    async with open_store() as store, runtime(store, clock=lf.SystemClock()) as rt:
        await rt.start(flow, execution_id="x")
        await began.wait()
        assert (await rt.cancel("x")).status == "cancelled"
        log = kinds(await store.read("x"))
    outcome = {"returns": "STEP_COMPLETED", "times out": "STEP_COMPLETED"}.get(ending, "STEP_FAILED")
    assert log == ["EXECUTION_STARTED", "STEP_STARTED", outcome, "EXECUTION_CANCELLED"]
    assert attempts == [1]


async def test_a_flow_that_swallows_its_cancellation_ends_cancelled_all_the_same(
    open_store: OpenStore,
) -> None:
    began = asyncio.Event()

    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        began.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "as if nothing had happened"

    async with open_store() as store, runtime(store) as rt:
        await rt.start(flow, execution_id="x")
        await began.wait()
        assert (await rt.cancel("x")).status == "cancelled"
        assert kinds(await store.read("x")) == ["EXECUTION_STARTED", "EXECUTION_CANCELLED"]


async def test_every_branch_of_a_running_execution_is_cancelled(open_store: OpenStore) -> None:
    ended: list[int] = []

    @lf.step
    async def endless(n: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(n)

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        background = asyncio.create_task(ctx.run(endless, 0))
        async with asyncio.TaskGroup() as group:
            for n in (1, 2, 3):
                group.create_task(ctx.run(endless, n))
        await background

    async with open_store() as store, runtime(store) as rt:
        await rt.start(flow, execution_id="x")
        await turns(10)
        await rt.cancel("x")
        log = kinds(await store.read("x"))
    assert sorted(ended) == [0, 1, 2, 3]
    assert log.count("STEP_CANCELLED") == 4
    assert log[-1] == "EXECUTION_CANCELLED"


async def test_a_retry_that_waits_is_cancelled_out_of_its_wait(open_store: OpenStore) -> None:
    failed = asyncio.Event()

    @lf.step(retry=lf.RetryPolicy(max_attempts=5, initial_s=1_000, max_s=1_000))
    async def fails() -> None:
        failed.set()
        raise OSError("no")

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        await ctx.run(fails)

    async with open_store() as store, runtime(store, clock=lf.SystemClock()) as rt:
        await rt.start(flow, execution_id="x")
        await failed.wait()
        await turns(3)
        await rt.cancel("x")
        log = kinds(await store.read("x"))
    assert log == ["EXECUTION_STARTED", "STEP_STARTED", "STEP_FAILED", "EXECUTION_CANCELLED"]


async def test_an_execution_that_has_just_started_is_cancelled_before_its_body_runs(
    open_store: OpenStore,
) -> None:
    ran: list[str] = []

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        ran.append("body")

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        assert (await rt.cancel(handle.execution_id)).status == "cancelled"
        assert kinds(await store.read(handle.execution_id)) == ["EXECUTION_STARTED", "EXECUTION_CANCELLED"]
    assert ran == []


async def test_a_parked_execution_ends_at_once_and_is_not_re_entered(open_store: OpenStore) -> None:
    runs: list[str] = []

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        runs.append("begins")
        try:
            await ctx.suspend("go")
        finally:
            runs.append("finally")

    async with open_store() as store, runtime(store) as rt:
        await (await rt.start(flow, execution_id="x")).rest()
        assert runs == ["begins", "finally"]  # that of parking: each run unwinds when it reaches its gate
        assert (await rt.cancel("x", "no longer wanted")).reason == "no longer wanted"
        assert runs == ["begins", "finally"]
        with pytest.raises(lf.GateRefusedError, match="been cancelled"):
            await rt.resume("x", "go")
        with pytest.raises(lf.GateRefusedError):
            await rt.fire("x")
        assert kinds(await store.read("x")) == [
            "EXECUTION_STARTED",
            "EXECUTION_SUSPENDED",
            "EXECUTION_CANCELLED",
        ]


async def test_a_repeated_cancel_is_a_no_op_and_the_first_reason_counts(open_store: OpenStore) -> None:
    began = asyncio.Event()

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    async with open_store() as store, runtime(store) as rt:
        await rt.start(flow, execution_id="x")
        await began.wait()
        states = await asyncio.gather(*(rt.cancel("x", n) for n in range(5)))
        again = await rt.cancel("x", "again")
        assert [state.reason for state in [*states, again]] == [0] * 6
        assert kinds(await store.read("x")).count("EXECUTION_CANCELLED") == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_an_execution_that_has_ended_otherwise_keeps_its_outcome(
    open_store: OpenStore, fails: bool
) -> None:
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        if fails:
            raise ValueError("no")

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow, execution_id="x")
        await handle.rest()
        before = await store.read("x")
        with pytest.raises(lf.ExecutionEndedError, match="failed" if fails else "completed"):
            await rt.cancel("x")
        assert await store.read("x") == before
        with pytest.raises(lf.UnknownExecutionError):
            await rt.cancel("nobody")


async def test_a_reason_counts_as_it_was_at_the_call(open_store: OpenStore) -> None:
    began, reason = asyncio.Event(), {"code": 1}

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            reason["code"] = object()  # type: ignore[assignment]

    async with open_store() as store, runtime(store) as rt:
        await rt.start(flow, execution_id="x")
        await began.wait()
        with pytest.raises(lf.UnsupportedTypeError):
            await rt.cancel("x", object())
        assert (await rt.cancel("x", reason)).reason == {"code": 1}


async def test_a_flow_may_cancel_itself(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store) as rt:

        async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await rt.cancel(ctx.execution_id, "by itself")
            await ctx.run(other)

        async def by_step(ctx: lf.WorkflowContext, input: Any) -> None:
            async def effect() -> None:
                await rt.cancel(ctx.execution_id, "by a step")

            await ctx.run(effect)
            await ctx.run(other)

        for definition, reason in ((flow, "by itself"), (by_step, "by a step")):
            state = await (await rt.start(definition)).rest()
            assert (state.status, state.reason) == ("cancelled", reason)


def check_one_end(log: list[lf.Envelope]) -> None:
    """One terminal record, the last one; at most one answer to a gate; sequences without a gap."""
    assert [event.sequence for event in log] == list(range(len(log)))
    seen = kinds(log)
    ends = [kind for kind in seen if kind in ("EXECUTION_COMPLETED", "EXECUTION_CANCELLED")]
    assert len(ends) == 1
    assert seen[-1] == ends[0]
    assert seen.count("go") == seen.count("EXECUTION_RESUMED") <= 1


@pytest.mark.parametrize("apart", [False, True], ids=["one runtime", "two runtimes"])
@pytest.mark.parametrize("answer", ["resume", "fire"])
async def test_a_cancel_and_an_answer_at_once_leave_one_end_whoever_is_first(
    open_store: OpenStore, answer: str, apart: bool
) -> None:
    """F12, a hundred times: never a zombie gate, never an effect after the end."""
    dice = random.Random(12)
    cancelled, effects, late = set[str](), list[str](), list[str]()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        await ctx.suspend("go", wake_at=1)

        async def effect() -> None:
            effects.append(ctx.execution_id)
            if ctx.execution_id in cancelled:
                late.append(ctx.execution_id)
            await turns(3)

        await ctx.run(effect)

    async def later(delay: int, call: Any) -> Any:
        await turns(delay)
        return await call

    async with open_store() as store, runtime(store, flow) as rt, runtime(store, flow) as second:
        canceller = second if apart else rt
        ends: list[str] = []
        for n in range(100):
            execution = f"x{n}"
            await (await rt.start(flow, execution_id=execution)).rest()

            async def cancel(execution: str = execution) -> Any:
                state = await canceller.cancel(execution)
                cancelled.add(execution)
                return state

            told = rt.resume(execution, "go") if answer == "resume" else rt.fire(execution)
            outcomes = await asyncio.gather(
                later(dice.randrange(12), cancel()),
                later(dice.randrange(12), told),
                return_exceptions=True,
            )
            with contextlib.suppress(lf.StorageWriteError):  # its driver was fenced out
                await rt.handle(execution).rest()
            log = await store.read(execution)
            check_one_end(log)
            ends.append(kinds(log)[-1])
            allowed = (lf.State, lf.ExecutionHandle, lf.GateRefusedError, lf.ExecutionEndedError)
            assert all(isinstance(outcome, allowed) for outcome in outcomes), outcomes
            if isinstance(outcomes[1], lf.GateRefusedError):
                assert ends[-1] == "EXECUTION_CANCELLED"
                assert execution not in effects
        assert await store.list_executions(status="suspended") == []
        assert await store.list_executions(status="running") == []
        assert ends.count("EXECUTION_CANCELLED") > 10
        # One runtime knows; another is stopped by its fence, at the first write it waits for.
        assert late == [] or apart


async def test_a_cancel_and_an_end_at_once_leave_one_end(open_store: OpenStore) -> None:
    dice = random.Random(34)
    async with open_store() as store, runtime(store) as rt:

        async def flow(ctx: lf.WorkflowContext, input: int) -> None:
            await turns(input)
            await ctx.run(lambda: 1)

        for n in range(100):
            handle = await rt.start(flow, dice.randrange(5), execution_id=f"x{n}")
            await turns(dice.randrange(12))
            with contextlib.suppress(lf.ExecutionEndedError):
                await rt.cancel(f"x{n}")
            await handle.rest()
            check_one_end(await store.read(f"x{n}"))


async def test_an_execution_that_another_runtime_drives_is_fenced_out(open_store: OpenStore) -> None:
    release, began = asyncio.Event(), asyncio.Event()

    @lf.step
    async def works() -> str:
        began.set()
        await release.wait()
        return "too late"

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        await ctx.run(works)
        await ctx.run(other)

    async with open_store() as store, runtime(store, flow) as driver, runtime(store, flow) as operator:
        handle = await driver.start(flow, execution_id="x")
        await began.wait()
        await turns(5)
        assert (await operator.cancel("x", "elsewhere")).status == "cancelled"
        release.set()
        assert (await handle.rest()).reason == "elsewhere"
        with pytest.raises(lf.ExecutionCancelledError, match="elsewhere"):
            await handle.result()
        assert kinds(await store.read("x")) == ["EXECUTION_STARTED", "STEP_STARTED", "EXECUTION_CANCELLED"]


async def test_a_step_in_doubt_does_not_keep_its_execution_from_being_cancelled(
    open_store: OpenStore,
) -> None:
    @lf.step(at_most_once=True)
    async def pays() -> None:
        raise OSError("line dropped")

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        try:
            await ctx.run(pays)
        except OSError:
            await ctx.suspend("go")

    async with open_store() as store, runtime(store) as rt:
        await (await rt.start(flow, execution_id="x")).rest()
        await (await rt.resume("x", "go")).rest()
        assert (await rt.cancel("x")).status == "cancelled"
        with pytest.raises(lf.StepRefusedError):
            await rt.resolve_in_doubt("x", "pays", 1)


async def test_a_zombie_writes_nothing_behind_the_end(open_store: OpenStore) -> None:
    release, refused = asyncio.Event(), list[str]()

    @lf.step(timeout_s=1)
    async def zombie(fx: lf.EffectContext) -> None:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        try:
            fx.emit("from the grave")
        except lf.RunOverError as error:
            refused.append(error.code)

    class SlowStore(lf.MemoryEventStore):
        async def append_batch(self, envelopes: Any) -> None:
            if envelopes[-1].event_type == "EXECUTION_COMPLETED":
                release.set()
                await turns(10)
            await super().append_batch(envelopes)

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        with contextlib.suppress(lf.StepTimeoutError):
            await ctx.run(zombie)

    async with runtime(SlowStore(), clock=StillClock()) as rt:
        await (await rt.start(flow, execution_id="x")).result()
        log = await rt.store.read("x")
    assert kinds(log)[-1] == "EXECUTION_COMPLETED"
    assert of(log, "from the grave") == []
    assert refused == ["run-over"]


@pytest.mark.parametrize("holding", ["flow", "effect"])
async def test_an_execution_that_does_not_unwind_in_time_ends_over_the_head_of_its_run(
    open_store: OpenStore, holding: str
) -> None:
    """F34: `cancel` has a bound, and what the run does behind the end is refused."""
    release, began, refused = asyncio.Event(), asyncio.Event(), list[str]()

    async def ignores() -> None:
        began.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        with contextlib.suppress(BaseException):
            await (ignores() if holding == "flow" else ctx.run(lf.step(id="s")(ignores)))
        await release.wait()
        for call in (lambda: ctx.run(other), lambda: ctx.suspend("go"), lambda: ctx.decide("d", lambda: 1)):
            try:
                await call()
            except lf.RunOverError as error:
                refused.append(error.code)
        try:
            ctx.emit("late")
        except lf.RunOverError as error:
            refused.append(error.code)

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow, execution_id="x")
        await began.wait()
        await turns(5)
        state = await rt.cancel("x", "enough", grace_s=0.02)
        assert (state.status, state.reason) == ("cancelled", "enough")
        with pytest.raises(lf.ExecutionCancelledError, match="enough"):
            await handle.result()
        assert (await rt.cancel("x", "again")).reason == "enough"
        with pytest.raises(lf.GateRefusedError, match="been cancelled"):
            await rt.resume("x", "go")
        before = await store.read("x")
        assert kinds(before)[-1] == "EXECUTION_CANCELLED"
        release.set()
        await turns(30)
        assert await store.read("x") == before
    assert refused == ["run-over"] * 4


async def test_a_decider_that_the_flow_has_left_behind_is_cancelled_once(open_store: OpenStore) -> None:
    began, ended = asyncio.Event(), list[str]()

    async def thinks() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await turns(5)  # a cancellation that came twice would end this
            ended.append("cleaned up")

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, way: str) -> None:
        deciding = asyncio.create_task(ctx.decide("d", thinks))
        await began.wait()
        if way == "gate":
            await ctx.suspend("go")
        if way == "wait":
            await asyncio.Event().wait()
        if way == "await":
            await deciding

    async with open_store() as store, runtime(store) as rt:
        for way in ("gate", "wait", "await", "return"):
            began.clear()
            await rt.start(flow, way, execution_id=way)
            await began.wait()
            await turns(5)
            async with asyncio.timeout(5):
                assert (await rt.cancel(way)).status == "cancelled"
            assert kinds(await store.read(way))[-1] == "EXECUTION_CANCELLED"
    assert ended == ["cleaned up"] * 4


def test_cancel_resume_and_fire_together_leave_one_end_in_any_of_five_hundred_interleavings() -> None:
    """F12, by the seeds of the virtual loop: one terminal record, and never terminal and then suspended."""
    ends: list[str] = []

    @lf.step
    async def naps() -> None:
        await asyncio.sleep(0.01)

    async def main(dice: random.Random) -> None:
        @lf.flow
        async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
            await ctx.suspend("go", wake_at=1)
            await ctx.run(naps)
            await ctx.suspend("more", wake_at=1)

        async def later(call: Any) -> Any:
            await asyncio.sleep(dice.choice((0, 0, 0.01, 0.02)))
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
            return await call()

        store = lf.MemoryEventStore()
        clock = VirtualClock()
        async with runtime(store, flow, clock=clock) as one, runtime(store, flow, clock=clock) as two:
            await (await one.start(flow, execution_id="x")).rest()
            calls = [lambda: one.resume("x", "go"), lambda: two.resume("x", "go"), lambda: two.fire("x")]
            calls += [lambda: one.fire("x"), lambda: one.cancel("x"), lambda: two.cancel("x")]
            outcomes = await asyncio.gather(*map(later, calls), return_exceptions=True)
            allowed = (lf.State, lf.ExecutionHandle, lf.GateRefusedError, lf.ExecutionEndedError)
            broken = [outcome for outcome in outcomes if not isinstance(outcome, allowed)]
            assert broken == []
            log = await store.read("x")
            assert [event.sequence for event in log] == list(range(len(log)))
            over = of(log, "EXECUTION_COMPLETED", "EXECUTION_CANCELLED", "EXECUTION_FAILED")
            assert over == kinds(log)[-1:]
            assert over in (["EXECUTION_CANCELLED"], ["EXECUTION_COMPLETED"])
            assert kinds(log).count("go") + kinds(log).count("more") == kinds(log).count("EXECUTION_RESUMED")
            assert await store.list_executions(status="suspended") == []
            ends.append(" ".join(kinds(log)))

    for seed in range(1, 501):
        run_virtual(main(random.Random(seed)), seed=seed)
    assert len(set(ends)) > 3


def test_two_that_cancel_in_step_do_not_fence_each_other_for_ever() -> None:
    class Slow(lf.MemoryEventStore):
        async def append_batch(self, envelopes: Any) -> None:
            await asyncio.sleep(0.01)  # the one who is refused fences before the other is judged
            await super().append_batch(envelopes)

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        return await ctx.suspend("go")

    async def main() -> tuple[list[str], list[str], int]:
        store = Slow()
        nodes = [
            lf.WorkflowRuntime(store, flows=[flow], clock=VirtualClock(), entropy=seeded_entropy(node))
            for node in (1, 2)
        ]
        await (await nodes[0].start(flow, execution_id="x")).rest()
        async with asyncio.timeout(60):
            states = await asyncio.gather(*(node.cancel("x") for node in nodes))
        for node in nodes:
            await node.close()
        return (
            [state.status for state in states],
            kinds(await store.read("x")),
            await store.acquire_fence("x"),
        )

    statuses, log, fence = run_virtual(main())
    assert statuses == ["cancelled", "cancelled"]
    assert log.count("EXECUTION_CANCELLED") == 1
    assert fence < 20
