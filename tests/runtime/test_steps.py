"""Steps: timeouts, retries, middleware, threads and concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import loomfast as lf
from loomfast._runtime import effects
from tests.conftest import OpenStore
from tests.runtime.harness import (
    STEP_KINDS,
    StillClock,
    of,
    run_through,
    runtime,
    steps_of,
    turns,
)


class Plain(Exception):
    pass


class ShortClock(lf.SystemClock):
    """The machine's clock, of which nobody waits for long."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.02))


# --- timeouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["task", "thread"])
async def test_a_timeout_releases_the_caller_and_what_the_zombie_does_later_is_dropped(
    open_store: OpenStore, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F35."""
    release, released, late = threading.Event(), asyncio.Event(), list[str]()

    def speak(fx: lf.EffectContext) -> None:
        try:
            fx.emit("late")
        except lf.RunOverError as error:
            late.append(str(error))

    async def task(fx: lf.EffectContext) -> str:
        fx.emit("early", fx.attempt)
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        speak(fx)
        raise OSError("nobody hears this")

    def thread(fx: lf.EffectContext) -> str:
        fx.emit("early", fx.attempt)
        release.wait(10)
        speak(fx)
        raise OSError("nobody hears this")

    retry = lf.RetryPolicy(max_attempts=2, initial_s=0)
    slow = lf.step(id="slow", timeout_s=0.02, retry=retry)(task if kind == "task" else thread)

    async def flow(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(lf.StepTimeoutError, match=r"took longer than 0\.02 s"):
            await ctx.run(slow)
        assert ctx._rule.in_flight == 2
        release.set()
        released.set()
        while ctx._rule.in_flight:
            await asyncio.sleep(0.001)

    async with open_store() as store:
        [log] = await run_through(store, flow, clock=ShortClock())
    assert steps_of(log) == ["STARTED", "FAILED", "STARTED", "FAILED"]
    assert [event.payload for event in log if event.event_type == "early"] == [1, 2]
    assert sorted(late) == [f"step 'slow': attempt {n} has had its outcome" for n in (1, 2)]
    assert of(log, "late") == []
    assert caplog.text == ""


async def test_a_retry_waits_for_a_timed_out_effect_that_cleans_up(open_store: OpenStore) -> None:
    order: list[str] = []

    @lf.step(timeout_s=0.01, retry=lf.RetryPolicy(max_attempts=2, initial_s=0))
    async def slow(fx: lf.EffectContext) -> None:
        order.append(f"{fx.attempt} begins")
        if fx.attempt == 1:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                order.append("1 has cleaned up")

    async with open_store() as store:
        await run_through(store, lambda ctx: ctx.run(slow), clock=lf.SystemClock())
    assert order == ["1 begins", "1 has cleaned up", "2 begins"]


async def test_a_retry_waits_for_a_zombie_only_so_long(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effects, "OVERLAP_S", 0.01)
    release = threading.Event()

    @lf.step(timeout_s=0.01, retry=lf.RetryPolicy(max_attempts=2, initial_s=0))
    def slow(fx: lf.EffectContext) -> str:
        if fx.attempt == 1:
            release.wait(10)
        return "second"

    async def flow(ctx: lf.WorkflowContext) -> None:
        assert await ctx.run(slow) == "second"
        release.set()

    async with open_store() as store:
        await run_through(store, flow, clock=lf.SystemClock())


async def test_a_declared_timeout_is_settled(open_store: OpenStore) -> None:
    caught: list[str] = []

    @lf.step(timeout_s=1, failures=(lf.StepTimeoutError,))
    async def slow() -> None:
        await asyncio.Event().wait()

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(slow)
        except lf.StepTimeoutError as error:
            caught.append(f"{error} ({error.key}, {error.timeout_s})")
        ctx.emit("note")

    async with open_store() as store:
        logs = await run_through(store, flow, flow)
    assert caught == ["step 'slow' took longer than 1 s (slow, 1)"] * 2
    assert (steps_of(logs[1]), of(logs[1], "note")) == (["STARTED", "FAILED"], ["note*"])


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_no_positive_time_is_refused(timeout_s: float) -> None:
    with pytest.raises(lf.BadInputError, match="timeout_s"):
        lf.step(timeout_s=timeout_s)(lambda: None)


# --- retries -------------------------------------------------------------------------------------


class NapClock(StillClock):
    def __init__(self) -> None:
        super().__init__()
        self.naps: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        await super().sleep(seconds)


async def test_attempts_are_in_the_log_and_wait_as_the_policy_says(open_store: OpenStore) -> None:
    policy = lf.RetryPolicy(max_attempts=4, initial_s=1, multiplier=3, max_s=5, jitter=0.5)
    naps: list[list[float]] = []

    @lf.step(retry=policy)
    async def flaky(fx: lf.EffectContext) -> int:
        if fx.attempt < 4:
            raise OSError(f"attempt {fx.attempt}")
        return fx.attempt

    async def flow(ctx: lf.WorkflowContext) -> None:
        assert await ctx.run(flaky) == 4
        ctx.emit("note")  # the step has settled: an attempt that failed on the way leaves no mark

    for _ in range(2):
        clock = NapClock()
        async with open_store_of_its_own() as store:
            [log] = await run_through(store, flow, clock=clock)
        naps.append(clock.naps)
        attempts = [event.payload["attempt"] for event in log if event.event_type == "STEP_STARTED"]
        assert attempts == [1, 2, 3, 4]
        assert steps_of(log) == ["STARTED", "FAILED"] * 3 + ["STARTED", "COMPLETED"]
        assert of(log, "note") == ["note*"]
    assert naps[0] == naps[1] == [policy.delay_s("x", "flaky", tries) for tries in (1, 2, 3)]
    assert all(half <= nap <= 2 * half for nap, half in zip(naps[0], (0.5, 1.5, 2.5), strict=True))
    assert policy.delay_s("y", "flaky", 1) != policy.delay_s("x", "flaky", 1)


@asynccontextmanager
async def open_store_of_its_own() -> AsyncIterator[lf.EventStore]:
    async with lf.MemoryEventStore() as store:
        yield store


@pytest.mark.parametrize(
    ("raised", "attempts"), [(OSError("on"), 3), (ValueError("not on"), 1), (Plain("declared"), 1)]
)
async def test_only_what_the_policy_names_is_tried_again_and_never_a_declared_failure(
    open_store: OpenStore, raised: Exception, attempts: int
) -> None:
    retry = lf.RetryPolicy(max_attempts=3, initial_s=0, on=(OSError, Plain))

    @lf.step(failures=(Plain,), retry=retry)
    async def fails() -> None:
        raise raised

    async def flow(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(type(raised)):
            await ctx.run(fails)

    async with open_store() as store:
        [log] = await run_through(store, flow)
    assert steps_of(log) == ["STARTED", "FAILED"] * attempts


async def test_the_attempts_of_a_later_run_are_counted_on(open_store: OpenStore) -> None:
    @lf.step(retry=lf.RetryPolicy(max_attempts=2, initial_s=0))
    async def flaky(fx: lf.EffectContext) -> int:
        if fx.attempt < 4:
            raise OSError("again")
        return fx.attempt

    async def flow(ctx: lf.WorkflowContext) -> None:
        with contextlib.suppress(OSError):
            await ctx.run(flaky)

    async with open_store() as store:
        log = (await run_through(store, flow, flow))[-1]
    assert [e.payload["attempt"] for e in log if e.event_type == "STEP_STARTED"] == [1, 2, 3, 4]
    assert steps_of(log)[-1] == "COMPLETED"


async def test_an_output_without_json_form_fails_the_step_and_is_not_made_again(
    open_store: OpenStore,
) -> None:
    calls: list[int] = []

    @lf.step(retry=lf.RetryPolicy(max_attempts=5, initial_s=0))
    async def charges() -> object:
        calls.append(1)
        return object()

    async def flow(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(lf.UnsupportedTypeError):
            await ctx.run(charges)

    async with open_store() as store:
        [log] = await run_through(store, flow)
    assert calls == [1]
    assert steps_of(log) == ["STARTED", "FAILED"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"initial_s": -1},
        {"initial_s": float("nan")},
        {"initial_s": 2, "max_s": 1},
        {"max_s": float("inf")},
        {"multiplier": 0.5},
        {"jitter": 1.5},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(lf.BadInputError, match=next(iter(wrong))):
        lf.RetryPolicy(**wrong)


def test_a_delay_never_overflows() -> None:
    policy = lf.RetryPolicy(max_attempts=10**6, multiplier=1e300, jitter=0)
    assert policy.delay_s("x", "s", 10**5) == policy.max_s


# --- middleware ----------------------------------------------------------------------------------


async def test_middleware_wraps_effects_in_the_order_it_is_given(open_store: OpenStore) -> None:
    order: list[str] = []

    def named(name: str) -> Any:
        async def middleware(fx: lf.EffectContext, proceed: Any) -> Any:
            order.append(f"{name} before {fx.key}")
            try:
                return await proceed() + name
            finally:
                order.append(f"{name} after")

        return middleware

    @lf.step
    def effect() -> str:
        order.append("effect")
        return "out"

    async def flow(ctx: lf.WorkflowContext) -> None:
        assert await ctx.run(effect) == "outba"

    async with open_store() as store:
        await run_through(store, flow, flow, middleware=[named("a"), named("b")])
    assert order == ["a before effect", "b before effect", "effect", "b after", "a after"]


@pytest.mark.parametrize("kind", ["task", "thread"])
@pytest.mark.parametrize("times", [0, 1, 3])
async def test_middleware_may_execute_the_effect_any_number_of_times(
    open_store: OpenStore, kind: str, times: int
) -> None:
    async def repeat(fx: lf.EffectContext, proceed: Any) -> Any:
        return [await proceed() for _ in range(times)]

    async def task() -> int:
        return 1

    def thread() -> int:
        return 1

    async def flow(ctx: lf.WorkflowContext) -> None:
        assert await ctx.run(lf.step(id="s")(task if kind == "task" else thread)) == [1] * times
        assert ctx._rule.in_flight == 0
        ctx.emit("note")

    async with open_store() as store:
        [log] = await run_through(store, flow, middleware=[repeat])
    assert of(log, "note") == ["note*"]


# --- threads -------------------------------------------------------------------------------------


async def test_a_sync_step_that_raises_stop_iteration_fails_like_a_coroutine(open_store: OpenStore) -> None:
    def empty() -> Any:
        return next(iter(()))

    async def flow(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            await ctx.run(empty)

    async with open_store() as store:
        [log] = await run_through(store, flow)
    assert steps_of(log) == ["STARTED", "FAILED"]


async def test_a_function_that_returns_a_coroutine_is_awaited(open_store: OpenStore) -> None:
    async def fetch(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async def flow(ctx: lf.WorkflowContext) -> None:
        assert await ctx.run(lf.step(id="fetch")(lambda: fetch(7))) == 7

    async with open_store() as store:
        await run_through(store, flow, flow)


async def test_sync_steps_run_beside_each_other(open_store: OpenStore) -> None:
    barrier = threading.Barrier(3, timeout=10)

    @lf.step
    def meets(n: int) -> int:
        barrier.wait()
        return n

    async def flow(ctx: lf.WorkflowContext) -> None:
        assert await asyncio.gather(*(ctx.run(meets, n) for n in range(3))) == [0, 1, 2]

    async with open_store() as store:
        await run_through(store, flow, flow)


async def test_an_emit_from_a_thread_takes_its_place_in_the_log_or_raises_there(
    open_store: OpenStore,
) -> None:
    raised: list[str] = []

    async def flow(ctx: lf.WorkflowContext) -> None:
        def effect(fx: lf.EffectContext) -> str:
            for n in range(100):
                ctx.emit("note", n)
                fx.emit("inside", n)
            ctx.ui.set("path", 1)
            for forbidden in (ctx.now, ctx.random, ctx.uuid, lambda: ctx.patched("p")):
                try:
                    forbidden()
                except lf.BadInputError as error:
                    raised.append(str(error))
            for speak in (ctx.emit, fx.emit):
                try:
                    speak("EXECUTION_COMPLETED", {"output": 1})
                except lf.BadInputError as error:
                    raised.append(error.code)
            return "done"

        assert await ctx.run(effect) == "done"
        ctx.emit("after")

    async with open_store() as store:
        logs = await run_through(store, flow, flow)
    assert logs[1][: len(logs[0])] == logs[0]
    assert [event.payload for event in logs[1] if event.event_type == "note"] == list(range(100))
    assert set(of(logs[1], "note", "inside", "SURFACE_PATCH")) == {"note", "inside", "SURFACE_PATCH"}
    assert of(logs[1], "after") == ["after*"]
    assert (
        raised
        == ["a thread may only emit; every other call belongs to the flow itself"] * 4 + ["bad-input"] * 2
    )


async def test_inside_an_effect_or_decider_only_an_emit_is_allowed(open_store: OpenStore) -> None:
    """A re-run that is served the outcome would not make the call again, and later calls would shift."""
    refused: list[str] = []

    async def flow(ctx: lf.WorkflowContext) -> None:
        async def nested() -> str:
            for call in (
                lambda: ctx.run(nested),
                lambda: ctx.decide("d", lambda: 1),
                lambda: ctx.suspend("go"),
                lambda: ctx.sleep(1),
            ):
                try:
                    await call()
                except lf.BadInputError as error:
                    refused.append(str(error))
            try:
                ctx.random()
            except lf.BadInputError as error:
                refused.append(str(error))
            return "x"

        await ctx.run(nested)
        await ctx.run(lf.step(id="timed", timeout_s=1)(nested))
        await ctx.decide("pick", nested)
        ctx.random()

    async with open_store() as store:
        await run_through(store, flow, flow)
    assert refused == ["an effect or decider may only emit; every other call belongs to the flow"] * 15


async def test_an_effect_may_start_another_execution_and_wait_for_it(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store) as rt:

        async def child(ctx: lf.WorkflowContext, input: Any) -> Any:
            return await ctx.run(lambda: 7)

        async def parent(ctx: lf.WorkflowContext, input: Any) -> Any:
            async def spawn() -> Any:
                return await (await rt.start(child, execution_id="child")).result()

            return await ctx.run(spawn)

        assert await (await rt.start(parent)).result() == 7


# --- concurrency ---------------------------------------------------------------------------------


async def test_a_task_group_with_a_failing_step_cancels_the_others_and_records_it(
    open_store: OpenStore,
) -> None:
    @lf.step
    async def endless() -> None:
        await asyncio.Event().wait()

    @lf.step(failures=(Plain,))
    async def fails() -> None:
        await turns(5)
        raise Plain("no")

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(ctx.run(endless))
                group.create_task(ctx.run(fails))
        except* Plain:
            ctx.emit("caught")

    async with open_store() as store:
        [log] = await run_through(store, flow)
    outcomes = {e.payload["key"]: e.event_type for e in log if e.event_type in STEP_KINDS[1:]}
    assert outcomes == {"endless": "STEP_CANCELLED", "fails": "STEP_FAILED"}
    assert of(log, "caught") == ["caught"]


async def test_a_timeout_of_the_flow_cancels_the_step_and_lets_it_clean_up(open_store: OpenStore) -> None:
    cleaned: list[str] = []

    @lf.step
    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await turns(5)
            cleaned.append("up")

    async def flow(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ctx.run(endless)
        assert cleaned == ["up"]

    async with open_store() as store:
        [log] = await run_through(store, flow)
    assert steps_of(log) == ["STARTED", "CANCELLED"]


async def test_gathered_steps_have_keys_in_call_order_however_they_end(open_store: OpenStore) -> None:
    order: list[str] = []

    @lf.step
    async def work(delay: int) -> int:
        await turns(delay)
        order.append(str(delay))
        return delay

    async def flow(ctx: lf.WorkflowContext) -> None:
        assert await asyncio.gather(*(ctx.run(work, n) for n in (9, 5, 1))) == [9, 5, 1]

    async with open_store() as store:
        logs = await run_through(store, flow, flow)
    assert order == ["1", "5", "9"]
    assert len(logs[1]) == len(logs[0]) + 3


@pytest.mark.parametrize("kind", ["task", "thread"])
@pytest.mark.parametrize("parked", [False, True], ids=["in the flow", "while the run waits for it"])
async def test_closing_does_not_wait_for_an_effect_that_will_not_end(
    open_store: OpenStore,
    kind: str,
    parked: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F19, F35: it is named and left behind."""
    monkeypatch.setattr("loomfast._runtime.closing.STOP_S", 0.05)
    began, release, released = asyncio.Event(), threading.Event(), asyncio.Event()
    late: list[str] = []

    async def task(fx: lf.EffectContext) -> None:
        began.set()
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()

    def thread(fx: lf.EffectContext) -> None:
        loop.call_soon_threadsafe(began.set)
        release.wait(10)
        try:
            fx.emit("late")
        except lf.RunOverError as error:
            late.append(error.code)

    loop = asyncio.get_running_loop()

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        step = asyncio.create_task(ctx.run(lf.step(id="s")(task if kind == "task" else thread)))
        if parked:
            await began.wait()
            await ctx.suspend("go")
        await step

    async with open_store() as store:
        rt = runtime(store)
        await rt.start(flow, execution_id="x")
        await began.wait()
        await turns(5)
        async with asyncio.timeout(2):
            await rt.close()
        assert "execution 'x': step 's' did not end" in caplog.text
        release.set()
        released.set()
        if kind == "thread":
            while not late:
                await asyncio.sleep(0.001)
        await turns(5)
        log = await store.read("x")
    assert steps_of(log) == ["STARTED"]
    assert late == (["run-over"] if kind == "thread" else [])


async def test_what_an_effect_does_to_its_task_never_reaches_the_flows(open_store: OpenStore) -> None:
    @lf.step
    async def cancels_itself_and_says_so() -> None:
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise TimeoutError("took too long") from None

    @lf.step
    async def leaves_a_timer_behind() -> int:
        asyncio.get_running_loop().call_later(0.01, asyncio.current_task().cancel)
        return 1

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        try:
            await ctx.run(cancels_itself_and_says_so)
        except TimeoutError as error:
            first = str(error)
        second = await ctx.run(leaves_a_timer_behind)
        await asyncio.sleep(0.05)
        return [first, second]

    async with open_store() as store, runtime(store) as rt:
        assert await (await rt.start(flow)).result() == ["took too long", 1]


async def test_steps_that_never_wait_leave_the_loop_to_others() -> None:
    @lf.step
    async def at_once() -> None:
        pass

    @lf.flow
    async def endless(ctx: lf.WorkflowContext, input: Any) -> None:
        while True:
            await ctx.run(at_once)

    async with runtime(lf.MemoryEventStore()) as rt, asyncio.timeout(30):
        await rt.start(endless, execution_id="x")
        await asyncio.sleep(0.01)
        assert (await rt.cancel("x")).status == "cancelled"


@pytest.mark.parametrize("thread", [False, True])
async def test_a_generator_exit_of_an_effect_is_a_failure_like_others(thread: bool) -> None:
    def raises() -> None:
        raise GeneratorExit

    async def raises_too() -> None:
        raise GeneratorExit

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        await ctx.run(raises if thread else raises_too)

    async with runtime(lf.MemoryEventStore()) as rt:
        with pytest.raises(lf.ExecutionFailedError, match="GeneratorExit"):
            await (await rt.start(flow)).result()
