"""Cancelling executions, whoever drives them.

What lives here: `Cancelling`. What must not: how a run unwinds (execution). Invariant: an execution has one
end, and no effect starts behind it.
"""

from __future__ import annotations

from typing import Any

from loomfast._errors import ConflictError, ExecutionEndedError
from loomfast._events import CANCELLED
from loomfast._kernels import State, encode
from loomfast._runtime.driven import DrivenExecutions


class Cancelling:
    """Cancels executions."""

    def __init__(self, driven: DrivenExecutions) -> None:
        self._driven = driven

    async def cancel(self, execution_id: str, reason: Any) -> State:
        """See `WorkflowRuntime.cancel`."""
        body = encode({"reason": reason})
        state: State | None = None
        live = self._driven.live(execution_id)
        if live is not None and not self._driven.turn(execution_id).locked():
            live.cancel(body)  # at once, before it takes another turn
        else:
            state = await self._driven.in_turn(execution_id, self._in_turn(execution_id, body))
        if state is None:
            live = self._driven.live(execution_id)
            state = await (self._driven.states.load(execution_id) if live is None else live.rest.wait())
        if state.status != CANCELLED:
            raise ExecutionEndedError(execution_id, state.status)
        return state

    async def _in_turn(self, execution_id: str, body: bytes) -> State | None:
        """Return the final state, or None for an execution that is driven here and unwinds now."""
        live = self._driven.live(execution_id)
        if live is None:
            return await self._parked(execution_id, body)
        live.cancel(body)
        return None

    async def _parked(self, execution_id: str, body: bytes) -> State:
        while True:
            state = await self._driven.states.load(execution_id)
            if state.ended is not None:
                return state
            fence = await self._driven.store.acquire_fence(execution_id)
            journal = self._driven.journal(execution_id, state=state, fence=fence)
            envelope = journal.envelope("EXECUTION_CANCELLED", body)
            try:
                await self._driven.append(envelope)
            except ConflictError:
                continue  # somebody wrote in between: look again
            journal.adopt(envelope)
            return journal.state
