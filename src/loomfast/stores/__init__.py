"""Event stores: where logs live. The door to the contract, to the stores that need nothing installed,
and to the decorators.

`SqliteEventStore` is imported when it is first asked for, so that a program that keeps its logs elsewhere
does not pay for SQLite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loomfast.stores._coalescing import CoalescingEventStore
from loomfast.stores._decorator import EventStoreDecorator
from loomfast.stores._memory import MemoryEventStore
from loomfast.stores._replica import ReplicaReadEventStore
from loomfast.stores._spi import EventStore, ExecutionSummary, PositionedEvent
from loomfast.stores._spi_branches import Branch, BranchRegistry, Tip
from loomfast.stores._spi_leases import Lease, LeaseStore
from loomfast.stores._spi_recoveries import Recovery, RecoveryStore
from loomfast.stores._spi_snapshots import SnapshotStore, SnapshotSummary
from loomfast.stores._spi_timers import Schedule, TimerStore, Wake
from loomfast.stores._tenant import TenantScopedEventStore

if TYPE_CHECKING:
    from loomfast.stores._sqlite import SqliteEventStore

__all__ = [
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
    "Recovery",
    "RecoveryStore",
    "ReplicaReadEventStore",
    "Schedule",
    "SnapshotStore",
    "SnapshotSummary",
    "SqliteEventStore",
    "TenantScopedEventStore",
    "TimerStore",
    "Tip",
    "Wake",
]


def __getattr__(name: str) -> Any:
    if name == "SqliteEventStore":
        from loomfast.stores._sqlite import SqliteEventStore

        return SqliteEventStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
