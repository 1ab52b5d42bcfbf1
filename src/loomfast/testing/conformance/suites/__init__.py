"""The suites of the conformance kit, one per part of the contract, and all of them in one class.

What lives here: tests. What must not: any store. Invariant: a test takes for granted only what the contract
says. Positions may have holes, calls that wait at the same time may be served in any order, and an error
names an execution by the store's own id.
"""

from loomfast.testing.conformance.suites.arguments import ArgumentConformance
from loomfast.testing.conformance.suites.branches import BranchConformance
from loomfast.testing.conformance.suites.calls import CallConformance
from loomfast.testing.conformance.suites.catch_up import CatchUpConformance
from loomfast.testing.conformance.suites.compaction import CompactionConformance
from loomfast.testing.conformance.suites.copying import CopyConformance
from loomfast.testing.conformance.suites.fences import FenceConformance
from loomfast.testing.conformance.suites.leases import LeaseConformance
from loomfast.testing.conformance.suites.listing import ListingConformance
from loomfast.testing.conformance.suites.log import LogConformance
from loomfast.testing.conformance.suites.recoveries import RecoveryConformance
from loomfast.testing.conformance.suites.schedules import ScheduleConformance
from loomfast.testing.conformance.suites.snapshots import SnapshotConformance
from loomfast.testing.conformance.suites.timers import TimerConformance
from loomfast.testing.conformance.suites.values import ValueConformance

__all__ = [
    "ArgumentConformance",
    "BranchConformance",
    "CallConformance",
    "CatchUpConformance",
    "CompactionConformance",
    "CopyConformance",
    "EventStoreConformance",
    "FenceConformance",
    "LeaseConformance",
    "ListingConformance",
    "LogConformance",
    "RecoveryConformance",
    "ScheduleConformance",
    "SnapshotConformance",
    "TimerConformance",
    "ValueConformance",
]


class EventStoreConformance(
    LogConformance,
    ListingConformance,
    FenceConformance,
    ValueConformance,
    CatchUpConformance,
    CallConformance,
    CompactionConformance,
    CopyConformance,
    SnapshotConformance,
    BranchConformance,
    LeaseConformance,
    RecoveryConformance,
    TimerConformance,
    ScheduleConformance,
    ArgumentConformance,
):
    """Everything that the contract asks of an event store."""
