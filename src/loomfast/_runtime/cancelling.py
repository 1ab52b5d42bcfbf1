"""Cancelling executions, whoever drives them.

What lives here: `Cancelling`. What must not: how a run unwinds (execution). Invariant: an execution has one
end, and no effect starts behind it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from loomfast._errors import ConflictError, ExecutionEndedError, LeaseLostError, StorageWriteError
from loomfast._events import CANCELLED, RUNNING
from loomfast._kernels import State, encode
from loomfast._runtime.driven import DrivenExecutions
from loomfast._runtime.execution import DrivenExecution
from loomfast._runtime.journal import fenced_out
from loomfast._runtime.recovering import Recovering

# How long, in seconds, a cancel that was beaten waits before it looks again.
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.2


class Cancelling:
    """Cancels executions."""

    def __init__(self, driven: DrivenExecutions, recovering: Recovering) -> None:
        self._driven = driven
        self._recovering = recovering

    async def cancel(self, execution_id: str, reason: Any, grace_s: float) -> State:
        """See `WorkflowRuntime.cancel`."""
        body = encode({"reason": reason})
        state: State | None = None
        live = self._driven.live(execution_id)
        if live is not None and not self._driven.turn(execution_id).locked():
            live.cancel(body)  # at once, before it takes another turn
        else:
            state = await self._driven.in_turn(execution_id, self._in_turn(execution_id, body))
        live = self._driven.live(execution_id)
        if state is None and live is not None:
            try:
                state = await self._unwound(live, grace_s)
            except (StorageWriteError, LeaseLostError) as error:
                if not fenced_out(error):
                    raise
        if state is None:  # its run is over: what became of it is for the store to say
            state = await self._driven.in_turn(execution_id, self._parked(execution_id, body))
        if state.status != CANCELLED:
            raise ExecutionEndedError(execution_id, state.status)
        return state

    async def _unwound(self, live: DrivenExecution, grace_s: float) -> State:
        try:
            async with asyncio.timeout(grace_s):
                return await live.rest.wait()
        except TimeoutError:
            await self._driven.in_turn(live.journal.execution_id, live.end_cancelled())
        if live.rest.failure is not None:
            raise live.rest.failure
        return await self._driven.states.load(live.journal.execution_id)

    async def _in_turn(self, execution_id: str, body: bytes) -> State | None:
        """Return the final state, or None for an execution that is driven here and unwinds now."""
        live = self._driven.live(execution_id)
        if live is None:
            return await self._parked(execution_id, body)
        live.cancel(body)
        return None

    async def _parked(self, execution_id: str, body: bytes) -> State:
        pause_s = _FIRST_PAUSE_S
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
                # Somebody wrote, or fenced, in between. Two in step would fence each other for ever.
                jitter = 0.5 + self._driven.deps.entropy(1)[0] / 255
                await self._driven.deps.clock.sleep(pause_s * jitter)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            journal.adopt(envelope)
            if state.status == RUNNING:  # left behind, and perhaps set aside
                await self._recovering.forget(execution_id)
            return journal.state
