"""The accounts of crashes of a PostgreSQL store.

What lives here: `PostgresRecoveryStore`. What must not: logs. Rows name executions by their numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loomfast._errors import UnknownExecutionError
from loomfast.stores._postgres_rows import key_of, load_text, store_text
from loomfast.stores._spi_arguments import limit_of
from loomfast.stores._spi_recoveries import Accounts, Recovery, RecoveryStore, check_recovery

if TYPE_CHECKING:
    from loomfast.stores._postgres import PostgresEventStore

_NUMBER: Final = "SELECT number FROM executions WHERE key = $1 AND number IS NOT NULL"
_COLUMNS: Final = "coalesce(x.long_id, x.key), r.crashes, r.progress, r.orderly, r.set_aside"
_FROM: Final = "FROM recoveries r JOIN executions x ON x.number = r.execution"
_GET: Final = f"SELECT {_COLUMNS} {_FROM} WHERE x.key = $1"
_PUT: Final = (
    "INSERT INTO recoveries (execution, crashes, progress, orderly, set_aside)"
    " SELECT x.number, $2, $3, $4, $5 FROM executions x WHERE x.key = $1 AND x.number IS NOT NULL"
    " ON CONFLICT (execution) DO UPDATE SET crashes = excluded.crashes, progress = excluded.progress,"
    " orderly = excluded.orderly, set_aside = excluded.set_aside RETURNING true"
)
_DELETE: Final = (
    "DELETE FROM recoveries r USING executions x WHERE x.key = $1 AND r.execution = x.number RETURNING true"
)
_LIST: Final = (
    f"SELECT {_COLUMNS} {_FROM} WHERE r.set_aside IS NOT NULL AND r.execution > $1"
    " ORDER BY r.execution LIMIT $2"
)


class PostgresRecoveryStore(RecoveryStore):
    """Accounts in the schema of a `PostgresEventStore`."""

    def __init__(self, store: PostgresEventStore) -> None:
        """Not for callers: use `store.recoveries`."""
        self._store = store

    async def get(self, execution_id: str) -> Recovery | None:
        row: Any = await self._store._read(
            execution_id, lambda connection: connection.fetchrow(_GET, key_of(execution_id))
        )
        return None if row is None else _recovery(row)

    async def put(self, recovery: Recovery) -> None:
        check_recovery(recovery)
        set_aside = None if recovery.set_aside is None else store_text(recovery.set_aside)
        arguments = (
            key_of(recovery.execution_id),
            recovery.crashes,
            recovery.progress,
            recovery.orderly,
            set_aside,
        )
        kept: Any = await self._store._write(
            recovery.execution_id, lambda connection: connection.fetchval(_PUT, *arguments), repeat=True
        )
        if not kept:
            raise UnknownExecutionError(recovery.execution_id)

    async def delete(self, execution_id: str) -> bool:
        gone: Any = await self._store._write(
            execution_id, lambda connection: connection.fetchval(_DELETE, key_of(execution_id))
        )
        return bool(gone)

    async def list(self, *, after: str | None = None, limit: int = 100) -> Accounts:
        limit = limit_of(limit)
        behind = 0
        if after is not None:
            number: Any = await self._store._read(
                after, lambda connection: connection.fetchval(_NUMBER, key_of(after))
            )
            if number is None:
                raise UnknownExecutionError(after)
            behind = number
        rows: Any = await self._store._read(None, lambda connection: connection.fetch(_LIST, behind, limit))
        return [_recovery(row) for row in rows]


def _recovery(row: Any) -> Recovery:
    execution_id, crashes, progress, orderly, set_aside = row
    return Recovery(
        load_text(execution_id),
        crashes,
        progress,
        orderly,
        None if set_aside is None else load_text(set_aside),
    )
