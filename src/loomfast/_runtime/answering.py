"""Answering executions: what is said to one from outside is appended whole, and drives it on.

What lives here: `Answering`. What must not: which answers fit a state (`_core/answers.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loomfast._core import answers
from loomfast._core.answers import Draft
from loomfast._errors import (
    ConflictError,
    GateRefusedError,
    StaleFenceError,
    StepRefusedError,
    StorageWriteError,
)
from loomfast._events import RUNNING
from loomfast._kernels import State
from loomfast._runtime.driven import DrivenExecutions
from loomfast._runtime.execution import DrivenExecution
from loomfast._runtime.flows import FlowTable


class Answering:
    """Answers gates and questions of doubt."""

    def __init__(self, driven: DrivenExecutions, flows: FlowTable) -> None:
        self._driven = driven
        self._flows = flows

    async def resume(
        self,
        execution_id: str,
        event_type: str,
        payload: Any,
        correlation_key: str | None,
        gate: int | None,
    ) -> DrivenExecution:
        """See `WorkflowRuntime.resume`."""
        return await self._tell(
            execution_id,
            lambda state: answers.answer(
                self._flows.of(state), state, event_type, payload, correlation_key, gate
            ),
            lambda: GateRefusedError(execution_id, event_type, "another writer was first"),
        )

    async def fire(self, execution_id: str) -> DrivenExecution:
        """See `WorkflowRuntime.fire`."""
        return await self._tell(
            execution_id,
            lambda state: answers.fire(state, self._driven.deps.clock.now_ms()),
            lambda: GateRefusedError(execution_id, answers.TIMER_FIRED, "another writer was first"),
        )

    async def resolve_in_doubt(
        self, execution_id: str, key: str, output: Any, error: BaseException | None, release: bool
    ) -> DrivenExecution:
        """See `WorkflowRuntime.resolve_in_doubt`."""
        return await self._tell(
            execution_id,
            lambda state: answers.resolve(state, key, output=output, error=error, release=release),
            lambda: StepRefusedError(execution_id, key, "another writer was first"),
        )

    async def _tell(
        self,
        execution_id: str,
        drafted: Callable[[State], tuple[Draft, ...]],
        beaten: Callable[[], ConflictError],
    ) -> DrivenExecution:
        """Append what `drafted` makes of the state, all or nothing, and drive on.

        `beaten` makes the error for a call that came second.
        """
        return await self._driven.in_turn(execution_id, self._tell_in_turn(execution_id, drafted, beaten))

    async def _tell_in_turn(
        self,
        execution_id: str,
        drafted: Callable[[State], tuple[Draft, ...]],
        beaten: Callable[[], ConflictError],
    ) -> DrivenExecution:
        live = self._driven.live(execution_id)
        if live is not None:
            await live.journal.drain()
            live = self._driven.live(execution_id)
        if live is not None:
            live.journal.commit_group(drafted(live.journal.state))
            try:
                await live.journal.drain()
            except StorageWriteError as error:
                if isinstance(error.__cause__, ConflictError):
                    raise beaten() from error
                raise
            return live
        fence: int | None = None
        while True:
            state = await self._driven.states.load(execution_id)
            flow = self._flows.of(state)
            journal = self._driven.journal(execution_id, state=state, fence=fence)
            try:
                drafts = drafted(state)
            except ConflictError:
                if fence is not None and state.status == RUNNING:
                    # Somebody was first after all, and is fenced out by now: whoever fences must drive.
                    self._driven.drive(flow, journal)
                raise
            envelopes = journal.envelopes(drafts)
            try:
                await self._driven.append(*envelopes)
                break
            except StaleFenceError as error:
                if fence is not None:
                    raise beaten() from error
                # A parked execution that was fenced before needs a token from whoever drives it next. Look
                # again before fencing: who was first must not be stopped by the one who is refused.
                drafted(await self._driven.states.load(execution_id))
                fence = await self._driven.store.acquire_fence(execution_id)
            except ConflictError as error:
                raise beaten() from error
        for envelope in envelopes:
            journal.adopt(envelope)
        return self._driven.drive(flow, journal)
