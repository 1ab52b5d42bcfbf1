"""Steps: how an attempt ends, when it is tried again, and what a step may do meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import loomfast as lf
from loomfast._runtime import effects
from tests.conftest import OpenStore
from tests.runtime.harness import StillClock, deployed, kinds, of, parking, run_through, runtime

STEP_KINDS = ("STEP_STARTED", "STEP_COMPLETED", "STEP_FAILED", "STEP_CANCELLED", "EFFECT_INDOUBT")


def steps_of(log: list[lf.Envelope]) -> list[str]:
    """What became of the steps, without the prefix `STEP_`."""
    return [kind.removeprefix("STEP_") for kind in of(log, *STEP_KINDS)]


class ShortClock(lf.SystemClock):
    """The machine's clock, of which nobody waits for long."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.02))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


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


# --- declared failures ---------------------------------------------------------------------------


class Plain(Exception):
    pass


class Coded(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class Slotted(Exception):
    __slots__ = ("code",)

    def __new__(cls, code: int) -> Slotted:
        return super().__new__(cls)

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class Child(Coded):
    pass


class Network(OSError):
    def __init__(self, host: str) -> None:
        super().__init__(111, "refused", host)
        self.host = host


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Holder(Exception):
    def __init__(self, held: object) -> None:
        super().__init__("holds", held)
        self.held, self.kept = held, "kept"


class Many(ExceptionGroup[Exception]):
    def derive(self, excs: Any) -> Many:
        return Many(self.message, excs)


def caused() -> Exception:
    try:
        try:
            raise ValueError("root")
        except ValueError as error:
            raise Plain("on top") from error
    except Plain as error:
        return error


def noted() -> Exception:
    error = Plain("noted")
    error.add_note("seen by the doorman")
    return error


RAISED: dict[str, tuple[Exception, type[Exception]]] = {
    "plain": (Plain("x", 1), Plain),
    "without arguments": (Plain(), Plain),
    "a constructor that takes other arguments": (Coded(7, "x"), Coded),
    "a subclass of the declared class": (Child(8, "y"), Coded),
    "slots and __new__": (Slotted(9), Slotted),
    "errno of a built-in": (FileNotFoundError(2, "gone", "file"), OSError),
    "a subclass of a built-in": (Network("db"), OSError),
    "a key error": (KeyError("k"), LookupError),
    "a cause": (caused(), Plain),
    "notes": (noted(), Plain),
    "a group": (Many("several", [Coded(1, "a"), Many("inner", [Coded(2, "b")])]), Many),
    "a built-in group": (ExceptionGroup("a (b)", [Plain("c")]), ExceptionGroup),
    "a message of 10 MB": (Plain("x" * 10_000_000), Plain),
    "half a surrogate pair": (Plain("\ud800"), Plain),
}


def view(error: BaseException) -> Any:
    """All that a handler can see of an exception, as far as it has a JSON form."""
    inner = [view(one) for one in error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    fields = {"code": getattr(error, "code", None), "errno": getattr(error, "errno", None)} | vars(error)
    return type(error), str(error), fields, inner


@pytest.mark.parametrize("case", RAISED)
async def test_a_declared_failure_comes_back_as_it_was_raised_on_every_run(
    open_store: OpenStore, case: str
) -> None:
    """F33."""
    raised, declared = RAISED[case]
    views: list[Any] = []
    calls: list[int] = []

    @lf.step(failures=(declared, Coded, Plain))
    async def fails() -> None:
        calls.append(1)
        raise raised

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(fails)
        except declared as error:
            views.append(view(error))

    async with open_store() as store:
        await run_through(store, flow, flow, flow)
    assert views == [view(raised)] * 3
    assert calls == [1]


async def test_what_of_a_declared_failure_has_no_json_form_is_missing_on_every_run(
    open_store: OpenStore,
) -> None:
    seen: list[Any] = []

    @lf.step(failures=(Holder, Silent))
    async def fails(silent: bool) -> None:
        raise Silent("x") if silent else Holder(object())

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(fails, False)
        except Holder as error:
            seen.append((error.args[0].startswith("('holds', <object"), vars(error)))
        try:
            await ctx.run(fails, True)
        except Silent as error:
            seen.append(error.args)

    async with open_store() as store:
        [log, _] = await run_through(store, flow, flow)
    assert seen == [(True, {"kept": "kept"}), ("x",)] * 2
    assert [e.payload["error"]["message"] for e in log if e.event_type == "STEP_FAILED"][1] == (
        "<str() of this Silent raised RuntimeError>"
    )


async def test_a_member_of_a_group_that_is_not_declared_becomes_a_step_failed_error(
    open_store: OpenStore,
) -> None:
    seen: list[list[str]] = []

    @lf.step(failures=(ExceptionGroup,))
    async def fails() -> None:
        raise ExceptionGroup("several", [ValueError("x")])

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(fails)
        except ExceptionGroup as group:
            seen.append([f"{type(one).__name__}: {one}" for one in group.exceptions])

    async with open_store() as store:
        await run_through(store, flow, flow)
    assert seen == [["StepFailedError: step 'fails' failed: ValueError: x"]] * 2


async def test_two_declared_classes_of_one_name_are_told_apart(open_store: OpenStore) -> None:
    first, second = (type("Timeout", (Exception,), {"__module__": module}) for module in ("one", "two"))
    seen: list[type] = []

    @lf.step(failures=(first, second))
    async def fails() -> None:
        raise second("x")

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(fails)
        except Exception as error:
            seen.append(type(error))

    async with open_store() as store:
        await run_through(store, flow, flow)
    assert seen == [second, second]


async def test_a_failure_whose_class_is_gone_degrades_to_step_failed_error(open_store: OpenStore) -> None:
    async def fails() -> None:
        raise Coded(7, "x")

    async def before(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(Coded):
            await ctx.run(lf.step(failures=(Coded,))(fails))

    async def after(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(lf.StepFailedError, match="step 'fails' failed: Coded: 7: x") as caught:
            await ctx.run(fails)
        assert caught.value.error["type"] == "Coded"

    async with open_store() as store:
        await run_through(store, before, after)


@pytest.mark.parametrize("case", [*RAISED, "silent"])
async def test_an_undeclared_failure_is_recorded_whatever_it_is_and_not_served(
    open_store: OpenStore, case: str
) -> None:
    raised = Silent("x") if case == "silent" else RAISED[case][0]
    caught: list[BaseException] = []

    async def fails() -> None:
        raise raised

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(fails)
        except Exception as error:
            caught.append(error)

    async with open_store() as store:
        log = (await run_through(store, flow, flow))[-1]
    assert caught == [raised] * 2
    assert steps_of(log) == ["STARTED", "FAILED"] * 2
    failed = [event for event in log if event.event_type == "STEP_FAILED"]
    assert all(not event.payload["typed"] and len(event.body) < 60_000 for event in failed)


async def test_an_effect_that_raises_more_than_an_exception_has_an_outcome_too(
    open_store: OpenStore,
) -> None:
    class Stop(BaseException):
        pass

    async def fails() -> None:
        raise Stop("everything")

    async def flow(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(Stop):
            await ctx.run(fails)

    async with open_store() as store:
        [log] = await run_through(store, flow)
    assert steps_of(log) == ["STARTED", "FAILED"]


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


# --- at most once --------------------------------------------------------------------------------


class DyingStore(lf.MemoryEventStore):
    """Writes so many events, and then dies: nothing is written any more, and what is there can be read."""

    def __init__(self, events: int) -> None:
        super().__init__()
        self.left = events

    async def append_batch(self, envelopes: Any) -> None:
        if len(envelopes) > self.left:
            self.left = 0
            raise OSError("the machine is gone")
        await super().append_batch(envelopes)
        self.left -= len(envelopes)


async def test_the_start_of_an_at_most_once_step_is_durable_before_its_effect(open_store: OpenStore) -> None:
    seen: list[str] = []

    async with open_store() as store:

        @lf.step(at_most_once=True)
        async def pay() -> None:
            seen.extend(kinds(await store.read("x")))

        async def flow(ctx: lf.WorkflowContext) -> None:
            ctx.emit("note")
            await ctx.run(pay)

        await run_through(store, flow)
    assert seen == ["EXECUTION_STARTED", "note*", "STEP_STARTED"]


async def test_over_a_crash_after_any_write_an_at_most_once_effect_never_runs_twice() -> None:
    fates: list[str] = []
    for writes in range(7):
        paid: list[int] = []

        @lf.step(at_most_once=True)
        async def pay(paid: list[int] = paid) -> str:
            paid.append(1)
            return "paid"

        async def flow(ctx: lf.WorkflowContext, input: Any, pay: Any = pay) -> Any:
            ctx.emit("note")
            return await ctx.run(pay)

        store = DyingStore(writes)
        async with runtime(store) as rt:
            with contextlib.suppress(lf.StorageWriteError):
                await (await rt.start(flow, execution_id="x")).result()
        store.left = 1_000
        if await store.last_sequence("x") is None:
            continue
        async with runtime(store, lf.flow(flow)) as rt:
            state = await (await rt.recover("x")).rest()
        fates.append(f"{writes}: {state.status}")
        assert len(paid) <= 1
        if state.status == "completed":
            assert paid == [1]
    assert fates == [
        "1: completed",  # only the start is durable
        "2: completed",
        "3: suspended",  # STEP_STARTED is durable: the effect may have run
        "4: completed",
        "5: completed",
        "6: completed",
    ]


@pytest.mark.parametrize("ending", ["crash", "failure"])
@pytest.mark.parametrize("verdict", ["output", "error", "release"])
async def test_a_step_in_doubt_parks_until_somebody_says_what_became_of_it(ending: str, verdict: str) -> None:
    calls: list[int] = []
    seen: list[str] = []

    @lf.step(at_most_once=True, failures=(Coded,))
    async def pay() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("line dropped")
        return "paid at last"

    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        try:
            seen.append(await ctx.run(pay))
        except OSError:
            return await ctx.suspend("go")
        except Coded as error:
            seen.append(f"{type(error).__name__} {error.code}")
        await ctx.suspend("go")

    store = DyingStore(2 if ending == "crash" else 100)
    async with runtime(store, lf.flow(flow)) as rt:
        handle = await rt.start(flow, execution_id="x")
        if ending == "crash":
            with pytest.raises(lf.StorageWriteError):
                await handle.rest()
            store.left = 100
            await rt.recover("x")
        else:
            await handle.rest()
            await rt.resume("x", "go")
        state = await rt.handle("x").rest()
        assert (state.status, state.steps.get("pay").phase, state.pending) == ("suspended", "in-doubt", None)
        assert (await (await rt.recover("x")).rest()).sequence == state.sequence
        with pytest.raises(lf.GateRefusedError):
            await rt.resume("x", "go")
        with pytest.raises(lf.StepRefusedError, match="not in doubt"):
            await rt.resolve_in_doubt("x", "another", "y")
        with pytest.raises(lf.JsonFormError):
            await rt.resolve_in_doubt("x", "pay", object())
        said = {
            "output": {"output": "it was paid"},
            "error": {"error": Coded(4, "refused")},
            "release": {"release": True},
        }[verdict]
        await (await rt.resolve_in_doubt("x", "pay", **said)).rest()
        with pytest.raises(lf.StepRefusedError, match="not in doubt"):
            await rt.resolve_in_doubt("x", "pay", "again")
    assert seen == [{"output": "it was paid", "error": "Coded 4", "release": "paid at last"}[verdict]]
    assert len(calls) == (2 if verdict == "release" else 1)


async def test_a_step_that_was_released_and_crashes_again_is_in_doubt_again() -> None:
    calls: list[int] = []

    @lf.step(at_most_once=True)
    async def pay() -> None:
        calls.append(1)
        raise OSError("line dropped")

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        await ctx.run(pay)

    store = DyingStore(2)
    async with runtime(store, lf.flow(flow)) as rt:
        with pytest.raises(lf.StorageWriteError):
            await (await rt.start(flow, execution_id="x")).rest()
        for turn in range(1, 4):
            store.left = 100
            await (await rt.recover("x")).rest()
            assert (await rt.handle("x").rest()).steps.get("pay").phase == "in-doubt"
            store.left = 2  # the release and the next STEP_STARTED, and no outcome
            handle = await rt.resolve_in_doubt("x", "pay", release=True)
            with pytest.raises(lf.StorageWriteError):
                await handle.rest()
            assert len(calls) == turn + 1


def test_an_at_most_once_step_cannot_be_retried() -> None:
    with pytest.raises(lf.BadInputError, match="cannot be retried"):
        lf.step(at_most_once=True, retry=lf.RetryPolicy())(lambda: None)


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


@pytest.mark.parametrize("kind", ["task", "thread"])
@pytest.mark.parametrize("parked", [False, True], ids=["in the flow", "while the run waits for it"])
async def test_closing_does_not_wait_for_an_effect_that_will_not_end(
    open_store: OpenStore, kind: str, parked: bool
) -> None:
    """F35."""
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
        release.set()
        released.set()
        if kind == "thread":
            while not late:
                await asyncio.sleep(0.001)
        await turns(5)
        log = await store.read("x")
    assert steps_of(log) == ["STARTED"]
    assert late == (["run-over"] if kind == "thread" else [])
