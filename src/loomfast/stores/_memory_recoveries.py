"""The accounts of crashes of a memory store.

What lives here: `MemoryRecoveryStore`. What must not: logs. Invariant: everything happens under the lock that
it shares with the event store.
"""

from __future__ import annotations

from loomfast._errors import UnknownExecutionError
from loomfast._kernels import NO_EVENT
from loomfast.stores._memory_shared import Shared
from loomfast.stores._spi_arguments import limit_of
from loomfast.stores._spi_recoveries import Accounts, Recovery, RecoveryStore, check_recovery


class MemoryRecoveryStore(RecoveryStore):
    """Keeps accounts until the process ends. Every call completes without waiting."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._kept: dict[str, Recovery] = {}

    async def get(self, execution_id: str) -> Recovery | None:
        with self._shared.lock:
            self._shared.check_open(execution_id)
            return self._kept.get(execution_id)

    async def put(self, recovery: Recovery) -> None:
        check_recovery(recovery)
        with self._shared.lock:
            self._shared.check_open(recovery.execution_id)
            self._number(recovery.execution_id)
            self._kept[recovery.execution_id] = recovery

    async def delete(self, execution_id: str) -> bool:
        with self._shared.lock:
            self._shared.check_open(execution_id)
            return self._kept.pop(execution_id, None) is not None

    async def list(self, *, after: str | None = None, limit: int = 100) -> Accounts:
        limit = limit_of(limit)
        with self._shared.lock:
            self._shared.check_open(*(() if after is None else (after,)))
            behind = 0 if after is None else self._number(after)
            found = [
                (number, account)
                for account in self._kept.values()
                if account.set_aside is not None and (number := self._number(account.execution_id)) > behind
            ]
        return [account for _, account in sorted(found)[:limit]]

    def _number(self, execution_id: str) -> int:
        head = self._shared.head(execution_id)
        if head.last_sequence == NO_EVENT:
            raise UnknownExecutionError(execution_id)
        return head.number
