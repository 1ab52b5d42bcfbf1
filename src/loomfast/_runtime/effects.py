"""Executing the effect of a step, and recording how it ended.

A live step runs in a task of its own and writes its outcomes itself, so that they are recorded even when the
branch of the flow that asked is gone. What an effect does to its task (cancels it, leaves a timer behind that
does) never reaches the flow's for the same reason. It makes attempts until one settles or no retry is left.
Of the emit rule it tells what happened: an effect began, an effect ended, the step ended unsettled.

An effect ends when it ITSELF ends: a timed-out task that ignores its cancellation, or the thread of a sync
step, may outlive its attempt. Until then it counts as in flight; what it returns late is dropped.

Exactly one outcome per attempt: STEP_COMPLETED, STEP_FAILED (`typed` when the class is declared, else to be
tried again) or STEP_CANCELLED. Closing the runtime is no outcome and records none. After its outcome an
attempt has nothing more to say: its effect context refuses to emit.

No frame here keeps the failure that passes through it: with the failure's traceback that would be a cycle,
and the locals of the flow that caught it would live until the cycle collector comes by (F37).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from loomfast._core import failures
from loomfast._core.definitions import StepDefinition
from loomfast._core.emit_rule import EmitRule
from loomfast._errors import BadInputError, JsonFormError, RunOverError, StepTimeoutError
from loomfast._events import (
    KIND_NAMES,
    RESERVED,
    STEP_CANCELLED,
    STEP_COMPLETED,
    STEP_FAILED,
    STEP_STARTED,
    Opaque,
)
from loomfast._kernels import decode, encode
from loomfast._runtime.clock import done_within, timer
from loomfast._runtime.journal import ExecutionJournal, Room
from loomfast._runtime.signals import CancelSignal, RunSignal, WindDownSignal
from loomfast._runtime.threads import LoopCalls

# The emit rule of the run that is executing an effect or decider in this context, if one is.
executing: contextvars.ContextVar[EmitRule | None] = contextvars.ContextVar("executing", default=None)

if TYPE_CHECKING:
    from loomfast._runtime.deps import RunDeps

# How long a retry waits for the timed-out effect before it to end. One that ignores its cancellation, or a
# thread, may run on beside the retry after that.
OVERLAP_S = 5.0


class EffectContext:
    """What the effect of a step is given: who it is, and a way to say something while it works.

    `execution_id`, `step_id`, `key` (the step's identity in the run), `attempt` (from 1).
    """

    def __init__(
        self,
        journal: ExecutionJournal,
        calls: LoopCalls,
        step_id: str,
        key: str,
        attempt: int,
        persists_json: bool,
    ) -> None:
        self.execution_id = journal.execution_id
        self.step_id = step_id
        self.key = key
        self.attempt = attempt
        self._over = False
        self._journal = journal
        self._calls = calls
        self._persists_json = persists_json

    def emit(self, event_type: str, payload: object = None) -> Room:
        """Append an event, once for each attempt that makes it; from the effect's thread too.

        Never stamped, so never served: the next attempt emits again (ADR 0102, D1). Raises `JsonFormError`,
        and `RunOverError` once the attempt has its outcome, as for an effect that outlives its timeout. Await
        the result to wait for room in the journal.
        """
        if not isinstance(event_type, str) or event_type in RESERVED or not event_type:
            raise BadInputError(f"an effect cannot emit {event_type!r}")
        body = body_of(payload, self._persists_json)
        if self._calls.here():
            self._emit(event_type, body)
        else:
            self._calls.call(lambda: self._emit(event_type, body))
        return self._journal.room()

    def _emit(self, event_type: str, body: bytes | Opaque) -> None:
        if self._over:
            raise RunOverError(f"step {self.key!r}: attempt {self.attempt} has had its outcome")
        self._journal.commit(event_type, body)

    def _end(self) -> None:
        """The attempt has its outcome: what its effect says from now on is refused."""
        self._over = True


def body_of(payload: object, persists_json: bool) -> bytes | Opaque:
    """Return the payload's persisted form; a store of Python objects also takes one without a JSON form."""
    try:
        return encode(payload)
    except JsonFormError:
        if persists_json:
            raise
        return Opaque(payload)


Proceed: TypeAlias = Callable[[], Awaitable[Any]]
EffectMiddleware: TypeAlias = Callable[[EffectContext, Proceed], Awaitable[Any]]


@dataclass(slots=True)
class EffectTools:
    """What executing effects needs of its surroundings; the same for every step of a run."""

    journal: ExecutionJournal
    rule: EmitRule
    calls: LoopCalls
    deps: RunDeps


class LiveStep:
    """One step that is executed in this run, attempt after attempt.

    `attempt` is the number of the first one to make. Run it in a task of its own. `closing`: it is stopped
    without an outcome, and nobody waits for it. `over`: it has been executed, and its outcome recorded.
    """

    def __init__(
        self, tools: EffectTools, step: StepDefinition, key: str, attempt: int, input_digest: str
    ) -> None:
        self.closing = False
        self._pause: asyncio.Future[None] | None = None
        self._running: _Attempt | None = None
        self._stopped = False
        self._entered = False
        self.over = False
        self._waiter: asyncio.Future[Any] | None = None
        self._tools = tools
        self._step = step
        self._key = key
        self._attempt = attempt
        self.first = attempt == 1
        self._input_digest = input_digest

    def begin(self) -> None:
        """Record the first STEP_STARTED, in the caller's own turn of the loop."""
        self._started()

    def waiter(self) -> asyncio.Future[Any]:
        """Return a future of the output or failure, for the one who asks. Cancelling it stops nothing."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    async def run(self, input: object) -> None:
        """Execute the step; tell the waiter its output in JSON form, or its failure, if it still waits.

        Cancelled, it cancels the effect and records STEP_CANCELLED, unless it is being closed.
        """
        self._entered = True
        try:
            output = await self._executed(input)
        except (KeyboardInterrupt, SystemExit):
            raise
        except asyncio.CancelledError:
            waiter = self._over()
            if waiter is not None:
                waiter.cancel()
            raise
        except BaseException as error:
            waiter = self._over()
            if waiter is not None:
                waiter.set_exception(error)
                del waiter  # the failure's traceback holds this frame
        else:
            waiter = self._over()
            if waiter is not None:
                waiter.set_result(output)

    def _over(self) -> asyncio.Future[Any] | None:
        """Note that the step is over, and return the future of whoever still waits for it."""
        self.over = True
        # Not kept: a failure's traceback leads to this step, which must not lead back to the failure.
        waiter, self._waiter = self._waiter, None
        return None if waiter is None or waiter.done() else waiter

    async def _executed(self, input: object) -> Any:
        tries = 0
        settled = False
        try:
            while True:
                tries += 1
                attempt = self._running = _Attempt(self._tools, self._step, self._key, self._attempt)
                returned = False
                try:
                    if self._step.at_most_once:
                        await self._tools.journal.all_durable()
                    output = await attempt.run(input)
                    returned = True
                    body = encode({"key": self._key, "output": output})
                except asyncio.CancelledError:
                    self._cancelled()
                    raise
                except CancelSignal:  # from a call of the context, made by the effect itself
                    self._cancelled()
                    raise
                except (RunSignal, KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:
                    if isinstance(error, self._step.failures):
                        recorded = self._failed(error, typed=True)
                        settled = True
                        raise served_failure(self._step, self._key, recorded) from error
                    self._failed(error, typed=False)
                    # An output without JSON form would be made again in vain.
                    delay_s = None if returned else self._delay_s(error, tries)
                    if delay_s is None:
                        if isinstance(error, GeneratorExit):
                            # As in any coroutine: it would close whatever waits for it, without a word.
                            raise RuntimeError(f"step {self._key!r} raised GeneratorExit") from error
                        raise
                else:
                    self._tools.journal.commit(KIND_NAMES[STEP_COMPLETED], body, self._key)
                    settled = True
                    return decode(body)["output"]
                await self._rest(delay_s)
                await attempt.over(OVERLAP_S)
                self._attempt += 1
                self._started()
        finally:
            if not settled:
                self._tools.rule.ended_unsettled()

    def stop(self, task: asyncio.Task[Any], *, closing: bool = False) -> None:
        """Let no further attempt begin, and cancel the one that runs: once, so that it can clean up.

        `task` is what runs this step. With `closing`, no outcome is recorded for it.
        """
        if not self._stopped or (closing and not self.closing):
            self._stopped, self.closing = True, closing
            task.cancel()

    async def _rest(self, seconds: float) -> None:
        """Wait until it may try again; it may not once the runtime closes."""
        self._pause = asyncio.get_running_loop().create_future()
        try:
            if not self._tools.deps.closing.begun:
                await done_within(self._tools.deps.clock, seconds, self._pause)
        finally:
            self._pause = None
        if self._tools.deps.closing.begun:
            raise WindDownSignal

    def wind_down(self) -> None:
        """The runtime closes: what waits until it may try again need not wait any longer."""
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    @property
    def key(self) -> str:
        """The step's identity in the run."""
        return self._key

    @property
    def executing(self) -> bool:
        """Whether its latest effect has yet to end, be it in a thread that nobody waits for."""
        return self._running is not None and self._running.executing

    def done(self) -> None:
        """The task is done. One that was cancelled before its first turn never entered `run`."""
        if not self._entered:
            self._tools.rule.ended_unsettled()
            with contextlib.suppress(RunSignal, RunOverError):
                self._cancelled()
            waiter = self._over()
            if waiter is not None:
                waiter.cancel()

    def _started(self) -> None:
        self._record(
            STEP_STARTED,
            {
                "key": self._key,
                "stepId": self._step.id,
                "attempt": self._attempt,
                "inputDigest": self._input_digest,
            },
        )

    def _cancelled(self) -> None:
        if not self.closing:
            self._record(STEP_CANCELLED, {"key": self._key, "reason": "cancelled"})

    def _delay_s(self, error: BaseException, tries: int) -> float | None:
        retry = self._step.retry
        if retry is None or self._stopped or not isinstance(error, retry.on):
            return None
        return retry.delay_s(self._tools.journal.execution_id, self._key, tries)

    def _failed(self, error: BaseException, *, typed: bool) -> dict[str, Any]:
        recorded = failures.record(error, self._step.failures if typed else ())
        self._record(STEP_FAILED, {"key": self._key, "typed": typed, "error": recorded})
        return recorded

    def _record(self, kind: int, payload: dict[str, Any]) -> None:
        self._tools.journal.commit(KIND_NAMES[kind], encode(payload), self._key)


class _Attempt:
    """One execution of the effect, within its time."""

    def __init__(self, tools: EffectTools, step: StepDefinition, key: str, number: int) -> None:
        self._tools = tools
        self._step = step
        self._fx = EffectContext(tools.journal, tools.calls, step.id, key, number, tools.deps.persists_json)
        self._executing = 0
        self._over: asyncio.Future[None] | None = None

    async def run(self, input: object) -> Any:
        """Return what the effect returns; raise what it raises, or `StepTimeoutError`."""
        try:
            if self._step.timeout_s is None:
                return await self._effect(input)
            return await self._in_time(input, self._step.timeout_s)
        finally:
            self._fx._end()

    async def _in_time(self, input: object, timeout_s: float) -> Any:
        effect = asyncio.get_running_loop().create_task(self._effect(input))
        limit = timer(self._tools.deps.clock, timeout_s)
        try:
            await asyncio.wait((effect, limit), return_when=asyncio.FIRST_COMPLETED)
            if not effect.done():
                effect.cancel()
                await asyncio.sleep(0)  # one that heeds it has ended when its caller goes on
                raise StepTimeoutError(self._fx.key, timeout_s)
            return effect.result()
        except asyncio.CancelledError:
            if not effect.cancelling():
                effect.cancel()
            if not effect.done():
                await asyncio.wait((effect, limit), return_when=asyncio.FIRST_COMPLETED)
            if effect.done() and not effect.cancelled():
                return effect.result()  # it ended by itself all the same: that is its outcome
            raise
        finally:
            limit.cancel()
            if not effect.done():
                effect.add_done_callback(_drop)
            del effect

    @property
    def executing(self) -> bool:
        """Whether the effect itself, or its thread, has yet to end."""
        return self._executing > 0

    async def over(self, bound_s: float) -> None:
        """Wait until the effect itself has ended, at most `bound_s` seconds."""
        if self._executing:
            self._over = asyncio.get_running_loop().create_future()
            await done_within(self._tools.deps.clock, bound_s, self._over)

    async def _effect(self, input: object) -> Any:
        self._tools.journal.check_ours()
        executing.set(self._tools.rule)
        self._began()
        try:
            if self._step.is_async and not self._tools.deps.middleware:
                return await self._step.call(self._fx, input)
            return await self._proceed(input)()
        finally:
            self._ended()

    def _proceed(self, input: object) -> Proceed:
        """The effect with the middleware around it, the first outermost."""

        async def innermost() -> Any:
            self._tools.journal.check_ours()  # again: middleware may have taken its time
            if self._step.is_async:
                return await self._step.call(self._fx, input)
            returned = await self._in_thread(input)
            return await returned if inspect.isawaitable(returned) else returned

        proceed: Proceed = innermost
        for middleware in reversed(self._tools.deps.middleware):
            proceed = _around(middleware, self._fx, proceed)
        return proceed

    async def _in_thread(self, input: object) -> Any:
        # Counted on its own: a thread cannot be cancelled, and outlives whoever waits for it.
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        thread = self._tools.deps.executor.submit(context.run, _call, self._step, self._fx, input)
        self._began()
        thread.add_done_callback(lambda _: self._thread_ended(loop))
        try:
            return await asyncio.wrap_future(thread)
        finally:
            del thread

    def _thread_ended(self, loop: asyncio.AbstractEventLoop) -> None:
        # A loop that is closed by now has no run left whose emits could be judged.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._ended)

    def _began(self) -> None:
        self._executing += 1
        self._tools.rule.began()

    def _ended(self) -> None:
        self._executing -= 1
        self._tools.rule.ended()
        if self._executing == 0 and self._over is not None and not self._over.done():
            self._over.set_result(None)


def _call(step: StepDefinition, fx: EffectContext, input: object) -> Any:
    try:
        return step.call(fx, input)
    except StopIteration as error:
        # As in any coroutine: no future can carry one, and whoever waits for it would wait for ever.
        raise RuntimeError(f"step {fx.key!r} raised StopIteration") from error


def _around(middleware: EffectMiddleware, fx: EffectContext, proceed: Proceed) -> Proceed:
    return lambda: middleware(fx, proceed)


def _drop(effect: asyncio.Task[Any]) -> None:
    if not effect.cancelled():
        effect.exception()  # the attempt has its outcome; what comes later is dropped without noise


def served_failure(step: StepDefinition, key: str, error: dict[str, Any]) -> BaseException:
    """Return the exception that stands for a recorded typed failure, the same on every run."""
    return failures.rebuild(key, error, step.failures)
