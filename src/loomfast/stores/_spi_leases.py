"""The contract of the leases that every event store keeps: who of several processes may act now, on what.

What lives here: `LeaseStore` and `Lease`. What must not: what leases are for, or when to renew one (the
runtime).

A lease says who may *begin*; it stops nobody who began before it ran out. A writer that has been superseded
is stopped by its fence (`_spi.py`, guarantee 4), so whoever takes over a lease on an execution fences next,
under that lease: a request for a fence that is held up until another has taken the lease over is refused.

    acquire("order-7", "node-a", 30)   → token 12, held until the store's clock has gone on by 30 s
    acquire("order-7", "node-b", 30)   → None
    renew([that lease], 30)            → held for 30 s from now
    … node-a dies; 30 s pass …
    acquire("order-7", "node-b", 30)   → token 13
    renew([node-a's lease], 30)        → []: it is no longer node-a's

The guarantees go on from those of `_spi_branches.py`:

19. At any time at most one owner holds the lease of a key. A token is newer than every earlier one of its
    store, so no two acquisitions have the same, whatever was released or has run out in between.
20. Time is the store's: one clock judges every holder, and a holder's own clock is never asked. `held` and
    `get` answer by it, at the moment that they look.
21. What `acquire`, `renew` and `release` returned is durable as an append is.

And, behind those of all files:

26. A fence that is asked for under a lease is given only if the lease is held as `renew` would find it: by
    its key and token, and by the store's clock; otherwise nothing changes. The look and the fence are one
    transaction, so that no append and no other fence comes between. So a request that is late, however late,
    never fences out whoever has taken the lease over and written since.

A lease that has run out counts as lost also if nobody has taken it. Whoever held it may have been gone for
any time, and a store may forget what has run out: the answer must not depend on whether it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

from loomfast._errors import BadInputError
from loomfast.stores._spi_arguments import bounded, check_texts

# A hundred years: what is longer is a mistake, and would leave the calendar.
_LONGEST_S: Final = 100 * 365 * 86_400


class Lease(NamedTuple):
    """One acquisition. `expires_ms` is by the store's clock."""

    key: str
    owner: str
    token: int
    expires_ms: int


class LeaseStore(ABC):
    """Leases by key. A key is any text; the runtime uses execution ids."""

    @abstractmethod
    async def acquire(self, key: str, owner: str, ttl_s: float) -> Lease | None:
        """Take a lease for `ttl_s` seconds; None while another owner holds it.

        An owner that holds it already gets a new token, and its older one is void. Raises `BadInputError` for
        an empty key or owner and for a time that is not above 0, and as `EventStore.append` for failing
        storage.
        """

    @abstractmethod
    async def renew(self, leases: Sequence[Lease], ttl_s: float) -> list[Lease]:
        """Prolong leases to `ttl_s` seconds from now, in one transaction; return those that were still held.

        A lease that has run out is not renewed, even if nobody has taken it. Raises as `acquire`.
        """

    @abstractmethod
    async def release(self, leases: Sequence[Lease]) -> None:
        """Give leases back, in one transaction. One that is no longer held is left as it is."""

    @abstractmethod
    async def held(self, keys: Sequence[str]) -> list[Lease]:
        """Return the leases that are held on some of these keys, in the order of `keys`.

        One round trip to the storage, however many they are.
        """

    async def get(self, key: str) -> Lease | None:
        """Return the lease that is held on a key, or None."""
        held = await self.held((key,))
        return held[0] if held else None


def first_key(keys: Sequence[str]) -> str | None:
    """The key that an error of a call for several names."""
    return keys[0] if keys else None


def check_keys(keys: Sequence[str]) -> None:
    """Refuse keys that no lease has. Raises `BadInputError`."""
    if isinstance(keys, str):
        raise BadInputError(f"keys={keys!r}: give a sequence of keys, not one")
    check_texts(*keys)


def key_and_token(lease: Lease | None) -> tuple[str, int] | None:
    """The key and token of the lease that a fence is asked for under, if any. Raises as `named`."""
    return None if lease is None else named((lease,))[0]


def named(leases: Sequence[Lease]) -> list[tuple[str, int]]:
    """The keys and tokens of leases. Raises `BadInputError` for those that no store has given."""
    for lease in leases:
        check_texts(lease.key, lease.owner)
    return [(lease.key, bounded("token", lease.token)) for lease in leases]


def check_lease(key: str, owner: str, ttl_s: float) -> None:
    """Refuse a lease that no store takes. Raises `BadInputError`."""
    check_texts(key, owner)
    if not key or not owner:
        raise BadInputError(f"lease on {key!r} for {owner!r}: name both")
    check_ttl(ttl_s)


def check_ttl(ttl_s: float) -> None:
    """Refuse a time that no lease lasts. Raises `BadInputError`."""
    if not isinstance(ttl_s, int | float) or not 0 < ttl_s < _LONGEST_S:
        raise BadInputError(f"ttl_s={ttl_s!r}: must be a number of seconds above 0, and below {_LONGEST_S}")
