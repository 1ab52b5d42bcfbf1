"""The leases of a SQLite store.

What lives here: `SqliteLeaseStore`, the tasks that write leases, and the queries that read them. What must
not: events. A lease that has run out is a row that counts for nothing, until the next one on its key replaces
it.

The clock is asked inside the transaction, with the write lock held: a caller that waited for the lock would
judge by a time that is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import apsw

from loomfast.stores._spi_leases import (
    Lease,
    LeaseStore,
    check_keys,
    check_lease,
    check_ttl,
    first_key,
    named,
)
from loomfast.stores._sqlite_rows import load_text, store_text
from loomfast.stores._sqlite_writer import Ledger, Task

if TYPE_CHECKING:
    from loomfast.stores._sqlite import SqliteEventStore

_HELD: Final = "SELECT key, owner, token, expires_ms FROM leases WHERE key = ? AND expires_ms > ?"
_INSERT: Final = "INSERT INTO leases (key, owner, expires_ms) VALUES (?, ?, ?)"
_PROLONG: Final = (
    "UPDATE leases SET expires_ms = ? WHERE key = ? AND token = ? AND expires_ms > ?"
    " RETURNING key, owner, token, expires_ms"
)
_RELEASE: Final = "DELETE FROM leases WHERE key = ? AND token = ?"

NowMs = Callable[[], int]


class SqliteLeaseStore(LeaseStore):
    """Leases in the database of a `SqliteEventStore`, written by its writer thread."""

    def __init__(self, store: SqliteEventStore, now_ms: NowMs) -> None:
        """Not for callers: use `store.leases`."""
        self._store = store
        self._now_ms = now_ms

    async def acquire(self, key: str, owner: str, ttl_s: float) -> Lease | None:
        check_lease(key, owner, ttl_s)
        task = AcquireLease(key, owner, int(ttl_s * 1000), self._now_ms)
        lease: Lease | None = await self._store._write(key, task)
        return lease

    async def renew(self, leases: Sequence[Lease], ttl_s: float) -> list[Lease]:
        check_ttl(ttl_s)
        task = RenewLeases(named(leases), int(ttl_s * 1000), self._now_ms)
        renewed: list[Lease] = await self._store._write(first_key([lease.key for lease in leases[:1]]), task)
        return renewed

    async def release(self, leases: Sequence[Lease]) -> None:
        await self._store._write(first_key([lease.key for lease in leases[:1]]), ReleaseLeases(named(leases)))

    async def held(self, keys: Sequence[str]) -> list[Lease]:
        check_keys(keys)
        query = partial(read_leases, keys=tuple(keys), now_ms=self._now_ms)
        leases: list[Lease] = await self._store._read(first_key(keys), query)
        return leases


class AcquireLease(Task):
    """Take a lease; answered with it, or with None while another owner holds it."""

    __slots__ = ("now_ms", "owner", "ttl_ms")

    def __init__(self, key: str, owner: str, ttl_ms: int, now_ms: NowMs) -> None:
        super().__init__(key)
        self.owner = owner
        self.ttl_ms = ttl_ms
        self.now_ms = now_ms

    def perform(self, ledger: Ledger) -> Lease | None:
        (key,) = self.execution_ids
        now_ms = self.now_ms()
        stored = store_text(key)
        held = ledger.connection.execute(_HELD, (stored, now_ms)).fetchone()
        if held is not None and load_text(held[1]) != self.owner:
            return None
        expires_ms = now_ms + self.ttl_ms
        ledger.connection.execute("DELETE FROM leases WHERE key = ?", (stored,))
        ledger.connection.execute(_INSERT, (stored, store_text(self.owner), expires_ms))
        return Lease(key, self.owner, ledger.connection.last_insert_rowid(), expires_ms)


class RenewLeases(Task):
    """Prolong the leases that are still held; answered with these."""

    __slots__ = ("leases", "now_ms", "ttl_ms")

    def __init__(self, leases: Sequence[tuple[str, int]], ttl_ms: int, now_ms: NowMs) -> None:
        super().__init__(*(key for key, _ in leases[:1]))
        self.leases = leases
        self.ttl_ms = ttl_ms
        self.now_ms = now_ms

    def perform(self, ledger: Ledger) -> list[Lease]:
        now_ms = self.now_ms()
        rows = (
            ledger.connection.execute(
                _PROLONG, (now_ms + self.ttl_ms, store_text(key), token, now_ms)
            ).fetchone()
            for key, token in self.leases
        )
        return [_lease(row) for row in rows if row is not None]


class ReleaseLeases(Task):
    """Remove the leases that are still held; answered with None."""

    __slots__ = ("leases",)

    def __init__(self, leases: Sequence[tuple[str, int]]) -> None:
        super().__init__(*(key for key, _ in leases[:1]))
        self.leases = leases

    def perform(self, ledger: Ledger) -> None:
        for key, token in self.leases:
            ledger.connection.execute(_RELEASE, (store_text(key), token))


def is_held(connection: apsw.Connection, key: str, token: int, now_ms: NowMs) -> bool:
    """Whether a lease is held; within the transaction of what may be done only under it."""
    held = connection.execute(_HELD, (store_text(key), now_ms())).fetchone()
    return held is not None and held[2] == token


def read_leases(connection: apsw.Connection, keys: Sequence[str], now_ms: NowMs) -> list[Lease]:
    at_ms = now_ms()
    rows: Any = connection.executemany(_HELD, ((store_text(key), at_ms) for key in keys))
    return [_lease(row) for row in rows]


def _lease(row: Any) -> Lease:
    key, owner, token, expires_ms = row
    return Lease(load_text(key), load_text(owner), token, expires_ms)
