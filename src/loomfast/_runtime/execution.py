"""One execution that this process drives: run after run, until it rests.

An execution *rests* when it is suspended with no answer, has ended, or cannot go on because a write failed.
What lives here: the loop that runs the flow's body and turns how it ended into the log's next fact. What must
not: deciding which executions to drive (the runtime).
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Executor

from loomfast._core import failures
from loomfast._core.definitions import FlowDefinition
from loomfast._errors import RuntimeClosedError, StorageWriteError
from loomfast._events import RUNNING
from loomfast._kernels import State, encode
from loomfast._runtime.context import DeterminismPolicy, WorkflowContext
from loomfast._runtime.journal import ExecutionJournal


class DrivenExecution:
    """Drives one execution.

    `rest` resolves to the state at rest, or to what kept it from resting:
    the `StorageWriteError` of a failed write, or a `RuntimeClosedError`."""

    def __init__(
        self,
        flow: FlowDefinition,
        journal: ExecutionJournal,
        *,
        persists_json: bool,
        determinism: DeterminismPolicy,
        executor: Executor | None,
    ) -> None:
        self.flow = flow
        self.journal = journal
        self.rest: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self.rest.add_done_callback(_seen)
        self.closing = False
        self._persists_json = persists_json
        self._determinism = determinism
        self._executor = executor
        self._context: WorkflowContext | None = None
        self._task: asyncio.Task[None] | None = None
        journal.on_failure = self._abort

    def begin(self) -> asyncio.Task[None]:
        """Start driving; the task ends when the execution rests or the runtime closes."""
        self._task = asyncio.get_running_loop().create_task(self._drive())
        # A task that is cancelled before its first step never enters `_drive`.
        self._task.add_done_callback(lambda _: self._end())
        return self._task

    def _end(self) -> None:
        self.journal.closed = True
        if not self.rest.done():
            self.rest.set_exception(self.journal.failure or RuntimeClosedError(self.journal.execution_id))

    async def _drive(self) -> None:
        try:
            while True:
                await self._run()
                await self.journal.drain()
                # An answer may have come while this run was still unwinding: then there is more to run.
                if self.journal.state.status != RUNNING:
                    break
        except StorageWriteError:
            pass  # `_end` passes it on
        except asyncio.CancelledError:
            # A failed write cancels this task, wherever it waits; anybody else's cancel is passed on.
            if self.journal.failure is None and not self.closing:
                raise
        else:
            self.rest.set_result(self.journal.state)
        finally:
            self._end()

    async def _run(self) -> None:
        journal = self.journal
        context = self._context = WorkflowContext(
            journal,
            persists_json=self._persists_json,
            determinism=self._determinism,
            executor=self._executor,
        )
        try:
            output = await self.flow.function(context, journal.state.input)
            fact, body = "EXECUTION_COMPLETED", encode({"output": output})
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if journal.failure is None and self._stopped(error):
                context.close()
                raise asyncio.CancelledError from error
            fact, body = "EXECUTION_FAILED", encode({"error": failures.record(error)})
        if journal.failure is None:
            await context.settle()
        suspended = context.end()
        if journal.failure is not None:
            raise journal.failure
        if not suspended:
            journal.commit(fact, body)

    def _stopped(self, error: BaseException) -> bool:
        """Whether the run was stopped from outside: by `close`, or with the loop it is on.

        That is no outcome.
        """
        task = asyncio.current_task()
        cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
        return self.closing or cancelled

    def _abort(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Stop driving without recording an outcome: closing a process is not a cancellation.

        Drains what is queued.
        """
        self.closing = True
        if self._context is not None:
            self._context.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        with contextlib.suppress(StorageWriteError):
            await self.journal.drain()


def _seen(rest: asyncio.Future[State]) -> None:
    if not rest.cancelled():
        rest.exception()  # seen here: an execution nobody waits for makes no "never retrieved" noise
