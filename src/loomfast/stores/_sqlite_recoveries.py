"""The accounts of crashes of a SQLite store.

What lives here: `SqliteRecoveryStore`, the tasks that write accounts, and the queries that read them. What
must not: events. Rows name executions by their numbers, which order the listing and never change once an
execution has events.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import apsw

from loomfast._errors import UnknownExecutionError
from loomfast._kernels import NO_EVENT
from loomfast.stores._spi_arguments import limit_of
from loomfast.stores._spi_recoveries import Accounts, Recovery, RecoveryStore, check_recovery
from loomfast.stores._sqlite_rows import load_text, store_text
from loomfast.stores._sqlite_writer import Ledger, Task

if TYPE_CHECKING:
    from loomfast.stores._sqlite import SqliteEventStore

_ACCOUNT: Final = (
    "SELECT x.id, r.crashes, r.progress, r.orderly, r.set_aside"
    " FROM recoveries r JOIN executions x ON x.number = r.execution WHERE "
)
_ONE: Final = _ACCOUNT + "x.id = ?"
_SET_ASIDE: Final = _ACCOUNT + "r.set_aside IS NOT NULL AND r.execution > ? ORDER BY r.execution LIMIT ?"
_NUMBER: Final = "SELECT number FROM executions WHERE id = ? AND last_sequence > ?"
_REPLACE: Final = (
    "INSERT OR REPLACE INTO recoveries (execution, crashes, progress, orderly, set_aside)"
    " VALUES (?, ?, ?, ?, ?)"
)


class SqliteRecoveryStore(RecoveryStore):
    """Accounts in the database of a `SqliteEventStore`, written by its writer thread."""

    def __init__(self, store: SqliteEventStore) -> None:
        """Not for callers: use `store.recoveries`."""
        self._store = store

    async def get(self, execution_id: str) -> Recovery | None:
        query = partial(read_account, execution_id=execution_id)
        account: Recovery | None = await self._store._read(execution_id, query)
        return account

    async def put(self, recovery: Recovery) -> None:
        check_recovery(recovery)
        await self._store._write(recovery.execution_id, PutAccount(recovery))

    async def delete(self, execution_id: str) -> bool:
        there: bool = await self._store._write(execution_id, DeleteAccount(execution_id))
        return there

    async def list(self, *, after: str | None = None, limit: int = 100) -> Accounts:
        limit = limit_of(limit)
        page: Accounts = await self._store._read(None, partial(read_set_aside, after=after, limit=limit))
        return page


class PutAccount(Task):
    """Keep an account, in place of an older one; answered with None."""

    __slots__ = ("recovery",)

    def __init__(self, recovery: Recovery) -> None:
        super().__init__(recovery.execution_id)
        self.recovery = recovery

    def perform(self, ledger: Ledger) -> None:
        execution_id, crashes, progress, orderly, set_aside = self.recovery
        number = ledger.existing(execution_id).number
        reason = None if set_aside is None else store_text(set_aside)
        ledger.connection.execute(_REPLACE, (number, crashes, progress, orderly, reason))


class DeleteAccount(Task):
    """Forget an account; answered with whether there was one."""

    __slots__ = ()

    def perform(self, ledger: Ledger) -> bool:
        (execution_id,) = self.execution_ids
        number = ledger.head(execution_id).number
        ledger.connection.execute("DELETE FROM recoveries WHERE execution = ?", (number,))
        return ledger.connection.changes() > 0


def read_account(connection: apsw.Connection, execution_id: str) -> Recovery | None:
    row = connection.execute(_ONE, (store_text(execution_id),)).fetchone()
    return None if row is None else _account(row)


def read_set_aside(connection: apsw.Connection, after: str | None, limit: int) -> Accounts:
    behind = 0
    if after is not None:
        found = connection.execute(_NUMBER, (store_text(after), NO_EVENT)).fetchone()
        if found is None:
            raise UnknownExecutionError(after)
        (behind,) = found
    return [_account(row) for row in connection.execute(_SET_ASIDE, (behind, limit))]


def _account(row: Any) -> Recovery:
    execution_id, crashes, progress, orderly, set_aside = row
    reason = None if set_aside is None else load_text(set_aside)
    return Recovery(load_text(execution_id), crashes, progress, bool(orderly), reason)
