"""One execution that this process drives: run after run, until it rests.

An execution *rests* when it is suspended with no answer, or has ended. It may also be unable to go on: a
write failed, its log is damaged or is not what the flow asks for, its lease was lost, the runtime closed.
What lives here: the loop that runs the flow's body and turns how it ended into the log's next fact. What must
not: deciding which executions to drive (the runtime).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import traceback
from collections.abc import Callable

from loomfast._core import failures
from loomfast._core.definitions import FlowDefinition
from loomfast._errors import (
    DeterminismError,
    LoomError,
    RuntimeClosedError,
    StorageWriteError,
    StoreReadError,
)
from loomfast._events import RUNNING
from loomfast._kernels import State, encode
from loomfast._runtime.context import WorkflowContext
from loomfast._runtime.deps import RunDeps
from loomfast._runtime.hooks import logger
from loomfast._runtime.journal import ExecutionJournal
from loomfast._runtime.rest import Rest
from loomfast._runtime.signals import RunSignal

# How long, in seconds, what is cancelled may take to clean up when an execution is stopped.
STOP_S = 5.0
# How long, in seconds, the store may take for what is queued when an execution is stopped.
DRAIN_S = 30.0


class DrivenExecution:
    """Drives one execution.

    `rest` tells of the state at rest, or of what kept it from resting: the `StorageWriteError` of a failed
    write, the `DeterminismError` of a run that left its log, the `StoreReadError` of a damaged event, a
    `LeaseLostError`, or a `RuntimeClosedError`; so does `failure`. `at_end` is called with this and the state
    at rest, or None, before any waiter is told.
    """

    def __init__(
        self,
        flow: FlowDefinition,
        journal: ExecutionJournal,
        deps: RunDeps,
        at_end: Callable[[DrivenExecution, State | None], object],
    ) -> None:
        self.flow = flow
        self.journal = journal
        self.rest = Rest()
        self._stopping = False
        self._at_end = at_end
        self._deps = deps
        self._cancelled = False
        self._reason = b""
        self.failure: BaseException | None = None
        self._in_flow = False
        self._context: WorkflowContext | None = None
        self._task: asyncio.Task[None] | None = None
        journal.on_failure = self._abort

    def begin(self, context: contextvars.Context) -> None:
        """Start driving; the first run sees these context variables, any other sees the runtime's.

        The task ends when the execution rests or the runtime closes. Nothing happens if it has already.
        """
        if not self.rest.done:
            self._task = asyncio.get_running_loop().create_task(self._drive(), context=context)

    def _end(self, state: State | None = None) -> None:
        if self.rest.done:
            return
        self.journal.closed = True
        self.journal.on_failure = None
        if state is None:
            self.failure = (
                self.journal.failure or self.failure or RuntimeClosedError(self.journal.execution_id)
            )
        self._at_end(self, state)
        self.rest.settle(state, self.failure)

    async def _drive(self) -> None:
        journal = self.journal
        journal.go()
        state: State | None = None
        try:
            if not self._cancelled:
                await self._run()
            while True:
                if journal.failure is not None:
                    raise journal.failure
                if self._cancelled and journal.state.ended is None:
                    journal.commit("EXECUTION_CANCELLED", self._reason)
                await journal.drain()
                # An answer or a cancel may have come while this run was still unwinding: then there is more.
                if journal.state.status != RUNNING and not (self._cancelled and journal.state.ended is None):
                    break
                if not self._cancelled:
                    await asyncio.get_running_loop().create_task(
                        self._run(), context=self._deps.context.copy()
                    )
        except (StorageWriteError, StoreReadError, DeterminismError) as error:
            # Without its traceback, which would keep the frames of the flow, and this one, and so itself.
            self.failure = error.with_traceback(None)
        except asyncio.CancelledError:
            if not (self._stopping or self._deps.closing.begun):
                raise
        else:
            state = journal.state
        finally:
            self._end(state)

    async def _run(self) -> None:
        journal = self.journal
        if journal.failure is not None:  # before the flow's first turn: nothing was there to interrupt
            raise journal.failure
        if self._cancelled:  # between two runs
            return
        if self._deps.closing.begun:
            raise asyncio.CancelledError
        context = self._context = WorkflowContext(journal, self._deps)
        self._in_flow = True
        try:
            output = await self.flow.function(context, context._recorded(0, lambda: journal.state.input))
            fact, body = "EXECUTION_COMPLETED", encode({"output": output})
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if self._stopped(error):
                context._close()
                raise asyncio.CancelledError from error
            fact, body = "EXECUTION_FAILED", encode({"error": failures.record(error)})
            if not (
                self._cancelled
                or context._parked
                or context._stopped_by
                or context._wound_down
                or journal.failure is not None
                or isinstance(error, RunSignal)
            ):
                # As text: a record that holds the error would hold the flow's frames, and all their locals.
                trace = "".join(traceback.format_exception(error))
                logger.warning("execution %r failed\n%s", journal.execution_id, trace)
        finally:
            self._in_flow = False
        if context._busy:
            await context._settle()
        context._end()
        self._context = None  # nothing of it is left to stop, and an execution may wait long for its store
        if journal.failure is not None:
            raise journal.failure
        if self._stopping or (context._wound_down and not self._cancelled):
            raise asyncio.CancelledError
        if context._stopped_by is not None and not self._cancelled:
            raise context._stopped_by
        if not context._parked and not self._cancelled:
            journal.commit(fact, body)

    def _stopped(self, error: BaseException) -> bool:
        """Whether the run was stopped by `close`, or with the loop it is on: that is no outcome."""
        if self._stopping:
            return True
        task = asyncio.current_task()
        foreign = self.journal.failure is None and not self._cancelled
        return (
            foreign
            and isinstance(error, asyncio.CancelledError)
            and task is not None
            and task.cancelling() > 0
        )

    def cancel(self, reason: bytes) -> None:
        """Cancel the execution: its run unwinds, no further effect starts, and it ends `cancelled`.

        `reason` is the payload of its EXECUTION_CANCELLED. The first call counts.
        """
        if self._cancelled:
            return
        self._cancelled, self._reason = True, reason
        if self._context is not None:
            self._context._cancel()
        self._interrupt()

    def _abort(self) -> None:
        if self._context is not None:
            self._context._close()
        if self._task is not asyncio.current_task():  # there, the call that leads here raises
            self._interrupt()

    def _interrupt(self) -> None:
        if self._in_flow and self._task is not None:
            self._task.cancel()

    async def end_cancelled(self) -> None:
        """End an execution that is being cancelled and does not unwind in time, whatever its run still does.

        From here on every call of the run raises, and nothing it does is recorded.
        """
        if self.rest.done:
            return
        if self._context is not None:
            self._context._end()
        journal = self.journal
        try:
            if journal.failure is None and journal.state.ended is None:
                journal.commit("EXECUTION_CANCELLED", self._reason)
            await journal.drain()
        except StorageWriteError:
            self._end()
        else:
            self._end(journal.state)

    @property
    def busy(self) -> bool:
        """Whether an effect or decider has yet to end."""
        return self._context is not None and self._context._busy

    def wind_down(self) -> None:
        """The runtime closes: what waits to be tried again stops, without an outcome."""
        if self._context is not None:
            self._context._wind_down()

    async def unwound(self, within_s: float) -> None:
        """Wait until the run is over, at most `within_s` seconds. Raises nothing."""
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=within_s)

    async def stop(self, within_s: float, error: LoomError | None = None) -> None:
        """Stop driving without recording an outcome, and drain what is queued. Raises nothing.

        What runs has `within_s` seconds to end once it is cancelled, the store `DRAIN_S` to take the rest.

        `error` is what keeps the execution from resting, `RuntimeClosedError` unless given. What ignores its
        cancellation, and the threads of sync steps, are named in a warning and left behind.
        """
        self._stopping = True
        self.failure = self.failure or error
        steps = {} if self._context is None else dict(self._context._live)
        if self._context is not None:
            self._context._end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task, *steps), timeout=within_s)
            left = [step.key for task, step in steps.items() if step.executing or not task.done()]
            if left or not self._task.done():
                logger.warning(
                    "execution %r: %s did not end when it was cancelled and is left behind",
                    self.journal.execution_id,
                    f"step {', '.join(map(repr, left))}" if left else "its flow",
                )
        with contextlib.suppress(StorageWriteError):
            try:
                async with asyncio.timeout(DRAIN_S):
                    await self.journal.drain()
            except TimeoutError:
                logger.warning(
                    "execution %r: the store did not take its last events", self.journal.execution_id
                )
        self._end()
