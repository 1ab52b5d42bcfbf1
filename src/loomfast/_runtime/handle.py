"""A handle: a way to wait for an execution, and to follow it, wherever it is driven."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from loomfast._errors import ExecutionCancelledError, ExecutionFailedError
from loomfast._events import CANCELLED, END_KIND, FAILED, SUSPENDED
from loomfast._kernels import State
from loomfast._runtime.following import PAGE_EVENTS, ExecutionEvents
from loomfast._runtime.recorded import read_recorded
from loomfast._runtime.rest import Rest

if TYPE_CHECKING:
    from loomfast._runtime.waiting import Waiting

ENDED = frozenset(END_KIND)
RESTING = ENDED | {SUSPENDED}


class ExecutionHandle:
    """Refers to one execution by its id.

    A handle that `start`, `resume` or `recover` returned also remembers why the run it began could not go on,
    if it could not; it keeps nothing else.
    """

    __slots__ = ("_rest", "_waiting", "execution_id")

    def __init__(self, waiting: Waiting, execution_id: str, rest: Rest | None = None) -> None:
        self._waiting = waiting
        self.execution_id = execution_id
        self._rest = rest

    async def rest(self) -> State:
        """Wait until the execution rests (suspended or ended) and return its durable state.

        Raises `UnknownExecutionError` when there is no such execution, and what keeps one that is driven here
        from going on: `StorageWriteError` (a write failed), `StoreReadError` (its log is damaged),
        `DeterminismError`, `LeaseLostError`, `RuntimeClosedError`. Cancelling the wait does not touch the
        execution.
        """
        return await self._waiting.reach(self.execution_id, RESTING, self._rest)

    async def result(self) -> Any:
        """Wait until the execution has ended and return its output.

        Raises `ExecutionFailedError` or `ExecutionCancelledError` when it ended so, `StoreReadError` when
        what it ended with is damaged; otherwise as `rest`.
        """
        state = await self._waiting.reach(self.execution_id, ENDED, self._rest)
        if state.status == FAILED:
            raise ExecutionFailedError(self.execution_id, self._recorded(state, lambda: state.error))
        if state.status == CANCELLED:
            raise ExecutionCancelledError(self.execution_id, self._recorded(state, lambda: state.reason))
        return self._recorded(state, lambda: state.output)

    def events(self, *, after: int | None = None, page_events: int = PAGE_EVENTS) -> ExecutionEvents:
        """Return an async iterator over the durable events behind the sequence `after`, until it has ended.

        Without `after`, from the first event on. `page_events` bounds how many are held at once. See
        `ExecutionEvents`.
        """
        return self._waiting.follow(self.execution_id, after, self._rest, page_events)

    def _recorded(self, state: State, read: Callable[[], Any]) -> Any:
        return read_recorded(self.execution_id, state.sequence, read)

    def __repr__(self) -> str:
        return f"<ExecutionHandle {self.execution_id}>"
