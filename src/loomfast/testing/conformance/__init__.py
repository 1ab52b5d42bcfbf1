"""The conformance kit: whoever writes an event store runs it against theirs. Needs pytest, and no plugin.

    class TestMyStore(EventStoreConformance):
        @asynccontextmanager
        async def open_store(self):
            async with await MyStore.open(self.place / "events") as store:
                yield store

`EventStoreConformance` is all suites; each is also there by itself. Every test names the guarantees of the
contract that it checks; docs/store-contract.md has them in prose.
"""

from loomfast.testing.conformance._suite import Conformance, Need, guarantee, guarantees_checked
from loomfast.testing.conformance.suites import (
    ArgumentConformance,
    BranchConformance,
    CallConformance,
    CatchUpConformance,
    CompactionConformance,
    CopyConformance,
    EventStoreConformance,
    FenceConformance,
    LeaseConformance,
    ListingConformance,
    LogConformance,
    RecoveryConformance,
    ScheduleConformance,
    SnapshotConformance,
    TimerConformance,
    ValueConformance,
)

__all__ = [
    "ArgumentConformance",
    "BranchConformance",
    "CallConformance",
    "CatchUpConformance",
    "CompactionConformance",
    "Conformance",
    "CopyConformance",
    "EventStoreConformance",
    "FenceConformance",
    "LeaseConformance",
    "ListingConformance",
    "LogConformance",
    "Need",
    "RecoveryConformance",
    "ScheduleConformance",
    "SnapshotConformance",
    "TimerConformance",
    "ValueConformance",
    "guarantee",
    "guarantees_checked",
]
