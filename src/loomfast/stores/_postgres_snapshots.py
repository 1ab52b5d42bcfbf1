"""The snapshots of a PostgreSQL store.

What lives here: `PostgresSnapshotStore`. What must not: events. A snapshot is stored with its own checksum;
whoever loads it checks it. What depends on a log's cut holds the lock on its execution's row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loomfast._core.snapshots import Snapshot, is_sound
from loomfast._errors import BadSnapshotError, BeyondLogError, SnapshotNeededError, UnknownExecutionError
from loomfast.stores._postgres_connections import AnyConnection
from loomfast.stores._postgres_rows import key_of, load_text, store_text
from loomfast.stores._spi_arguments import LAST, bounded
from loomfast.stores._spi_snapshots import Faults, SnapshotStore, SnapshotSummary, Summaries

if TYPE_CHECKING:
    from loomfast.stores._postgres import PostgresEventStore

_COLUMNS: Final = "s.sequence, s.schema_version, s.checksum, s.body"
_OF_ONE: Final = "FROM executions x JOIN snapshots s ON s.execution = x.number WHERE x.key = $1 "
_SAVE: Final = (
    "INSERT INTO snapshots (execution, sequence, schema_version, checksum, body)"
    " SELECT x.number, $2, $3, $4, $5 FROM executions x WHERE x.key = $1 AND x.last_sequence >= $2"
    " ON CONFLICT (execution, sequence) DO UPDATE SET schema_version = excluded.schema_version,"
    " checksum = excluded.checksum, body = excluded.body RETURNING true"
)
_LATEST: Final = f"SELECT {_COLUMNS} {_OF_ONE} AND s.sequence <= $2 ORDER BY s.sequence DESC LIMIT 1"
_LIST: Final = f"SELECT s.sequence, s.schema_version, length(s.body) {_OF_ONE} ORDER BY s.sequence"
_ONE: Final = f"SELECT {_COLUMNS} FROM snapshots s WHERE s.execution = $1 AND s.sequence = $2"
_NEXT_OF_ALL: Final = (
    "SELECT coalesce(x.long_id, x.key), s.execution, s.sequence FROM snapshots s"
    " JOIN executions x ON x.number = s.execution"
    " WHERE (s.execution, s.sequence) > ($1, $2) ORDER BY s.execution, s.sequence LIMIT 1000"
)
_NUMBER: Final = "SELECT number FROM executions WHERE key = $1"
_COVERING: Final = (
    "SELECT sequence FROM snapshots WHERE execution = $1 AND sequence >= $2 ORDER BY sequence DESC"
)


class PostgresSnapshotStore(SnapshotStore):
    """Snapshots in the schema of a `PostgresEventStore`."""

    def __init__(self, store: PostgresEventStore) -> None:
        """Not for callers: use `store.snapshots`."""
        self._store = store

    async def save(self, snapshot: Snapshot) -> None:
        snapshot.verify()
        execution_id, sequence = snapshot.execution_id, snapshot.sequence

        async def save(connection: AnyConnection) -> None:
            saved = await connection.fetchval(
                _SAVE,
                key_of(execution_id),
                bounded("sequence", sequence),
                store_text(snapshot.schema_version),
                store_text(snapshot.checksum),
                snapshot.body,
            )
            if not saved:
                last = await connection.fetchval(
                    "SELECT last_sequence FROM executions WHERE key = $1 AND number IS NOT NULL",
                    key_of(execution_id),
                )
                if last is None:
                    raise UnknownExecutionError(execution_id)
                raise BeyondLogError(execution_id, sequence, last)

        await self._store._change(execution_id, save, repeat=True)

    async def latest(self, execution_id: str, at_most: int | None = None) -> Snapshot | None:
        bound = LAST if at_most is None else bounded("at_most", at_most)
        row: Any = await self._store._read(
            execution_id, lambda connection: connection.fetchrow(_LATEST, key_of(execution_id), bound)
        )
        return None if row is None else _snapshot(execution_id, row)

    async def list(self, execution_id: str) -> Summaries:
        rows: Any = await self._store._read(
            execution_id, lambda connection: connection.fetch(_LIST, key_of(execution_id))
        )
        return [
            SnapshotSummary(execution_id, sequence, load_text(version), size)
            for sequence, version, size in rows
        ]

    async def delete(self, execution_id: str, below: int) -> int:
        below = bounded("below", below)

        async def delete(connection: AnyConnection) -> int:
            found = await lock_head(connection, execution_id)
            if found is None:
                return 0
            number, _, cut = found
            rows = await connection.fetch(
                "DELETE FROM snapshots WHERE execution = $1 AND sequence < $2 RETURNING true",
                number,
                below,
            )
            if rows and cut > 1 and not await is_covered(connection, number, execution_id, cut - 1):
                raise SnapshotNeededError(execution_id, cut - 1)
            return len(rows)

        removed: int = await self._store._change(execution_id, delete)
        return removed

    async def verify(self, execution_id: str | None = None) -> Faults:
        """As the contract says. Bodies are read one at a time: a store may hold more than fits memory."""
        faults: Faults = []
        if execution_id is None:
            at = (0, -1)
            while page := await self._read(None, _NEXT_OF_ALL, *at):
                for stored_id, number, sequence in page:
                    await self._verify_one(load_text(stored_id), number, sequence, faults)
                at = (page[-1][1], page[-1][2])
            return faults
        for summary in await self.list(execution_id):
            [(number,)] = await self._read(execution_id, _NUMBER, key_of(execution_id))
            await self._verify_one(execution_id, number, summary.sequence, faults)
        return faults

    async def _verify_one(self, execution_id: str, number: int, sequence: int, faults: Faults) -> None:
        for row in await self._read(execution_id, _ONE, number, sequence):  # none: deleted since
            try:
                _snapshot(execution_id, row).verify()
            except BadSnapshotError as error:
                faults.append(error)

    async def _read(self, execution_id: str | None, sql: str, *arguments: object) -> Any:
        return await self._store._read(execution_id, lambda connection: connection.fetch(sql, *arguments))


async def lock_head(connection: AnyConnection, execution_id: str) -> tuple[int, int, int] | None:
    """The number, last sequence and cut of an execution that has events, locked till the transaction ends."""
    row = await connection.fetchrow(
        "SELECT number, last_sequence, cut FROM executions WHERE key = $1 AND number IS NOT NULL FOR UPDATE",
        key_of(execution_id),
    )
    return None if row is None else (row[0], row[1], row[2])


async def is_covered(connection: AnyConnection, number: int, execution_id: str, sequence: int) -> bool:
    """Whether a sound snapshot holds what the log does up to `sequence`."""
    for (kept,) in await connection.fetch(_COVERING, number, sequence):
        row = await connection.fetchrow(_ONE, number, kept)
        if row is not None and is_sound(_snapshot(execution_id, row)):
            return True
    return False


def _snapshot(execution_id: str, row: Any) -> Snapshot:
    """The snapshot of a row of `_COLUMNS`, whatever damage has made of its values."""
    sequence, version, checksum, body = row
    return Snapshot(
        execution_id, sequence, version.decode(errors="replace"), body, checksum.decode(errors="replace")
    )
