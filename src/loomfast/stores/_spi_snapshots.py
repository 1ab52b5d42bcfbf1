"""The contract of the snapshots that every event store keeps beside its logs.

What lives here: `SnapshotStore`. What a snapshot is, and whether one can be trusted: `_core/snapshots.py`.
What must not: any store.

The guarantees go on from those of `_spi.py`:

12. A save that returned is durable as an append is, and every later read sees it. It happens whole or not at
    all; a second one at the same sequence takes the first one's place.
13. A snapshot never runs ahead of its log, and one that fails its checksum is never saved.
14. Snapshots come back as they are, damaged or not: whoever uses one calls `state_of`, and can fall back.
15. A truncated log is never left without a sound snapshot that covers its cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, TypeAlias

from loomfast._core.snapshots import Snapshot
from loomfast._errors import BadSnapshotError


class SnapshotSummary(NamedTuple):
    """What a listing says of one snapshot."""

    execution_id: str
    sequence: int
    schema_version: str
    size_bytes: int


Summaries: TypeAlias = list[SnapshotSummary]
Faults: TypeAlias = list[BadSnapshotError]


class SnapshotStore(ABC):
    """Snapshots by execution and sequence."""

    @abstractmethod
    async def save(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; it is durable when this returns.

        Raises, with nothing written: `BadSnapshotError` for one that does not pass its checksum,
        `UnknownExecutionError`, `BeyondLogError` for one that covers more than the log holds, and as
        `EventStore.append` for failing storage.
        """

    @abstractmethod
    async def latest(self, execution_id: str, at_most: int | None = None) -> Snapshot | None:
        """Return the snapshot of the highest sequence, not above `at_most`; None if there is none.

        It may be damaged. After a `BadSnapshotError` from `state_of`, ask for one at most at the bad one's
        sequence - 1.
        """

    @abstractmethod
    async def list(self, execution_id: str) -> Summaries:
        """Return what snapshots an execution has, oldest first."""

    @abstractmethod
    async def delete(self, execution_id: str, below: int) -> int:
        """Remove the snapshots with `sequence < below`, and return how many were removed.

        Raises `SnapshotNeededError`, with nothing removed, if a truncated log would be left without a sound
        snapshot that covers its cut.
        """

    @abstractmethod
    async def verify(self, execution_id: str | None = None) -> Faults:
        """Read every snapshot, of one execution or of all, and return what is wrong with those that are bad.

        Checks versions and checksums, not that a body is what the log folds to.
        """
