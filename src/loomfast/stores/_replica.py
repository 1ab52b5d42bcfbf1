"""A store whose plain reads go to a replica, which may lag.

What lives here: `ReplicaReadEventStore`. What must not: how a replica comes to know what its primary knows.
Invariant: whatever decides something is asked of the primary. That is every write, every fence, lease,
branch, snapshot, account and timer, and every read through `primary`; the runtime's folds are of that kind.

The confirmation of a refused start (ADR 0103, D2) reads through the decorated store, as the record has it. So
behind a replica that has not caught up, a real duplicate reads back as absent and surfaces as a
`StorageWriteError` after the single retry: loud, and nothing ran.
"""

from __future__ import annotations

from loomfast._errors import BadInputError
from loomfast._kernels import Envelope, State
from loomfast.stores._decorator import EventStoreDecorator
from loomfast.stores._spi import EventStore, ExecutionSummary, PositionedEvent


class ReplicaReadEventStore(EventStoreDecorator):
    """Writes to `primary`, and reads logs, folds, listings and the total order from `replica`.

    The replica must hold what the primary held at some time, positions included. What it does not have yet
    is not seen by plain reads (guarantee 2 holds for `store.primary` only). Closing closes both.
    """

    def __init__(self, primary: EventStore, replica: EventStore) -> None:
        super().__init__(primary)
        if not isinstance(replica, EventStore):
            raise BadInputError(f"the replica must be an EventStore, not {type(replica).__name__}")
        self.replica = replica

    @property
    def primary(self) -> EventStore:
        return self.inner.primary

    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[Envelope]:
        return await self.replica.read_range(execution_id, first, last)

    async def fold(self, execution_id: str, state: State | None = None) -> State | None:
        return await self.replica.fold(execution_id, state)

    async def last_sequence(self, execution_id: str) -> int | None:
        return await self.replica.last_sequence(execution_id)

    async def list_executions(
        self, *, status: str | None = None, after: int = 0, limit: int = 100
    ) -> list[ExecutionSummary]:
        return await self.replica.list_executions(status=status, after=after, limit=limit)

    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        return await self.replica.read_all(after, limit=limit)

    async def close(self) -> None:
        try:
            await self.inner.close()
        finally:
            await self.replica.close()
