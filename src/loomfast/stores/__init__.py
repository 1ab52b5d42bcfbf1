"""Event stores: where logs live. The door to the contract, to the stores and to the decorators.

`SqliteEventStore` and `PostgresEventStore` are imported when they are first asked for, so that a program that
keeps its logs elsewhere does not pay for their drivers; that of PostgreSQL need not even be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loomfast._errors import BadInputError
from loomfast.stores._coalescing import CoalescingEventStore
from loomfast.stores._decorator import EventStoreDecorator
from loomfast.stores._memory import MemoryEventStore
from loomfast.stores._replica import ReplicaReadEventStore
from loomfast.stores._spi import EventStore, ExecutionSummary, PositionedEvent
from loomfast.stores._spi_branches import Branch, BranchRegistry, Tip
from loomfast.stores._spi_leases import Lease, LeaseStore
from loomfast.stores._spi_recoveries import Recovery, RecoveryStore
from loomfast.stores._spi_snapshots import SnapshotStore, SnapshotSummary
from loomfast.stores._spi_timers import ScheduleRow, TimerStore, Wake
from loomfast.stores._tenant import TenantScopedEventStore

if TYPE_CHECKING:
    from loomfast.stores._postgres import PostgresEventStore
    from loomfast.stores._sqlite import SqliteEventStore

__all__ = [
    "POSTGRES_SCHEMES",
    "Branch",
    "BranchRegistry",
    "CoalescingEventStore",
    "EventStore",
    "EventStoreDecorator",
    "ExecutionSummary",
    "Lease",
    "LeaseStore",
    "MemoryEventStore",
    "PositionedEvent",
    "PostgresEventStore",
    "Recovery",
    "RecoveryStore",
    "ReplicaReadEventStore",
    "ScheduleRow",
    "SnapshotStore",
    "SnapshotSummary",
    "SqliteEventStore",
    "TenantScopedEventStore",
    "TimerStore",
    "Tip",
    "Wake",
    "open_store",
]


# How a URL of a store on PostgreSQL begins.
POSTGRES_SCHEMES: Final = ("postgresql://", "postgres://")


async def open_store(url: str, *, create: bool = True) -> EventStore:
    """Open the store that `url` names: PostgreSQL for `postgresql://…`, else the SQLite file of that path.

    The schema of a PostgreSQL store is `loomfast`. Raises `BadInputError` for a URL of another kind, and as
    the `open` of the store.
    """
    if not isinstance(url, str):
        raise BadInputError(f"{url!r}: give the store's URL or path as a text")
    if url.startswith(POSTGRES_SCHEMES):
        from loomfast.stores._postgres import PostgresEventStore

        return await PostgresEventStore.open(url, create=create)
    if "://" in url:
        raise BadInputError(
            f"{url.partition('://')[0]}://…: stores are at postgresql://… or in a SQLite file"
        )
    from loomfast.stores._sqlite import SqliteEventStore

    return await SqliteEventStore.open(url, create=create)


def __getattr__(name: str) -> Any:
    if name == "SqliteEventStore":
        from loomfast.stores._sqlite import SqliteEventStore

        return SqliteEventStore
    if name == "PostgresEventStore":
        from loomfast.stores._postgres import PostgresEventStore

        return PostgresEventStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
