"""The leases of a memory store.

What lives here: `MemoryLeaseStore`. What must not: logs. Invariant: everything happens under the lock that it
shares with the event store; a lease that has run out is gone for everybody.
"""

from __future__ import annotations

from collections.abc import Sequence

from loomfast.stores._memory_shared import Shared
from loomfast.stores._spi_leases import Lease, LeaseStore, check_keys, check_lease, check_ttl, named


class MemoryLeaseStore(LeaseStore):
    """Keeps leases until the process ends. Every call completes without waiting."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._kept: dict[str, Lease] = {}
        self._token = 0

    async def acquire(self, key: str, owner: str, ttl_s: float) -> Lease | None:
        check_lease(key, owner, ttl_s)
        with self._shared.lock:
            self._shared.check_open(key)
            held = self._held(key)
            if held is not None and held.owner != owner:
                return None
            self._token += 1
            lease = self._kept[key] = Lease(key, owner, self._token, self._until(ttl_s))
            return lease

    async def renew(self, leases: Sequence[Lease], ttl_s: float) -> list[Lease]:
        check_ttl(ttl_s)
        renewed: list[Lease] = []
        with self._shared.lock:
            self._shared.check_open()
            for key, token in named(leases):
                if self.holds(key, token):
                    self._kept[key] = self._kept[key]._replace(expires_ms=self._until(ttl_s))
                    renewed.append(self._kept[key])
        return renewed

    async def release(self, leases: Sequence[Lease]) -> None:
        with self._shared.lock:
            self._shared.check_open()
            for key, token in named(leases):
                if self.holds(key, token):
                    del self._kept[key]

    async def held(self, keys: Sequence[str]) -> list[Lease]:
        check_keys(keys)
        with self._shared.lock:
            self._shared.check_open(*keys[:1])
            return [lease for lease in map(self._held, keys) if lease is not None]

    def holds(self, key: str, token: int) -> bool:
        """Whether a lease is held; with the lock held."""
        held = self._held(key)
        return held is not None and held.token == token

    def _until(self, ttl_s: float) -> int:
        return self._shared.now_ms() + int(ttl_s * 1000)

    def _held(self, key: str) -> Lease | None:
        lease = self._kept.get(key)
        if lease is not None and lease.expires_ms <= self._shared.now_ms():
            del self._kept[key]
            return None
        return lease
