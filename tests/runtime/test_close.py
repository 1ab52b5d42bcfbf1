"""Closing: what runs may finish, nothing else begins, and none of it is recorded as an outcome (F19)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import loomfast as lf
from loomfast.testing import VirtualClock, run_virtual
from tests.conftest import OpenStore
from tests.runtime.harness import StillClock, kinds, runtime, steps_of, turns


def virtual(store: lf.EventStore, *flows: Any, **deps: Any) -> lf.WorkflowRuntime:
    return runtime(store, *flows, clock=VirtualClock(), **deps)


@lf.step
async def short() -> str:
    await asyncio.sleep(0.5)
    return "short"


@lf.step
async def fails() -> None:
    await asyncio.sleep(0.5)
    raise OSError("really failed")


@lf.step
async def long() -> None:
    await asyncio.sleep(60)


@lf.step
async def never() -> None:
    raise AssertionError("no effect begins while the runtime closes")


@lf.flow
async def one(ctx: lf.WorkflowContext, step: str) -> Any:
    return await ctx.run({"short": short, "fails": fails, "long": long}[step])


def test_what_runs_finishes_within_the_grace_and_its_true_outcome_is_recorded() -> None:
    """F19: three steps, 0.5 s, a failure at 0.5 s, 60 s; the grace is 2 s."""

    async def main() -> None:
        store = lf.MemoryEventStore()
        rt = virtual(store)
        for name in ("short", "fails", "long"):
            await rt.start(one, name, execution_id=name)
        await asyncio.sleep(0.1)
        began = asyncio.get_running_loop().time()
        await rt.close(grace_s=2)
        assert asyncio.get_running_loop().time() - began == pytest.approx(2)
        logs = {name: kinds(await store.read(name)) for name in ("short", "fails", "long")}
        assert logs["short"][-2:] == ["STEP_COMPLETED", "EXECUTION_COMPLETED"]
        assert logs["fails"][-2:] == ["STEP_FAILED", "EXECUTION_FAILED"]
        assert logs["long"] == ["EXECUTION_STARTED", "STEP_STARTED"]
        async with virtual(store, one) as successor:
            assert await (await successor.recover("long")).result() is None
            assert asyncio.get_running_loop().time() < 63

    run_virtual(main())


def test_a_flow_that_comes_to_its_next_effect_during_the_grace_stops_there_without_an_outcome() -> None:
    async def main() -> None:
        seen: list[str] = []

        @lf.flow
        async def flow(ctx: lf.WorkflowContext, way: str) -> str:
            await ctx.run(short)
            try:
                await (ctx.run(never) if way == "step" else ctx.decide("d", lambda: seen.append("chosen")))
            except BaseException as error:
                seen.append(type(error).__name__)
            with contextlib.suppress(BaseException):
                await ctx.run(never, key="again")
            return "as if nothing had happened"

        store = lf.MemoryEventStore()
        rt = virtual(store)
        handles = [await rt.start(flow, way, execution_id=way) for way in ("step", "decision")]
        await asyncio.sleep(0.1)
        await rt.close(grace_s=2)
        for handle in handles:
            log = kinds(await store.read(handle.execution_id))
            assert log == ["EXECUTION_STARTED", "STEP_STARTED", "STEP_COMPLETED"]
            with pytest.raises(lf.RuntimeClosedError):
                await handle.result()
        assert seen == ["WindDownSignal"] * 2

    run_virtual(main())


def test_the_sibling_of_a_branch_that_stops_still_finishes_within_the_grace() -> None:
    async def main() -> None:
        @lf.step
        async def longer() -> str:
            await asyncio.sleep(1)
            return "longer"

        async def branch(ctx: lf.WorkflowContext) -> None:
            await ctx.run(short)
            await ctx.run(never)

        @lf.flow
        async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
            await asyncio.gather(branch(ctx), ctx.run(longer))

        store = lf.MemoryEventStore()
        rt = virtual(store)
        await rt.start(flow, execution_id="x")
        await asyncio.sleep(0.1)
        await rt.close(grace_s=2)
        assert steps_of(await store.read("x")) == ["STARTED", "STARTED", "COMPLETED", "COMPLETED"]

    run_virtual(main())


def test_no_attempt_follows_a_failure_during_the_grace_and_a_wait_for_one_ends_at_once() -> None:
    async def main() -> None:
        attempts: list[str] = []

        def step(id: str, wait_s: float) -> lf.StepDefinition:
            @lf.step(id=id, retry=lf.RetryPolicy(max_attempts=5, initial_s=30, max_s=30))
            async def flaky() -> None:
                attempts.append(id)
                await asyncio.sleep(wait_s)
                raise OSError("again")

            return flaky

        @lf.flow
        async def flow(ctx: lf.WorkflowContext, wait_s: float) -> None:
            await ctx.run(step(f"s{wait_s}", wait_s))

        store = lf.MemoryEventStore()
        rt = virtual(store)
        await rt.start(flow, 1, execution_id="running")
        await rt.start(flow, 0, execution_id="waiting")
        await asyncio.sleep(0.5)
        began = asyncio.get_running_loop().time()
        await rt.close(grace_s=20)
        assert asyncio.get_running_loop().time() - began == pytest.approx(0.5)
        assert attempts == ["s1", "s0"]
        for execution in ("running", "waiting"):
            assert steps_of(await store.read(execution)) == ["STARTED", "FAILED"]
            assert (await rt.load_state(execution)).status == "running"  # type: ignore[union-attr]

    run_virtual(main())


async def test_a_second_close_waits_for_the_first_and_calls_are_refused_meanwhile(
    open_store: OpenStore,
) -> None:
    release = asyncio.Event()

    @lf.step
    async def held() -> str:
        await release.wait()
        return "done"

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        return await ctx.run(held)

    async with open_store() as store:
        rt = runtime(store)
        await rt.start(flow, execution_id="x")
        await turns(10)
        first = asyncio.create_task(rt.close(grace_s=60))
        await turns(3)
        second = asyncio.create_task(rt.close(grace_s=0))
        refused = (
            rt.start(flow),
            rt.resume("x", "go"),
            rt.fire("x"),
            rt.resolve_in_doubt("x", "k"),
            rt.cancel("x"),
            rt.recover("x"),
            rt.recover_abandoned(),
            rt.release("x"),
            rt.snapshot("x"),
            rt.truncate_prefix("x"),
            rt.fork("x", 0),
        )
        for call in refused:
            with pytest.raises(lf.RuntimeClosedError):
                await call
        assert not first.done()
        assert not second.done()
        release.set()
        await asyncio.gather(first, second)
        await rt.close()
        assert kinds(await store.read("x"))[-1] == "EXECUTION_COMPLETED"


async def test_cancelling_whoever_awaits_a_handle_or_a_close_is_no_cancel(open_store: OpenStore) -> None:
    began, release = asyncio.Event(), asyncio.Event()

    @lf.step
    async def held() -> str:
        began.set()
        await release.wait()
        return "done"

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        return await ctx.run(held)

    async with open_store() as store:
        rt = runtime(store)
        handle = await rt.start(flow, execution_id="x")
        await began.wait()
        for waits in (handle.result(), handle.rest(), rt.close(grace_s=60)):
            task = asyncio.ensure_future(waits)
            await turns(3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        release.set()
        await rt.close()
        assert kinds(await store.read("x"))[-2:] == ["STEP_COMPLETED", "EXECUTION_COMPLETED"]


async def test_a_flow_that_ignores_its_cancellation_is_named_and_left_behind(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("loomfast._runtime.closing.STOP_S", 0.05)
    release, late = asyncio.Event(), list[str]()

    @lf.flow
    async def stubborn(ctx: lf.WorkflowContext, input: Any) -> None:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        try:
            ctx.emit("late")
        except lf.RunOverError as error:
            late.append(error.code)

    async with open_store() as store:
        rt = runtime(store)
        handle = await rt.start(stubborn, execution_id="x")
        await turns(3)
        async with asyncio.timeout(5):
            await rt.close()
            with pytest.raises(lf.RuntimeClosedError):
                await handle.result()
        assert "execution 'x': its flow did not end when it was cancelled" in caplog.text
        release.set()
        await turns(5)
        assert kinds(await store.read("x")) == ["EXECUTION_STARTED"]
    assert late == ["run-over"]


async def test_what_was_running_is_marked_as_stopped_in_order_and_counts_no_crash(
    open_store: OpenStore,
) -> None:
    """F16, F19."""
    began = asyncio.Event()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        if input == "gate":
            await ctx.suspend("go")
        began.set()
        await asyncio.Event().wait()

    async with open_store() as store:
        for _ in range(3):
            async with runtime(store, flow, max_crashes=1) as rt:
                if await rt.load_state("x") is None:
                    await (await rt.start(flow, "gate", execution_id="parked")).rest()
                    await rt.start(flow, execution_id="x")
                else:
                    await rt.recover("x")
                await began.wait()
                began.clear()
            account = await store.recoveries.get("x")
            assert account == lf.Recovery("x", 0, 0, True, None)
            assert await store.recoveries.get("parked") is None


async def test_an_answer_that_a_close_overtakes_is_kept_and_its_execution_marked(
    open_store: OpenStore,
) -> None:
    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        return await ctx.suspend("go")

    async with open_store() as store:
        rt = runtime(store)
        await (await rt.start(flow, execution_id="x")).rest()
        answer = asyncio.ensure_future(rt.resume("x", "go", 7))
        await asyncio.sleep(0)
        await rt.close()
        with pytest.raises(lf.RuntimeClosedError):
            await answer
        assert kinds(await store.read("x"))[-1] == "EXECUTION_RESUMED"
        assert (await store.recoveries.get("x")).orderly  # type: ignore[union-attr]
        async with runtime(store, flow) as successor:
            assert await (await successor.recover("x")).result() == 7


async def test_a_grace_or_a_bound_that_is_no_number_of_seconds_is_refused() -> None:
    store = lf.MemoryEventStore()
    async with runtime(store, clock=StillClock()) as rt:
        for bad in (-1, float("nan"), "5", True):
            with pytest.raises(lf.BadInputError):
                await rt.close(grace_s=bad)  # type: ignore[arg-type]
            with pytest.raises(lf.BadInputError):
                await rt.cancel("x", grace_s=bad)  # type: ignore[arg-type]
            with pytest.raises(lf.BadInputError):
                lf.WorkflowRuntime(store, close_grace_s=bad)  # type: ignore[arg-type]
