"""A store as one tenant sees it: its own executions, and nobody else's.

What lives here: `TenantScopedEventStore`, the logs of a tenant. What is kept beside the logs is in
`_tenant_beside.py`, the form of ids in `_tenant_scope.py`. What must not: storage.

Every verb goes through: what goes in is given the tenant's prefix, what comes out has it taken off, and what
does not have it is not there. A foreign id is an unknown one, since under the prefix it names nothing. Errors
are those of the store inside and name the id as it is stored.

Listings and `read_all` are pages of everybody's of which the tenant's own are kept, read a page at a time:
bounded in memory, and as slow as the others are many. Positions are those of the store inside, so they have
holes where others are. A reader that follows the order does not read the same stretch of others' events
again: the last stretch that was found to hold nothing of the tenant's is remembered, and stays so, since no
event appears behind a position that was read (guarantee 7).

Invariant: no call returns, changes or reveals anything of an id without the prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from loomfast._errors import BadInputError, StoreReadError
from loomfast._kernels import Envelope, State
from loomfast.stores._decorator import EventStoreDecorator
from loomfast.stores._spi import EventStore, ExecutionSummary, PositionedEvent
from loomfast.stores._spi_arguments import limit_of, position_of
from loomfast.stores._spi_leases import Lease
from loomfast.stores._tenant_beside import (
    TenantBranchRegistry,
    TenantLeaseStore,
    TenantRecoveryStore,
    TenantSnapshotStore,
    TenantTimerStore,
)
from loomfast.stores._tenant_scope import SCAN_ROWS, Scope, fork_renamed, own_page, state_as


class TenantScopedEventStore(EventStoreDecorator):
    """The executions of `tenant` in the store `inner`, which other tenants may share.

    A view: closing it refuses further calls through it and leaves `inner` open. SPEC 7, F27.
    """

    def __init__(self, inner: EventStore, tenant: str) -> None:
        super().__init__(inner)
        if not isinstance(tenant, str):
            raise BadInputError(f"tenant must be a text, not {tenant!r}")
        self.tenant = tenant
        self._scope = Scope(tenant)
        self._barren = (0, 0)  # behind the first position, up to the second, nothing is the tenant's
        self._snapshots = TenantSnapshotStore(self._scope, inner)
        self._branches = TenantBranchRegistry(self._scope, inner)
        self._leases = TenantLeaseStore(self._scope, inner)
        self._recoveries = TenantRecoveryStore(self._scope, inner)
        self._timers = TenantTimerStore(self._scope, inner)
        primary = inner.primary
        self._primary = self if primary is inner else TenantScopedEventStore(primary, tenant)

    @property
    def primary(self) -> TenantScopedEventStore:
        return self._primary

    async def append(self, envelope: Envelope) -> None:
        await self.inner.append(self._scope.inward(envelope))

    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        self._scope.check_open()
        await self.inner.append_batch([self._scope.inward(envelope) for envelope in envelopes])

    def write(self, envelopes: Sequence[Envelope]) -> asyncio.Future[Exception | None] | None:
        self._scope.check_open()
        return self.inner.write([self._scope.inward(envelope) for envelope in envelopes])

    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[Envelope]:
        events = await self.inner.read_range(self._scope.own(execution_id), first, last)
        return [own for own in map(self._scope.outward, events) if own is not None]

    async def fold(self, execution_id: str, state: State | None = None) -> State | None:
        own_id = self._scope.own(execution_id)
        folded = await self.inner.fold(own_id, None if state is None else state_as(state, own_id))
        return None if folded is None else state_as(folded, execution_id)

    def watch(self, execution_id: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self.inner.watch(self._scope.own(execution_id), wake)

    async def last_sequence(self, execution_id: str) -> int | None:
        return await self.inner.last_sequence(self._scope.own(execution_id))

    async def list_executions(
        self, *, status: str | None = None, after: int = 0, limit: int = 100
    ) -> list[ExecutionSummary]:
        self._scope.check_open()
        after, limit = position_of(after), limit_of(limit)

        def outward(summary: ExecutionSummary) -> ExecutionSummary | None:
            execution_id = self._scope.bare(summary.execution_id)
            return None if execution_id is None else summary._replace(execution_id=execution_id)

        return await own_page(
            lambda mark, rows: self.inner.list_executions(status=status, after=mark, limit=rows),
            after,
            lambda summary: summary.position,
            outward,
            limit,
        )

    async def acquire_fence(self, execution_id: str, *, lease: Lease | None = None) -> int:
        own_id = self._scope.own(execution_id)
        return await self.inner.acquire_fence(
            own_id, lease=None if lease is None else self._leases.inward(lease)
        )

    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        self._scope.check_open()
        after, limit = position_of(after), limit_of(limit)
        page: list[PositionedEvent] = []
        mark = self._behind_barren(after)
        while True:
            try:
                everybody = await self.inner.read_all(mark, limit=SCAN_ROWS)
            except StoreReadError as error:
                whose = error.execution_id
                if error.position is None or whose is None or self._scope.bare(whose) is not None:
                    if page:  # it ends the page before it
                        return page
                    raise
                mark = error.position  # somebody else's
                continue
            for position, event in everybody:
                own = self._scope.outward(event)
                if own is not None:
                    page.append(PositionedEvent(position, own))
                    if len(page) == limit:
                        return page
            if not everybody:
                if not page:
                    self._barren = (after, mark)
                return page
            mark = everybody[-1].position

    def _behind_barren(self, after: int) -> int:
        first, last = self._barren
        return max(after, last) if first <= after else after

    async def truncate_prefix(self, execution_id: str, before: int) -> int:
        return await self.inner.truncate_prefix(self._scope.own(execution_id), before)

    async def copy_prefix(
        self,
        source_id: str,
        target_id: str,
        through: int,
        *,
        fork_metadata: Mapping[str, object] | None = None,
        branch_name: str | None = None,
    ) -> None:
        if fork_metadata is not None:
            fork_metadata = fork_renamed(dict(fork_metadata), self._scope.own)
        await self.inner.copy_prefix(
            self._scope.own(source_id),
            self._scope.own(target_id),
            through,
            fork_metadata=fork_metadata,
            branch_name=branch_name,
        )

    @property
    def snapshots(self) -> TenantSnapshotStore:
        return self._snapshots

    @property
    def branches(self) -> TenantBranchRegistry:
        return self._branches

    @property
    def leases(self) -> TenantLeaseStore:
        return self._leases

    @property
    def recoveries(self) -> TenantRecoveryStore:
        return self._recoveries

    @property
    def timers(self) -> TenantTimerStore:
        return self._timers

    async def close(self) -> None:
        self._scope.closed = True
        if self._primary is not self:
            await self._primary.close()
