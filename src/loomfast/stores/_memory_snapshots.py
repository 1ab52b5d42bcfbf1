"""The snapshots of a memory store.

What lives here: `MemorySnapshotStore`. What must not: logs. Invariant: everything happens under the lock that
it shares with the event store.
"""

from __future__ import annotations

from loomfast._core.snapshots import Snapshot, is_sound
from loomfast._errors import BadSnapshotError, BeyondLogError, SnapshotNeededError, UnknownExecutionError
from loomfast._kernels import NO_EVENT
from loomfast.stores._memory_shared import Shared
from loomfast.stores._spi_arguments import LAST, bounded
from loomfast.stores._spi_snapshots import Faults, SnapshotStore, SnapshotSummary, Summaries


class MemorySnapshotStore(SnapshotStore):
    """Keeps snapshots until the process ends. Every call completes without waiting."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._kept: dict[str, dict[int, Snapshot]] = {}

    async def save(self, snapshot: Snapshot) -> None:
        snapshot.verify()
        with self._shared.lock:
            self._shared.check_open(snapshot.execution_id)
            last = self._shared.head(snapshot.execution_id).last_sequence
            if last == NO_EVENT:
                raise UnknownExecutionError(snapshot.execution_id)
            if snapshot.sequence > last:
                raise BeyondLogError(snapshot.execution_id, snapshot.sequence, last)
            self._kept.setdefault(snapshot.execution_id, {})[snapshot.sequence] = snapshot

    async def latest(self, execution_id: str, at_most: int | None = None) -> Snapshot | None:
        at_most = LAST if at_most is None else bounded("at_most", at_most)
        with self._shared.lock:
            self._shared.check_open(execution_id)
            kept = self._kept.get(execution_id, {})
            sequences = [sequence for sequence in kept if sequence <= at_most]
            return kept[max(sequences)] if sequences else None

    async def list(self, execution_id: str) -> Summaries:
        with self._shared.lock:
            self._shared.check_open(execution_id)
            kept = sorted(self._kept.get(execution_id, {}).items())
        return [
            SnapshotSummary(execution_id, sequence, snapshot.schema_version, len(snapshot.body))
            for sequence, snapshot in kept
        ]

    async def delete(self, execution_id: str, below: int) -> int:
        below = bounded("below", below)
        with self._shared.lock:
            self._shared.check_open(execution_id)
            kept = self._kept.get(execution_id, {})
            gone = [sequence for sequence in kept if sequence < below]
            cut = self._shared.cut(execution_id)
            if gone and cut > 1 and not self.covers(execution_id, max(cut - 1, below)):
                raise SnapshotNeededError(execution_id, cut - 1)
            for sequence in gone:
                del kept[sequence]
            return len(gone)

    async def verify(self, execution_id: str | None = None) -> Faults:
        with self._shared.lock:
            self._shared.check_open(*(() if execution_id is None else (execution_id,)))
            wanted = list(self._kept) if execution_id is None else [execution_id]
            snapshots = [s for name in wanted for _, s in sorted(self._kept.get(name, {}).items())]
        faults: Faults = []
        for snapshot in snapshots:
            try:
                snapshot.verify()
            except BadSnapshotError as error:
                faults.append(error)
        return faults

    def covers(self, execution_id: str, sequence: int) -> bool:
        """Whether a sound snapshot holds what the log does up to `sequence`. Called with the lock held."""
        kept = self._kept.get(execution_id, {})
        return any(at >= sequence and is_sound(kept[at]) for at in sorted(kept, reverse=True))
