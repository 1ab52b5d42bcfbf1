"""Executing the effect of a step, and recording how it ended.

An attempt runs in a task of its own and writes its outcome itself, so that the outcome is recorded even when
the branch of the flow that asked for it is gone. It tells the emit rule what happened: the effect began, it
ended, and whether a re-run will be served the outcome. The effect of a sync step ends when its THREAD ends,
which may be long after its task was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from concurrent.futures import Executor
from typing import Any

from loomfast._core import failures
from loomfast._core.definitions import StepDefinition
from loomfast._core.emit_rule import EmitRule
from loomfast._errors import JsonFormError, StepFailedError
from loomfast._events import KIND_NAMES, STEP_CANCELLED, STEP_COMPLETED, STEP_FAILED, STEP_STARTED, Opaque
from loomfast._kernels import decode, encode
from loomfast._runtime.journal import ExecutionJournal, Room
from loomfast._runtime.signals import RunSignal
from loomfast._runtime.threads import LoopCalls


class EffectContext:
    """What the effect of a step is given: who it is, and a way to say something while it works.

    `execution_id`, `key` (the step's identity in the run), `attempt` (from 1).
    """

    def __init__(
        self, journal: ExecutionJournal, calls: LoopCalls, key: str, attempt: int, persists_json: bool
    ) -> None:
        self.execution_id = journal.execution_id
        self.key = key
        self.attempt = attempt
        self._journal = journal
        self._calls = calls
        self._persists_json = persists_json

    def emit(self, event_type: str, payload: object = None) -> Room:
        """Append an event, once for each attempt that makes it; from the effect's thread too.

        Never stamped, so never served: the next attempt emits again (ADR 0102, D1). Raises `JsonFormError`.
        Await the result to wait for room in the journal.
        """
        body = body_of(payload, self._persists_json)
        if self._calls.here():
            self._journal.commit(event_type, body)
        else:
            self._calls.call(lambda: self._journal.commit(event_type, body))
        return self._journal.room()


def body_of(payload: object, persists_json: bool) -> bytes | Opaque:
    """Return the payload's persisted form; a store of Python objects also takes one without a JSON form."""
    try:
        return encode(payload)
    except JsonFormError:
        if persists_json:
            raise
        return Opaque(payload)


class Attempt:
    """One attempt of one step."""

    def __init__(
        self,
        step: StepDefinition,
        key: str,
        number: int,
        journal: ExecutionJournal,
        rule: EmitRule,
        executor: Executor | None,
    ) -> None:
        self.step = step
        self.key = key
        self.number = number
        self.closing = False
        self._entered = False
        self._threaded = False
        self._journal = journal
        self._rule = rule
        self._executor = executor

    def begin(self, input_digest: str) -> None:
        """Record STEP_STARTED and open the in-flight window."""
        self._record(
            STEP_STARTED,
            {"key": self.key, "stepId": self.step.id, "attempt": self.number, "inputDigest": input_digest},
        )
        self._rule.began()

    async def run(self, fx: EffectContext, input: object) -> Any:
        """Execute the effect, record its outcome, and return its output in JSON form or raise its failure.

        Cancelled, it records STEP_CANCELLED, unless the runtime is closing: closing is not an outcome.
        """
        self._entered = True
        try:
            output = await self._call(fx, input)
            body = encode({"key": self.key, "output": output})
        except asyncio.CancelledError:
            self._cancelled()
            raise
        except RunSignal:
            self._rule.ended_unsettled()
            raise
        except Exception as error:
            raise self._failed(error) from error.__cause__
        self._journal.commit(KIND_NAMES[STEP_COMPLETED], body, self.key)
        return decode(body)["output"]

    def task_done(self) -> None:
        """The task of this attempt is done.

        One that was cancelled before it could begin never entered `run`.
        """
        if not self._entered:
            self._cancelled()
        if not self._threaded:
            self._rule.ended()

    async def _call(self, fx: EffectContext, input: object) -> Any:
        if self.step.is_async:
            return await self.step.call(fx, input)
        assert self._executor is not None
        loop = asyncio.get_running_loop()
        thread = self._executor.submit(contextvars.copy_context().run, self.step.call, fx, input)
        self._threaded = True
        thread.add_done_callback(lambda _: self._thread_done(loop))
        return await asyncio.wrap_future(thread)

    def _thread_done(self, loop: asyncio.AbstractEventLoop) -> None:
        # A loop that is closed by now has no run left whose emits could be judged.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._rule.ended)

    def _cancelled(self) -> None:
        self._rule.ended_unsettled()
        if not self.closing:
            self._record(STEP_CANCELLED, {"key": self.key, "reason": "cancelled"})

    def _failed(self, error: Exception) -> BaseException:
        typed = isinstance(error, self.step.failures)
        recorded = failures.record(error)
        if not typed:
            self._rule.ended_unsettled()
        self._record(STEP_FAILED, {"key": self.key, "typed": typed, "error": recorded})
        if typed:
            return served_failure(self.step, self.key, recorded)
        return error

    def _record(self, kind: int, payload: dict[str, Any]) -> None:
        self._journal.commit(KIND_NAMES[kind], encode(payload), self.key)


def served_failure(step: StepDefinition, key: str, error: dict[str, Any]) -> BaseException:
    """Return the exception that stands for a recorded typed failure, the same on every run."""
    rebuilt = failures.rebuild(error, step.failures)
    return StepFailedError(key, error) if rebuilt is None else rebuilt
