"""The history of executions: snapshots of it, cutting it, and forking from it.

What lives here: `History`, and the policy that takes snapshots of executions at rest. What must not: what a
snapshot holds (`_core/snapshots.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from loomfast._core.arguments import text_argument
from loomfast._core.definitions import FlowDefinition
from loomfast._errors import (
    BadInputError,
    BeyondLogError,
    DuplicateSequenceError,
    ExecutionAlreadyExistsError,
    LoomError,
    UnknownExecutionError,
)
from loomfast._events import RUNNING
from loomfast._kernels import State, fold_events
from loomfast._runtime.driven import DrivenExecutions
from loomfast._runtime.execution import DrivenExecution
from loomfast._runtime.flows import FlowTable
from loomfast._runtime.hooks import logger

# How many events are read at a time, and folded before the event loop gets its turn.
PAGE = 1_000


class History:
    """Takes snapshots, truncates and forks.

    `snapshots_due` are the snapshots that are being taken by the policy.
    """

    def __init__(
        self,
        driven: DrivenExecutions,
        flows: FlowTable,
        id_factory: Callable[[], str],
        *,
        snapshot_every: int | None,
        truncate: bool,
    ) -> None:
        self.snapshots_due: set[asyncio.Task[None]] = set()
        self._driven = driven
        self._flows = flows
        self._id_factory = id_factory
        self._snapshot_every = snapshot_every
        self._truncate = truncate

    async def snapshot(self, execution_id: str) -> int:
        """See `WorkflowRuntime.snapshot`."""
        return (await self._driven.states.snapshot(execution_id)).sequence

    async def truncate_prefix(self, execution_id: str, before: int | None) -> int:
        """See `WorkflowRuntime.truncate_prefix`."""
        if before is None:
            before = await self.snapshot(execution_id) + 1
        return await self._driven.store.truncate_prefix(execution_id, before)

    def rested(self, live: DrivenExecution, state: State | None) -> None:
        """Take the snapshot that is due, in the background, of an execution that has come to rest."""
        if state is None or self._snapshot_every is None:
            return
        if state.ended is None and not self._driven.closed:
            work = self._snapshot_due(state.execution_id, state.sequence, self._snapshot_every)
            due = asyncio.get_running_loop().create_task(work)
            self.snapshots_due.add(due)
            due.add_done_callback(self.snapshots_due.discard)

    async def _snapshot_due(self, execution_id: str, sequence: int, every: int) -> None:
        store = self._driven.store
        try:
            taken = await store.snapshots.list(execution_id)
            newest = max((summary.sequence for summary in taken), default=0)
            if sequence - newest >= every:
                covered = await self.snapshot(execution_id)
                if self._truncate:
                    await store.truncate_prefix(execution_id, covered + 1)
                    await store.snapshots.delete(execution_id, covered)
        except LoomError:
            # The log is complete without it; the next rest tries again.
            logger.exception("no snapshot of execution %r could be taken", execution_id)

    async def fork(
        self, execution_id: str, at_sequence: int, branch_name: str | None, fork_id: str | None
    ) -> tuple[str, DrivenExecution | None]:
        """Return the child's id, and what is driven if it does not rest. See `WorkflowRuntime.fork`."""
        if fork_id is not None:
            text_argument("fork_id", fork_id)
        if type(at_sequence) is not int or at_sequence < 0:
            raise BadInputError(f"at_sequence={at_sequence!r}: must be a whole number, 0 or more")
        state = await self._state_at(execution_id, at_sequence)
        if state.sequence < at_sequence:
            raise BeyondLogError(execution_id, at_sequence, state.sequence)
        if state.ended is not None:
            raise BadInputError(
                f"execution {execution_id!r} has {state.status} by {at_sequence}: cut before that"
            )
        flow = self._flows.of(state)
        child_id = self._id_factory() if fork_id is None else fork_id
        return child_id, await self._driven.in_turn(
            child_id, self._fork(flow, execution_id, child_id, at_sequence, branch_name)
        )

    async def _state_at(self, execution_id: str, sequence: int) -> State:
        """Fold the log up to a sequence, or to its end, a page at a time. Raises `UnknownExecutionError`."""
        state: State | None = None
        for first in range(0, sequence + 1, PAGE):
            last = min(first + PAGE - 1, sequence)
            page = await self._driven.store.primary.read_range(execution_id, first, last)
            if not page:
                break
            state = fold_events(state, page)
        if state is None:
            raise UnknownExecutionError(execution_id)
        return state

    async def _fork(
        self, flow: FlowDefinition, source_id: str, child_id: str, at_sequence: int, branch_name: str | None
    ) -> DrivenExecution | None:
        store = self._driven.store

        async def refuse_existing() -> None:
            if await store.read_range(child_id, 0, 0):
                raise ExecutionAlreadyExistsError(child_id)

        async with self._driven.claimed(child_id, refuse_existing):
            try:
                await store.copy_prefix(source_id, child_id, at_sequence, branch_name=branch_name)
            except DuplicateSequenceError as error:
                raise ExecutionAlreadyExistsError(child_id) from error
            state = await self._driven.states.load(child_id)
            if state.status != RUNNING:
                return None
            return self._driven.drive(flow, self._driven.journal(child_id, state=state))
