"""The contract of the account that every event store keeps of executions that crashed.

What lives here: `RecoveryStore`. What must not: the account itself, when a crash counts and how many are too
many (`_core/recovery.py`).

The guarantees go on from those of `_spi_leases.py`:

22. What `put` and `delete` returned is durable as an append is. An account is replaced whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

from loomfast._core.recovery import Recovery as Recovery
from loomfast._errors import BadInputError
from loomfast.stores._spi_arguments import check_kept, check_texts

Accounts: TypeAlias = list[Recovery]


class RecoveryStore(ABC):
    """Accounts by execution."""

    @abstractmethod
    async def get(self, execution_id: str) -> Recovery | None:
        """Return the account of an execution, or None: nothing has gone wrong with it."""

    @abstractmethod
    async def put(self, recovery: Recovery) -> None:
        """Keep an account, in place of an older one.

        Raises `UnknownExecutionError`, and as `EventStore.append` for failing storage.
        """

    @abstractmethod
    async def delete(self, execution_id: str) -> bool:
        """Forget an account; tell whether there was one."""

    @abstractmethod
    async def list(self, *, after: str | None = None, limit: int = 100) -> Accounts:
        """Return at most `limit` accounts of executions that are set aside, in the order of the listing of
        executions, behind the execution `after`.

        Raises `BadInputError` for a limit below 1, `UnknownExecutionError` for `after`.
        """


def check_recovery(recovery: Recovery) -> None:
    """Refuse an account that no store takes. Raises `BadInputError`."""
    check_texts(recovery.execution_id, "" if recovery.set_aside is None else recovery.set_aside)
    check_kept("crashes", recovery.crashes)
    check_kept("progress", recovery.progress)
    if not isinstance(recovery.orderly, bool):
        raise BadInputError(f"orderly={recovery.orderly!r}: must be True or False")
