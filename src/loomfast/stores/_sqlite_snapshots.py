"""The snapshots of a SQLite store.

What lives here: `SqliteSnapshotStore`, the tasks that write snapshots, and the queries that read them. What
must not: events. A snapshot is stored with its own checksum; whoever loads it checks it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import apsw

from loomfast._core.snapshots import Snapshot, is_sound
from loomfast._errors import BadSnapshotError, BeyondLogError, SnapshotNeededError
from loomfast.stores._spi_arguments import bounded
from loomfast.stores._spi_snapshots import Faults, SnapshotStore, SnapshotSummary, Summaries
from loomfast.stores._sqlite_rows import load_text, store_text
from loomfast.stores._sqlite_writer import Ledger, Task

if TYPE_CHECKING:
    from loomfast.stores._sqlite import SqliteEventStore

_LAST: Final = 0xFFFFFFFF
_COLUMNS: Final = "s.id, s.schema_version, s.checksum, s.body"
_UPSERT: Final = (
    "INSERT INTO snapshots (id, schema_version, checksum, body) VALUES (?, ?, ?, ?) ON CONFLICT (id)"
    " DO UPDATE SET schema_version = excluded.schema_version, checksum = excluded.checksum,"
    " body = excluded.body"
)
_OF_ONE: Final = "FROM executions x JOIN snapshots s ON s.id BETWEEN x.number << 32 AND (x.number << 32) + ? "
_LATEST: Final = f"SELECT {_COLUMNS} {_OF_ONE} WHERE x.id = ? ORDER BY s.id DESC LIMIT 1"
_LIST: Final = f"SELECT s.id, s.schema_version, length(s.body) {_OF_ONE} WHERE x.id = ? ORDER BY s.id"
_ONE: Final = f"SELECT {_COLUMNS} FROM snapshots s WHERE s.id = ?"
_IDS: Final = "SELECT x.id, s.id FROM snapshots s JOIN executions x ON x.number = s.id >> 32 "


class SqliteSnapshotStore(SnapshotStore):
    """Snapshots in the database of a `SqliteEventStore`, written by its writer thread."""

    def __init__(self, store: SqliteEventStore) -> None:
        """Not for callers: use `store.snapshots`."""
        self._store = store

    async def save(self, snapshot: Snapshot) -> None:
        snapshot.verify()
        await self._store._write(snapshot.execution_id, SaveSnapshot(snapshot))

    async def latest(self, execution_id: str, at_most: int | None = None) -> Snapshot | None:
        at_most = _LAST if at_most is None else bounded("at_most", at_most)
        query = partial(read_latest, execution_id=execution_id, at_most=at_most)
        snapshot: Snapshot | None = await self._store._read(execution_id, query)
        return snapshot

    async def list(self, execution_id: str) -> Summaries:
        summaries: Summaries = await self._store._read(
            execution_id, partial(read_list, execution_id=execution_id)
        )
        return summaries

    async def delete(self, execution_id: str, below: int) -> int:
        below = min(max(bounded("below", below), 0), _LAST + 1)
        removed: int = await self._store._write(execution_id, DeleteSnapshots(execution_id, below))
        return removed

    async def verify(self, execution_id: str | None = None) -> Faults:
        faults: Faults = await self._store._read(
            execution_id, partial(read_faults, execution_id=execution_id)
        )
        return faults


class SaveSnapshot(Task):
    """Keep a snapshot that has passed its checksum; answered with None."""

    __slots__ = ("snapshot",)

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(snapshot.execution_id)
        self.snapshot = snapshot

    def perform(self, ledger: Ledger) -> None:
        snapshot = self.snapshot
        head = ledger.existing(snapshot.execution_id)
        if snapshot.sequence > head.last_sequence:
            raise BeyondLogError(snapshot.execution_id, snapshot.sequence, head.last_sequence)
        ledger.connection.execute(
            _UPSERT,
            (
                (head.number << 32) + snapshot.sequence,
                snapshot.schema_version,
                snapshot.checksum,
                snapshot.body,
            ),
        )


class DeleteSnapshots(Task):
    """Remove the snapshots below a sequence; answered with how many were removed."""

    __slots__ = ("below",)

    def __init__(self, execution_id: str, below: int) -> None:
        super().__init__(execution_id)
        self.below = below

    def perform(self, ledger: Ledger) -> int:
        (execution_id,) = self.execution_ids
        head = ledger.head(execution_id)
        low, high = head.number << 32, (head.number << 32) + self.below - 1
        span = "FROM snapshots WHERE id BETWEEN ? AND ?"
        if not ledger.connection.execute(f"SELECT EXISTS (SELECT 1 {span})", (low, high)).get:
            return 0
        cut = cut_of(ledger.connection, head.number)
        needed = max(cut - 1, self.below)
        if cut > 1 and not is_covered(ledger.connection, head.number, execution_id, needed):
            raise SnapshotNeededError(execution_id, cut - 1)
        ledger.connection.execute(f"DELETE {span}", (low, high))
        return ledger.connection.changes()


def cut_of(connection: apsw.Connection, number: int) -> int:
    """The first sequence beyond 0 that was not truncated; 1 where nothing was."""
    return int(connection.execute("SELECT cut FROM executions WHERE number = ?", (number,)).get)


def is_covered(connection: apsw.Connection, number: int, execution_id: str, sequence: int) -> bool:
    """Whether a sound snapshot holds what the log does up to `sequence`."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM snapshots s WHERE s.id BETWEEN ? AND ? ORDER BY s.id DESC",
        ((number << 32) + min(sequence, _LAST + 1), (number << 32) + _LAST),
    )
    return any(is_sound(_snapshot(execution_id, row)) for row in rows)


def read_latest(connection: apsw.Connection, execution_id: str, at_most: int) -> Snapshot | None:
    stored = store_text(execution_id)
    if at_most < 0:
        return None
    row = connection.execute(_LATEST, (min(at_most, _LAST), stored)).fetchone()
    return None if row is None else _snapshot(execution_id, row)


def read_list(connection: apsw.Connection, execution_id: str) -> Summaries:
    rows = connection.execute(_LIST, (_LAST, store_text(execution_id)))
    return [
        SnapshotSummary(execution_id, snapshot_id & _LAST, str(version), size)
        for snapshot_id, version, size in rows
    ]


def read_faults(connection: apsw.Connection, execution_id: str | None) -> Faults:
    """What is wrong with snapshots. Bodies are read one at a time: a store may hold more than fits memory."""
    chosen, texts = ("", ()) if execution_id is None else ("WHERE x.id = ? ", (store_text(execution_id),))
    ids: list[Any] = connection.execute(f"{_IDS}{chosen}ORDER BY s.id", texts).fetchall()
    faults: Faults = []
    for stored_id, snapshot_id in ids:
        row = connection.execute(_ONE, (snapshot_id,)).fetchone()
        if row is not None:  # None: deleted since
            try:
                _snapshot(load_text(stored_id), row).verify()
            except BadSnapshotError as error:
                faults.append(error)
    return faults


def _snapshot(execution_id: str, row: tuple[Any, ...]) -> Snapshot:
    """The snapshot of a row of `_COLUMNS`, whatever damage has made of its values."""
    snapshot_id, version, checksum, body = row
    if not isinstance(body, bytes):
        body = str(body).encode("utf-8", "surrogatepass")
    return Snapshot(execution_id, snapshot_id & _LAST, str(version), body, str(checksum))
