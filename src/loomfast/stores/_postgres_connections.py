"""The connections of a PostgreSQL store: made, lost, and made again.

What lives here: `Connections`, which errors mean what, and the names of stores in messages. What must not:
SQL about logs.

An error of the driver is one of three. *Lost*: there is no server at the other end any more, or not yet; what
was under way may have happened or not. *Busy*: another transaction was in the way for too long; nothing
happened. Anything else is the statement's own fault, or that of what it met (no room, no right to write, a
damaged page), and nothing happened.

A call that meets a lost connection goes on trying for `reconnect_timeout_ms`, as long as trying again cannot
do a thing twice; so a server that restarts is a pause.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import parse_qs, urlsplit

import asyncpg

from loomfast._errors import (
    StorageError,
    StorageWriteError,
    StoreBusyError,
    StoreCorruptError,
    StoreFullError,
    StoreReadError,
    StoreReadOnlyError,
    StoreUnreachableError,
)
from loomfast.stores._postgres_schema import quoted

T = TypeVar("T")

Connection: TypeAlias = "asyncpg.Connection[Any]"
AnyConnection: TypeAlias = "asyncpg.Connection[Any] | asyncpg.pool.PoolConnectionProxy[Any]"

LOST: Final = (
    OSError,  # TimeoutError among them: a server that does not answer
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,  # shut down, crashed, starting up
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InternalClientError,
    asyncpg.InterfaceError,
)
# Among those above, these are about the statement after all.
_STATEMENT: Final = (asyncpg.QueryCanceledError, asyncpg.DataError)
FULL: Final = (asyncpg.DiskFullError,)
READ_ONLY: Final = (asyncpg.ReadOnlySQLTransactionError, asyncpg.InsufficientPrivilegeError)
CORRUPT: Final = (asyncpg.DataCorruptedError, asyncpg.IndexCorruptedError)
BUSY: Final = (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError, asyncpg.SerializationError)

_FIRST_WAIT_S: Final = 0.02
_LONGEST_WAIT_S: Final = 0.5
# How long a transaction of several statements may wait for its client before the server ends it.
_IDLE_IN_TRANSACTION_MS: Final = 30_000


def is_lost(error: BaseException) -> bool:
    """Whether the server was lost, so that what was under way may have happened or not."""
    return isinstance(error, LOST) and not isinstance(error, _STATEMENT)


def name_of(dsn: str, schema: str) -> str:
    """What messages call a store: where it is, without the password."""
    parts = urlsplit(dsn)
    host = parts.netloc.rpartition("@")[2] or ",".join(parse_qs(parts.query).get("host", []))
    return f"{parts.scheme}://{host}{parts.path} schema {schema!a}"


def settings_of(schema: str, synchronous_commit: str, busy_timeout_ms: int) -> dict[str, str]:
    """What every connection sets when it is made.

    All our statements find rows by an index. The planner is kept to that, since it meets tables that nobody
    has analysed yet, and plans are made once.
    """
    return {
        "application_name": "loomfast",
        "search_path": quoted(schema),
        "synchronous_commit": synchronous_commit,
        "lock_timeout": str(busy_timeout_ms),
        "idle_in_transaction_session_timeout": str(_IDLE_IN_TRANSACTION_MS),
        "default_transaction_isolation": "read committed",
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
        "jit": "off",
    }


class _OwnConnection(asyncpg.Connection):
    """A connection that only the process which made it ends.

    A forked child has a copy, and shares the selector of the event loop: ending the copy would take the
    socket out of the parent's selector, and the parent would wait for ever.
    """

    __slots__ = ("_pid",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pid = os.getpid()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            super().__del__()


class Patience:
    """Waiting between attempts, longer each time, until `limit_s` is over.

    That runs from now, or from `since`, a time of the event loop, for who has waited already.
    """

    def __init__(self, limit_s: float, since: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline = (self._loop.time() if since is None else since) + limit_s
        self._wait_s = _FIRST_WAIT_S

    @property
    def over(self) -> bool:
        """Whether `wait` would wait no more."""
        return self._loop.time() >= self._deadline

    async def wait(self) -> bool:
        """Wait for a while; False, at once, when the limit is over."""
        left_s = self._deadline - self._loop.time()
        if left_s <= 0:
            return False
        await asyncio.sleep(min(self._wait_s, left_s))
        self._wait_s = min(self._wait_s * 2, _LONGEST_WAIT_S)
        return True


class Connections:
    """The pool for reads and rare writes, and `connect` for those who need a connection to themselves."""

    def __init__(
        self, dsn: str, settings: dict[str, str], *, pool_size: int, timeout_s: float, reconnect_s: float
    ) -> None:
        self.reconnect_s = reconnect_s
        self._closed = False
        options: dict[str, Any] = {
            "timeout": timeout_s,
            "command_timeout": timeout_s,
            "server_settings": settings,
            "connection_class": _OwnConnection,
        }
        self.connect = functools.partial(asyncpg.connect, dsn, **options)
        self._pool = asyncpg.create_pool(
            dsn, min_size=0, max_size=pool_size, reset=_nothing_to_reset, **options
        )

    async def open(self) -> None:
        """Prepare the pool. It connects when it is first asked."""
        await self._pool

    async def use(self, query: Callable[[AnyConnection], Awaitable[T]], *, repeat: bool = True) -> T:
        """Answer a query on a connection of the pool, trying again when the server is lost.

        With `repeat` off, a query that has begun on a connection is not tried again. Raises what the driver
        raises.
        """
        patience = Patience(self.reconnect_s)
        while True:
            begun = False
            try:
                async with self._pool.acquire() as connection:
                    begun = not connection.is_closed()
                    try:
                        return await query(connection)
                    except TimeoutError:
                        # A pool takes one back only once its server has heard of the timeout.
                        connection.terminate()
                        raise
            except LOST as error:
                if self._closed or not is_lost(error) or (begun and not repeat):
                    raise
                if not await patience.wait():
                    raise

    async def close(self) -> None:
        """Close the pool once its queries are done."""
        self._closed = True
        await self._pool.close()

    def terminate(self) -> None:
        """Drop the pool's connections at once."""
        self._closed = True
        self._pool.terminate()


async def _nothing_to_reset(connection: object) -> None:
    """No statement of ours leaves anything behind in its session."""


def write_error(
    execution_id: str | None, sequence: int | None, cause: Exception, *, doubtful: bool
) -> StorageWriteError:
    """The error of a write, for what the driver has raised. `doubtful`: it may have happened all the same."""
    reason = f"{type(cause).__name__}: {cause}"
    kind = StorageWriteError
    if isinstance(cause, BUSY) and not doubtful:
        kind, reason = StoreBusyError, f"{reason}; nothing was written, it is safe to repeat"
    elif isinstance(cause, FULL):
        kind = StoreFullError
    elif isinstance(cause, READ_ONLY):
        kind = StoreReadOnlyError
    if doubtful:
        reason = f"the server was lost before it answered, so this may have been written: {reason}"
    error = kind(execution_id, sequence, reason)
    error.doubtful = doubtful
    error.__cause__ = read_error(execution_id, cause) if isinstance(cause, CORRUPT) else cause
    return error


def read_error(execution_id: str | None, cause: Exception) -> StoreReadError:
    """The error of a read, for what the driver has raised."""
    about = "the store" if execution_id is None else f"execution {execution_id!r}"
    kind = StoreReadError
    if isinstance(cause, CORRUPT):
        kind = StoreCorruptError
    elif is_lost(cause):
        kind = StoreUnreachableError
    error = kind(execution_id, f"{about} cannot be read: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def opening_error(place: str, cause: Exception) -> StorageError:
    """The error of a store that cannot be opened."""
    kind = StoreUnreachableError if is_lost(cause) else StorageError
    error = kind(None, f"{place}: cannot be opened: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
