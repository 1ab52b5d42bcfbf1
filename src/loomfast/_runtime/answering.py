"""Answering executions: what is said to one from outside is appended whole, and drives it on.

What lives here: `Answering`. What must not: which answers fit a state (`_core/answers.py`).

What is left to others is marked as stopped in order before the answer is written: from then on it is running
and driven by nobody, and whoever takes it up, however soon, or because this process has died, finds no crash.
Where another answer is first after all, the mark stays, and forgives one crash: no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from loomfast._core import answers
from loomfast._core.answers import Draft
from loomfast._core.arguments import text_argument
from loomfast._errors import (
    ConflictError,
    GateRefusedError,
    PrefixTruncatedError,
    StaleFenceError,
    StepRefusedError,
    StorageWriteError,
)
from loomfast._events import RUNNING
from loomfast._kernels import Envelope, State
from loomfast._runtime.driven import DrivenExecutions
from loomfast._runtime.execution import STOP_S, DrivenExecution
from loomfast._runtime.flows import FlowTable
from loomfast._runtime.journal import fenced_out
from loomfast._runtime.recovering import Recovering

# How many answers are looked at together, in search of one by its id.
GATES = 32


class Answering:
    """Answers gates and questions of doubt."""

    def __init__(self, driven: DrivenExecutions, recovering: Recovering, flows: FlowTable) -> None:
        self._driven = driven
        self._recovering = recovering
        self._flows = flows

    async def resume(
        self,
        execution_id: str,
        event_type: str,
        payload: Any,
        correlation_key: str | None,
        gate: int | None,
        resume_id: str | None,
        *,
        leave: bool = False,
    ) -> DrivenExecution | None:
        """Return what is driven now; None for what is left to others, and a repeat if nobody here drives it.

        See `WorkflowRuntime.resume`, and with `leave` `WorkflowRuntime.answer`.
        """
        flow_of = self._flows.known if leave else self._flows.of

        def told() -> Coroutine[Any, Any, DrivenExecution | None]:
            return self._tell_in_turn(
                execution_id,
                lambda state: answers.answer(
                    flow_of(state), state, event_type, payload, correlation_key, gate, resume_id
                ),
                lambda: GateRefusedError(execution_id, event_type, "another writer was first"),
                leave=leave,
            )

        if resume_id is None:
            return await self._driven.in_turn(execution_id, told())
        text_argument("resume_id", resume_id)
        return await self._driven.in_turn(
            execution_id, self._once(execution_id, resume_id, event_type, payload, told)
        )

    async def _once(
        self,
        execution_id: str,
        resume_id: str,
        event_type: str,
        payload: Any,
        told: Callable[[], Coroutine[Any, Any, DrivenExecution | None]],
    ) -> DrivenExecution | None:
        """Give an answer unless it is on record already."""
        if not await self._given(execution_id, resume_id, event_type, payload):
            try:
                return await told()
            except GateRefusedError:
                # Perhaps its repeat was first, in another process, since the look.
                if not await self._given(execution_id, resume_id, event_type, payload):
                    raise
        return self._driven.live(execution_id)

    async def _given(self, execution_id: str, resume_id: str, event_type: str, payload: Any) -> bool:
        """Look for an answer by its id, the newest gate first; what is truncated is not found."""
        gates = (await self._driven.states.load(execution_id)).gates
        for last in range(len(gates), 0, -GATES):
            events = await asyncio.gather(
                *(
                    self._answer_at(execution_id, gates.get(ordinal).sequence)
                    for ordinal in range(last - 1, max(last - GATES, 0) - 1, -1)
                )
            )
            for event in events:
                if event is None:
                    return False
                if answers.given(event, resume_id, event_type, payload):
                    return True
        return False

    async def _answer_at(self, execution_id: str, sequence: int) -> Envelope | None:
        try:
            return (await self._driven.store.primary.read_range(execution_id, sequence, sequence))[0]
        except PrefixTruncatedError:
            return None

    async def fire(self, execution_id: str, fenced: bool) -> DrivenExecution | None:
        """See `WorkflowRuntime.fire`."""
        return await self._tell(
            execution_id,
            lambda state: answers.fire(state, self._driven.deps.clock.now_ms()),
            lambda: GateRefusedError(execution_id, answers.TIMER_FIRED, "another writer was first"),
            fenced=fenced,
            patient=False,
        )

    async def resolve_in_doubt(
        self, execution_id: str, key: str, output: Any, error: BaseException | None, release: bool
    ) -> DrivenExecution | None:
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
        *,
        fenced: bool = False,
        patient: bool = True,
    ) -> DrivenExecution | None:
        """Append what `drafted` makes of the state, all or nothing, and drive on.

        `beaten` makes the error for a call that came second. With `fenced`, one that is not driven here is
        fenced before, and not only if the store asks for it. Unless `patient`, one whose lease another
        process holds is not waited for.
        """
        told = self._tell_in_turn(execution_id, drafted, beaten, fenced=fenced, patient=patient)
        return await self._driven.in_turn(execution_id, told)

    async def _tell_in_turn(
        self,
        execution_id: str,
        drafted: Callable[[State], tuple[Draft, ...]],
        beaten: Callable[[], ConflictError],
        *,
        fenced: bool = False,
        patient: bool = True,
        leave: bool = False,
    ) -> DrivenExecution | None:
        """As `_tell`, in a turn. With `leave`, one that is not driven here is left to others (None)."""
        live = self._driven.live(execution_id)
        if live is not None:
            try:
                await live.journal.drain()
            except StorageWriteError as error:
                if not fenced_out(error):
                    raise
                await live.unwound(STOP_S)  # it is over: the store says what there is to answer
            live = self._driven.live(execution_id)
        if live is not None:
            live.journal.commit_group(drafted(live.journal.state))
            try:
                await live.journal.drain()
            except StorageWriteError as error:
                if fenced_out(error):
                    raise beaten() from error
                raise
            return live

        async def fits() -> None:
            drafted(await self._driven.states.load(execution_id))

        if not patient and self._driven.leases is not None:
            await fits()  # which costs less than a claim
        async with self._driven.claimed(execution_id, fits if patient else None):
            return await self._tell_parked(execution_id, drafted, beaten, fenced=fenced, leave=leave)

    async def _tell_parked(
        self,
        execution_id: str,
        drafted: Callable[[State], tuple[Draft, ...]],
        beaten: Callable[[], ConflictError],
        *,
        fenced: bool,
        leave: bool,
    ) -> DrivenExecution | None:
        async def fence_fitting() -> int:
            # Look again before fencing: who was first must not be stopped by the one who is refused.
            drafted(await self._driven.states.load(execution_id))
            return await self._driven.fence(execution_id)

        fence = await fence_fitting() if fenced else None
        while True:
            state = await self._driven.states.load(execution_id)
            flow = None if leave else self._flows.of(state)
            journal = self._driven.journal(execution_id, state=state, fence=fence)
            try:
                drafts = drafted(state)
            except ConflictError:
                if fence is not None and state.status == RUNNING:
                    # Somebody was first after all, and is fenced out by now: whoever fences must drive, or
                    # leave it as what has not crashed.
                    if flow is None:
                        await self._recovering.mark_stopped(journal)
                    else:
                        self._driven.drive(flow, journal)
                raise
            envelopes = journal.envelopes(drafts)
            if flow is None:
                await self._recovering.mark_stopped(journal)
            try:
                await self._driven.append(*envelopes)
                break
            except StaleFenceError as error:
                if fence is not None:
                    raise beaten() from error
                # A parked execution that was fenced before needs a token from whoever drives it next.
                fence = await fence_fitting()
            except ConflictError as error:
                raise beaten() from error
        for envelope in envelopes:
            journal.adopt(envelope)
        return None if flow is None else self._driven.drive(flow, journal)
