"""The leases of a PostgreSQL store.

What lives here: `PostgresLeaseStore`. What must not: logs. The clock is the server's at the moment a
statement looks at it, and tokens come from a sequence, so all processes are judged by one clock and one
count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from loomfast.stores._postgres_rows import key_of, load_text, store_text
from loomfast.stores._spi_leases import (
    Lease,
    LeaseStore,
    check_keys,
    check_lease,
    check_ttl,
    first_key,
    named,
)

if TYPE_CHECKING:
    from loomfast.stores._postgres import PostgresEventStore

_ACQUIRE: Final = "SELECT token, expires_ms FROM acquire_lease($1, $2, $3)"
_RENEW: Final = (
    "UPDATE leases l SET expires_ms = now_ms() + $3 FROM unnest($1::bytea[], $2::bigint[]) AS w (key, token)"
    " WHERE l.key = w.key AND l.token = w.token AND l.expires_ms > now_ms()"
    " RETURNING l.token, l.expires_ms, l.owner"
)
_RELEASE: Final = (
    "DELETE FROM leases l USING unnest($1::bytea[], $2::bigint[]) AS w (key, token)"
    " WHERE l.key = w.key AND l.token = w.token"
)
_HELD: Final = (
    "SELECT key, owner, token, expires_ms FROM leases WHERE key = ANY($1::bytea[]) AND expires_ms > now_ms()"
)


class PostgresLeaseStore(LeaseStore):
    """Leases in the schema of a `PostgresEventStore`."""

    def __init__(self, store: PostgresEventStore) -> None:
        """Not for callers: use `store.leases`."""
        self._store = store

    async def acquire(self, key: str, owner: str, ttl_s: float) -> Lease | None:
        check_lease(key, owner, ttl_s)
        arguments = key_of(key), store_text(owner), _ms(ttl_s)
        row: Any = await self._store._write(
            key, lambda connection: connection.fetchrow(_ACQUIRE, *arguments), repeat=True
        )
        return None if row is None else Lease(key, owner, *row)

    async def renew(self, leases: Sequence[Lease], ttl_s: float) -> list[Lease]:
        check_ttl(ttl_s)
        wanted = _in_order(leases)
        rows: Any = await self._store._write(
            None, lambda connection: connection.fetch(_RENEW, *wanted, _ms(ttl_s)), repeat=True
        )
        held = {token: Lease("", load_text(owner), token, expires_ms) for token, expires_ms, owner in rows}
        return [held[lease.token]._replace(key=lease.key) for lease in leases if lease.token in held]

    async def release(self, leases: Sequence[Lease]) -> None:
        wanted = _in_order(leases)
        await self._store._write(None, lambda connection: connection.execute(_RELEASE, *wanted), repeat=True)

    async def held(self, keys: Sequence[str]) -> list[Lease]:
        check_keys(keys)
        stored = [key_of(key) for key in keys]
        rows: Any = await self._store._read(
            first_key(keys), lambda connection: connection.fetch(_HELD, stored)
        )
        found = {at: Lease("", load_text(owner), token, expires_ms) for at, owner, token, expires_ms in rows}
        return [found[at]._replace(key=key) for key, at in zip(keys, stored, strict=True) if at in found]


def _ms(ttl_s: float) -> int:
    return int(ttl_s * 1000)


def _in_order(leases: Sequence[Lease]) -> tuple[list[bytes], list[int]]:
    """Keys and tokens, in one order for all: so two that lock the same rows do not lock each other out."""
    pairs = sorted((key_of(key), token) for key, token in named(leases))
    return [key for key, _ in pairs], [token for _, token in pairs]
