"""Recovering executions whose process died while it ran.

What lives here: `Recovering`. What must not: answers; an execution that rests is nobody's to recover.
"""

from __future__ import annotations

from loomfast._events import RUNNING
from loomfast._runtime.driven import DrivenExecutions
from loomfast._runtime.execution import DrivenExecution
from loomfast._runtime.flows import FlowTable


class Recovering:
    """Drives on what was left running."""

    def __init__(self, driven: DrivenExecutions, flows: FlowTable) -> None:
        self._driven = driven
        self._flows = flows

    async def recover(self, execution_id: str) -> DrivenExecution | None:
        """Return what is driven now; None for an execution that rests. See `WorkflowRuntime.recover`."""
        return await self._driven.in_turn(execution_id, self._recover(execution_id))

    async def _recover(self, execution_id: str) -> DrivenExecution | None:
        live = self._driven.live(execution_id)
        if live is not None:
            return live
        state = await self._driven.states.load(execution_id)
        if state.status != RUNNING:
            return None
        flow = self._flows.of(state)
        fence = await self._driven.store.acquire_fence(execution_id)
        state = await self._driven.states.load(execution_id)  # again: what came before the fence counts
        if state.status != RUNNING:
            return None
        return self._driven.drive(flow, self._driven.journal(execution_id, state=state, fence=fence))
