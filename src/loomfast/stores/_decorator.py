"""What every store decorator starts from: all verbs go to the store inside, unchanged.

What lives here: `EventStoreDecorator`. What must not: anything that a particular decorator does. Invariant:
with nothing overridden, nobody can tell the decorated store from the one inside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from loomfast._errors import BadInputError
from loomfast._kernels import Envelope, State
from loomfast.stores._spi import EventStore, ExecutionSummary, PositionedEvent
from loomfast.stores._spi_branches import BranchRegistry
from loomfast.stores._spi_leases import Lease, LeaseStore
from loomfast.stores._spi_recoveries import RecoveryStore
from loomfast.stores._spi_snapshots import SnapshotStore
from loomfast.stores._spi_timers import TimerStore


class EventStoreDecorator(EventStore):
    """An event store around another one, `inner`, which it closes when it is closed."""

    def __init__(self, inner: EventStore) -> None:
        if not isinstance(inner, EventStore):
            raise BadInputError(f"the store inside must be an EventStore, not {type(inner).__name__}")
        self.inner = inner
        self.persists_json = inner.persists_json

    @property
    def primary(self) -> EventStore:
        primary = self.inner.primary
        return self if primary is self.inner else primary

    async def append(self, envelope: Envelope) -> None:
        await self.inner.append(envelope)

    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        await self.inner.append_batch(envelopes)

    def write(self, envelopes: Sequence[Envelope]) -> asyncio.Future[Exception | None] | None:
        return self.inner.write(envelopes)

    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[Envelope]:
        return await self.inner.read_range(execution_id, first, last)

    async def fold(self, execution_id: str, state: State | None = None) -> State | None:
        return await self.inner.fold(execution_id, state)

    async def last_sequence(self, execution_id: str) -> int | None:
        return await self.inner.last_sequence(execution_id)

    async def list_executions(
        self, *, status: str | None = None, after: int = 0, limit: int = 100
    ) -> list[ExecutionSummary]:
        return await self.inner.list_executions(status=status, after=after, limit=limit)

    async def acquire_fence(self, execution_id: str, *, lease: Lease | None = None) -> int:
        return await self.inner.acquire_fence(execution_id, lease=lease)

    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        return await self.inner.read_all(after, limit=limit)

    async def truncate_prefix(self, execution_id: str, before: int) -> int:
        return await self.inner.truncate_prefix(execution_id, before)

    async def copy_prefix(
        self,
        source_id: str,
        target_id: str,
        through: int,
        *,
        fork_metadata: Mapping[str, object] | None = None,
        branch_name: str | None = None,
    ) -> None:
        await self.inner.copy_prefix(
            source_id, target_id, through, fork_metadata=fork_metadata, branch_name=branch_name
        )

    @property
    def snapshots(self) -> SnapshotStore:
        return self.inner.snapshots

    @property
    def branches(self) -> BranchRegistry:
        return self.inner.branches

    @property
    def leases(self) -> LeaseStore:
        return self.inner.leases

    @property
    def recoveries(self) -> RecoveryStore:
        return self.inner.recoveries

    @property
    def timers(self) -> TimerStore:
        return self.inner.timers

    def watch(self, execution_id: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self.inner.watch(execution_id, wake)

    async def check_storage(self) -> list[str]:
        return await self.inner.check_storage()

    async def close(self) -> None:
        await self.inner.close()
