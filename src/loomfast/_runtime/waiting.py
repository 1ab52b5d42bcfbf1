"""Waiting for an execution, wherever it is driven.

What lives here: `Waiting`, behind every handle. What must not: anything that changes an execution.
"""

from __future__ import annotations

from collections.abc import Collection

from loomfast._errors import LeaseLostError, StorageWriteError, UnknownExecutionError
from loomfast._kernels import State
from loomfast._runtime.clock import moment
from loomfast._runtime.driven import DrivenExecutions
from loomfast._runtime.execution import DrivenExecution
from loomfast._runtime.following import ExecutionEvents
from loomfast._runtime.handle import ExecutionHandle
from loomfast._runtime.hooks import logger
from loomfast._runtime.journal import fenced_out
from loomfast._runtime.polling import Polling
from loomfast._runtime.rest import Rest

# How long, in milliseconds, a gate may be due before whoever waits for its execution hears of it.
OVERDUE_MS = 5_000


class Waiting:
    """Waits for executions that are driven here or elsewhere."""

    def __init__(self, driven: DrivenExecutions) -> None:
        self._driven = driven

    def handle(self, execution_id: str, live: DrivenExecution | None = None) -> ExecutionHandle:
        """Return a handle; with `live`, one that also remembers why that run could not go on."""
        return ExecutionHandle(self, execution_id, None if live is None else live.rest)

    def follow(
        self, execution_id: str, after: int | None, rest: Rest | None, page_events: int
    ) -> ExecutionEvents:
        """Return an iterator over the events of an execution; `rest` is of the run that its handle began."""
        return ExecutionEvents(self._driven, execution_id, after, rest, page_events=page_events)

    async def reach(
        self,
        execution_id: str,
        statuses: Collection[str],
        rest: Rest | None = None,
    ) -> State:
        """Wait until the execution has one of `statuses`, durably, and return its state.

        An execution driven elsewhere is looked at now and then (`Polling`), and when the store tells of it;
        so is one that was driven here and has been fenced out, by whoever waits for more than `rest`, the run
        that its handle began. Raises `UnknownExecutionError`, what keeps an execution driven here from
        resting (see `DrivenExecution`), and the failure of `rest`, once nobody here drives the execution.
        """
        state: State | None
        polling = Polling(self._driven.deps.clock)
        overdue = False
        while True:
            live = self._driven.live(execution_id)
            if live is not None:
                try:
                    state = await live.rest.wait()
                except (StorageWriteError, LeaseLostError) as error:
                    if not fenced_out(error):
                        raise
                else:
                    if state.status in statuses:
                        return state
            with self._driven.watching(execution_id) as watcher:
                if self._driven.live(execution_id) is not None:
                    continue
                state = await self._driven.states.find(execution_id)
                if state is not None and state.status in statuses:
                    return state
                if rest is not None and rest.failure is not None and self._driven.live(execution_id) is None:
                    raise rest.failure
                if state is None:
                    raise UnknownExecutionError(execution_id)
                overdue = overdue or self._overdue(state)
                await polling.pause(watcher)

    def _overdue(self, state: State) -> bool:
        """Tell whether a timer has been due for a while, and say so: it may be that none runs anywhere."""
        wake_at = None if state.pending is None else state.pending.wake_at
        if wake_at is None or self._driven.deps.clock.now_ms() - wake_at < OVERDUE_MS:
            return False
        logger.warning(
            "execution %r is waited for, and has been due since %s: nothing wakes it. Run a TimerService"
            " beside this runtime, or a `loomfast worker` on this store",
            state.execution_id,
            moment(wake_at),
        )
        return True
