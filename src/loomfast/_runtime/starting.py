"""Starting executions: once for a chosen id, at once for a minted one (ADR 0103, D1 and D3), or by others.

What lives here: `Starting`. What must not: how sequence 0 becomes durable (bootstrap).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loomfast._core import recovery, schema
from loomfast._core.answers import Draft
from loomfast._core.arguments import fence_argument, text_argument
from loomfast._core.definitions import FlowDefinition, FlowFunction
from loomfast._errors import BadInputError, ExecutionAlreadyExistsError, StorageWriteError
from loomfast._kernels import Envelope, decode, encode
from loomfast._runtime.bootstrap import append_bootstrap
from loomfast._runtime.driven import DrivenExecutions
from loomfast._runtime.execution import DrivenExecution
from loomfast._runtime.flows import FlowTable
from loomfast._runtime.hooks import call, logger
from loomfast._runtime.journal import ExecutionJournal
from loomfast._runtime.once import StartOnce


class Starting:
    """Starts executions."""

    def __init__(self, driven: DrivenExecutions, flows: FlowTable, id_factory: Callable[[], str]) -> None:
        self._driven = driven
        self._flows = flows
        self._id_factory = id_factory

    async def start(
        self,
        flow: FlowDefinition | FlowFunction,
        input: Any,
        execution_id: str | None,
        compute_target: str | None,
        fence: int | None,
    ) -> DrivenExecution:
        """See `WorkflowRuntime.start`."""
        fence_argument(fence)
        definition, bootstrap = await self._drafted(flow, input, execution_id, compute_target)
        if execution_id is not None:
            if self._driven.leases is None:
                return await self._once(definition, execution_id, bootstrap, fence)
            return await self._driven.in_turn(
                execution_id, self._leased_once(definition, execution_id, bootstrap, fence)
            )
        minted = self._id_factory()
        if self._driven.leases is None:
            return self._at_once(definition, minted, bootstrap, fence)
        return await self._driven.in_turn(minted, self._leased(definition, minted, bootstrap, fence))

    async def submit(
        self,
        flow: FlowDefinition | FlowFunction,
        input: Any,
        execution_id: str | None,
        compute_target: str | None,
    ) -> str:
        """Return the id of what is left to others. See `WorkflowRuntime.submit`."""
        _, bootstrap = await self._drafted(flow, input, execution_id, compute_target)
        if execution_id is None:
            execution_id = self._id_factory()
        await self._driven.in_turn(execution_id, self._left(execution_id, bootstrap))
        return execution_id

    async def _left(self, execution_id: str, bootstrap: Draft) -> None:
        await self._append(self._driven.journal(execution_id), bootstrap)
        # Whoever takes it up finds it running and driven by nobody, which is no crash here.
        try:
            await self._driven.store.recoveries.put(recovery.stopped(None, execution_id, 0))
        except Exception:
            # It is there, and must not be submitted again. Its first recovery counts a crash: no harm.
            logger.exception("execution %r could not be marked as submitted", execution_id)

    async def _drafted(
        self,
        flow: FlowDefinition | FlowFunction,
        input: Any,
        execution_id: str | None,
        compute_target: str | None,
    ) -> tuple[FlowDefinition, Draft]:
        """Return the flow and its EXECUTION_STARTED. Of an id that is taken, no argument is looked at."""
        if execution_id is not None:
            text_argument("execution_id", execution_id)
        try:
            definition = self._flows.register(flow)
            body = _started(definition, input)
            extra = None if compute_target is None else encode({"computeTarget": compute_target})
        except BadInputError as error:
            if execution_id is not None and await self._driven.store.read_range(execution_id, 0, 0):
                raise ExecutionAlreadyExistsError(execution_id) from error
            raise
        return definition, Draft("EXECUTION_STARTED", body, extra=extra)

    def _at_once(
        self, flow: FlowDefinition, execution_id: str, bootstrap: Draft, fence: int | None
    ) -> DrivenExecution:
        journal = self._driven.journal(execution_id, fence=fence)
        journal.hold()  # until the run has had its first turn
        journal.commit(bootstrap.event_type, bootstrap.body, extra=bootstrap.extra)
        return self._driven.drive(flow, journal, inherit=True)

    async def _leased(
        self, flow: FlowDefinition, execution_id: str, bootstrap: Draft, fence: int | None
    ) -> DrivenExecution:
        async with self._driven.claimed(execution_id):
            self._driven.check_open()
            return self._at_once(flow, execution_id, bootstrap, fence)

    async def _once(
        self, flow: FlowDefinition, execution_id: str, bootstrap: Draft, fence: int | None
    ) -> DrivenExecution:
        journal = self._driven.journal(execution_id, fence=fence)
        turn = self._driven.turn(execution_id)
        start = StartOnce(self._driven, flow, journal, bootstrap, turn)
        await turn.acquire()
        return await start.begin()

    async def _leased_once(
        self, flow: FlowDefinition, execution_id: str, bootstrap: Draft, fence: int | None
    ) -> DrivenExecution:
        async with self._driven.claimed(execution_id, lambda: self._refuse_existing(execution_id)):
            journal = self._driven.journal(execution_id, fence=fence)
            journal.adopt(await self._append(journal, bootstrap))
            return self._driven.drive(flow, journal, inherit=True)

    async def _append(self, journal: ExecutionJournal, bootstrap: Draft) -> Envelope:
        envelope = journal.envelope(bootstrap.event_type, bootstrap.body, extra=bootstrap.extra)
        try:
            await append_bootstrap(self._driven.store, envelope)
        except StorageWriteError as error:
            call(self._driven.hooks.on_storage_error, error)
            raise
        return envelope

    async def _refuse_existing(self, execution_id: str) -> None:
        if await self._driven.store.read_range(execution_id, 0, 0):
            raise ExecutionAlreadyExistsError(execution_id)


def _started(flow: FlowDefinition, input: Any) -> bytes:
    """Return the payload of EXECUTION_STARTED, once the input in its JSON form fits the flow's schema."""
    body = encode({"flowId": flow.id, "flowVersion": flow.version, "input": input})
    if flow.input is not None:
        schema.check(flow.input, decode(body)["input"], f"input of flow {flow.id!r}")
    return body
