"""The PostgreSQL store, as its callers see it.

What lives here: `PostgresEventStore`: checking arguments, passing calls to the writer, the pool and the
listener, from whatever event loop they come; closing; and refusing to work in a forked child. What must not:
SQL.

The driver is asyncpg. Its connections belong to the event loop that opened the store, its *home*; calls from
other loops are handed over to it. What the driver raises never reaches a caller but as a cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, Never, Self, TypeVar, get_args

from loomfast._errors import (
    BadInputError,
    InstallError,
    LoomError,
    StorageWriteError,
    StoreClosedError,
    StoreMissingError,
)

try:
    import asyncpg
except ModuleNotFoundError as missing:
    if missing.name != "asyncpg":
        raise
    raise InstallError(
        "PostgresEventStore needs the driver asyncpg: pip install 'loomfast[postgres]'"
    ) from missing

from loomfast._kernels import Envelope, State
from loomfast.stores import _postgres_reader as reader
from loomfast.stores import _postgres_schema as schemas
from loomfast.stores._admission import refuse_unstorable
from loomfast.stores._forking import Copier, check_branch, check_cut
from loomfast.stores._postgres_branches import PostgresBranchRegistry
from loomfast.stores._postgres_check import check_storage
from loomfast.stores._postgres_compaction import CopyPrefix, truncate_prefix
from loomfast.stores._postgres_connections import (
    AnyConnection,
    Connections,
    is_lost,
    name_of,
    opening_error,
    read_error,
    settings_of,
    write_error,
)
from loomfast.stores._postgres_leases import PostgresLeaseStore
from loomfast.stores._postgres_ledger import AcquireFence
from loomfast.stores._postgres_recoveries import PostgresRecoveryStore
from loomfast.stores._postgres_snapshots import PostgresSnapshotStore
from loomfast.stores._postgres_timers import PostgresTimerStore
from loomfast.stores._postgres_waking import Listener
from loomfast.stores._postgres_writer import LOOP_ENDED, Task, Write, Writer
from loomfast.stores._spi import EventStore, ExecutionSummary, PositionedEvent
from loomfast.stores._spi_arguments import check_some, check_texts, limit_of, position_of, range_of
from loomfast.stores._spi_leases import Lease, key_and_token
from loomfast.stores._threads import Call

T = TypeVar("T")

SynchronousCommit = Literal["on", "remote_apply", "remote_write", "local", "off"]
_LEVELS: Final = get_args(SynchronousCommit)


class PostgresEventStore(EventStore):
    """Event logs in one schema of a PostgreSQL database, which any number of processes may share.

    Made by `open`, ended by `close` or by leaving `async with`. An append is durable when it returns, as far
    as `synchronous_commit` goes. May be used from several threads and event loops, while the loop that opened
    it runs.

    A caller that is cancelled stops waiting at once; its write happens whole or not at all. While the server
    cannot be reached, calls go on trying for `reconnect_timeout_ms`.
    """

    def __init__(self, *_: Never, **__: Never) -> None:
        """Raises `BadInputError`: use `open`, which waits."""
        raise BadInputError("a PostgresEventStore is not constructed: use await PostgresEventStore.open(dsn)")

    def _begin(self, name: str, connections: Connections, writer: Writer) -> None:
        self._name = name
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._connections = connections
        self._writer = writer
        self._listener = Listener(connections)
        self._writes: set[asyncio.Task[None]] = set()
        self._reads = 0
        self._idle: asyncio.Future[None] | None = None
        self._closed = False

    @classmethod
    async def open(
        cls,
        dsn: str,
        *,
        schema: str = "loomfast",
        create: bool = True,
        pool_size: int = 4,
        synchronous_commit: SynchronousCommit = "on",
        busy_timeout_ms: int = 5_000,
        reconnect_timeout_ms: int = 10_000,
        timeout_ms: int = 60_000,
    ) -> Self:
        """Open the store in `schema` of the database at `dsn`; make it if it is not there and `create`.

        `dsn` is a `postgresql://` URL. An older version's schema is brought up to date; any number of
        processes may do so at once. `pool_size` connections serve reads and rare writes; one more appends,
        and one listens once somebody waits for an execution driven elsewhere. `busy_timeout_ms`: how long a
        write waits for another's lock. `timeout_ms`: how long a statement may go unanswered before the server
        counts as lost.

        Raises `BadInputError` for the arguments, `StoreMissingError` where there is no such database, or no
        schema and `create` is off, `NotAStoreError` for a schema that is not loomfast's (it is not changed),
        `StoreTooNewError` for a newer version's, `StorageError` (with its cause) when the server cannot be
        reached.
        """
        schemas.check_name(schema)
        if synchronous_commit not in _LEVELS:
            raise BadInputError(
                f"synchronous_commit={synchronous_commit!r}: choose one of {', '.join(_LEVELS)}"
            )
        for option, value, least in (
            ("pool_size", pool_size, 1),
            ("busy_timeout_ms", busy_timeout_ms, 1),
            ("reconnect_timeout_ms", reconnect_timeout_ms, 0),
            ("timeout_ms", timeout_ms, 1),
        ):
            if value < least:
                raise BadInputError(f"{option}={value}: must be {least} or more")
        name = name_of(dsn, schema)
        connections = Connections(
            dsn,
            settings_of(schema, synchronous_commit, busy_timeout_ms),
            pool_size=pool_size,
            timeout_s=timeout_ms / 1000,
            reconnect_s=reconnect_timeout_ms / 1000,
        )
        try:
            connection = await connections.connect()
            try:
                await schemas.prepare(connection, name, schema, create=create)
                await connections.open()
            except BaseException:
                connection.terminate()
                raise
        except asyncpg.InvalidCatalogNameError as cause:
            raise StoreMissingError(name) from cause
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, ValueError) as cause:
            if isinstance(cause, LoomError):
                raise
            raise opening_error(name, cause) from cause
        store = cls.__new__(cls)
        store._begin(name, connections, Writer(connections, connection))
        return store

    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        envelopes = tuple(envelopes)
        self._check_usable(envelopes[0].execution_id if envelopes else None)
        if not envelopes:
            return
        refuse_unstorable(envelopes)
        await self._submit(self._writer.append(envelopes))

    def write(self, envelopes: Sequence[Envelope]) -> asyncio.Future[Exception | None]:
        check_some(envelopes)
        self._check_usable(envelopes[0].execution_id)
        refuse_unstorable(envelopes)
        call = self._writer.append(envelopes)
        self._at_home(partial(self._writer.submit, call))
        return call.future

    @property
    def snapshots(self) -> PostgresSnapshotStore:
        return PostgresSnapshotStore(self)

    @property
    def branches(self) -> PostgresBranchRegistry:
        return PostgresBranchRegistry(self)

    @property
    def leases(self) -> PostgresLeaseStore:
        return PostgresLeaseStore(self)

    @property
    def recoveries(self) -> PostgresRecoveryStore:
        return PostgresRecoveryStore(self)

    @property
    def timers(self) -> PostgresTimerStore:
        return PostgresTimerStore(self)

    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[Envelope]:
        first, last = range_of(first, last)
        return await self._look(
            execution_id, partial(reader.read_range, execution_id=execution_id, first=first, last=last)
        )

    async def fold(self, execution_id: str, state: State | None = None) -> State | None:
        """Fold page by page, so that a log of any length takes little memory, and on a thread."""
        return await self._look(execution_id, partial(reader.fold, execution_id=execution_id, state=state))

    async def last_sequence(self, execution_id: str) -> int | None:
        return await self._look(execution_id, partial(reader.last_sequence, execution_id=execution_id))

    async def list_executions(
        self, *, status: str | None = None, after: int = 0, limit: int = 100
    ) -> list[ExecutionSummary]:
        after, limit = position_of(after), limit_of(limit)
        check_texts("" if status is None else status)
        return await self._look(
            None, partial(reader.list_executions, status=status, after=after, limit=limit)
        )

    async def acquire_fence(self, execution_id: str, *, lease: Lease | None = None) -> int:
        self._check_usable(execution_id)
        token: int = await self._submit(AcquireFence(execution_id, key_and_token(lease)))
        return token

    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        after, limit = position_of(after), limit_of(limit)
        return await self._look(None, partial(reader.read_all, after=after, limit=limit))

    async def check_storage(self) -> list[str]:
        """As the contract says. Indexes are looked into where the database has the extension `amcheck`."""
        return await self._read(None, check_storage)

    async def truncate_prefix(self, execution_id: str, before: int) -> int:
        check_cut(before)
        cut = partial(truncate_prefix, execution_id=execution_id, before=before)
        return await self._change(execution_id, cut)

    async def copy_prefix(
        self,
        source_id: str,
        target_id: str,
        through: int,
        *,
        fork_metadata: Mapping[str, object] | None = None,
        branch_name: str | None = None,
    ) -> None:
        copier = Copier(source_id, target_id, through, fork_metadata)
        if branch_name is not None:
            check_branch(branch_name, target_id, source_id, through)
        copy = CopyPrefix(source_id, target_id, through, copier, branch_name, self._writer.tag())
        await self._change(target_id, copy)

    def watch(self, execution_id: str, wake: Callable[[], None]) -> Callable[[], None]:
        """As the contract says, by LISTEN and NOTIFY. `wake` is called on the store's home loop."""
        check_texts(execution_id)
        self._check_usable(execution_id)
        self._hand_over(partial(self._listener.watch, execution_id, wake))
        return partial(self._unwatch, execution_id, wake)

    def _unwatch(self, execution_id: str, wake: Callable[[], None]) -> None:
        with contextlib.suppress(StoreClosedError):  # with its loop the watching has ended
            self._hand_over(partial(self._listener.unwatch, execution_id, wake))

    async def close(self) -> None:
        """Finish what is under way, then close. A second call returns at once; a forked child closes nothing.

        Cancelling it leaves the closing to a task of its own.
        """
        if self._closed or self._pid != os.getpid() or self._loop.is_closed():
            self._closed = True
            return
        self._closed = True
        call = Call()
        self._at_home(lambda: self._start(call, None, self._finish))
        await call.answer()

    async def _finish(self) -> None:
        if self._reads:
            self._idle = self._loop.create_future()
            await self._idle
        ours = asyncio.current_task()
        while writes := [task for task in self._writes if task is not ours]:
            await asyncio.wait(writes)
        await self._listener.close()
        await self._writer.close()
        await self._connections.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or self._pid != os.getpid():
            return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_abandon, self._connections, self._writer, self._listener)
        warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<PostgresEventStore {self._name}>"

    async def _change(
        self, execution_id: str, perform: Callable[[AnyConnection], Awaitable[T]], *, repeat: bool = False
    ) -> T:
        """Change what belongs to logs, in turn with the appends. `repeat`: twice is as good as once."""
        self._check_usable(execution_id)
        answer: T = await self._submit(Task(execution_id, perform, repeat=repeat))
        return answer

    async def _submit(self, call: Write | Task) -> Any:
        """Queue a call of the writer; return its answer."""
        self._at_home(partial(self._writer.submit, call))
        return await call.answer()

    async def _read(self, execution_id: str | None, query: Callable[[AnyConnection], Awaitable[T]]) -> T:
        """Answer one query on a connection of the pool."""
        return await self._look(execution_id, lambda use: use(query))

    async def _look(self, execution_id: str | None, question: Callable[[reader.Use], Awaitable[T]]) -> T:
        """Answer a question of any number of queries. Raises `StoreReadError` for what the driver raises."""
        self._check_usable(execution_id)
        if asyncio.get_running_loop() is self._loop:
            return await self._looked(execution_id, question)
        call = Call()
        self._at_home(lambda: self._start(call, execution_id, partial(self._looked, execution_id, question)))
        answer: T = await call.answer()
        return answer

    async def _looked(self, execution_id: str | None, question: Callable[[reader.Use], Awaitable[T]]) -> T:
        self._reads += 1
        try:
            return await question(self._connections.use)
        except LoomError:
            raise
        except Exception as cause:
            raise read_error(execution_id, cause) from cause
        finally:
            self._reads -= 1
            if not self._reads and self._idle is not None:
                self._idle.set_result(None)

    async def _write(
        self,
        execution_id: str | None,
        query: Callable[[AnyConnection], Awaitable[T]],
        *,
        repeat: bool = False,
    ) -> T:
        """Do a write that is not about logs on a connection of the pool, out of reach of cancelling.

        `repeat`: twice is as good as once.
        """
        self._check_usable(execution_id)
        call = Call()
        work = partial(self._connections.use, query, repeat=repeat)
        self._at_home(lambda: self._start(call, execution_id, work))
        answer: T = await call.answer()
        return answer

    def _start(
        self, call: Call, execution_id: str | None, work: Callable[[], Coroutine[Any, Any, Any]]
    ) -> None:
        """Do work in a task of this store's loop that answers a call."""

        async def answer() -> None:
            try:
                outcome = await work()
            except Exception as error:
                outcome = error if isinstance(error, LoomError) else _failed(execution_id, error)
            self._writer.answer([(call, outcome)])

        def ended(task: asyncio.Task[None]) -> None:
            self._writes.discard(task)
            if task.cancelled():  # the event loop ends, and the caller may be on another
                self._writer.answer([(call, StoreClosedError(execution_id, f"{self._name}: {LOOP_ENDED}"))])

        task = self._loop.create_task(answer())
        self._writes.add(task)
        task.add_done_callback(ended)

    def _at_home(self, action: Callable[[], None]) -> None:
        """Do something on the event loop that the connections belong to."""
        if asyncio.get_running_loop() is self._loop:
            action()
        else:
            self._hand_over(action)

    def _hand_over(self, action: Callable[[], None]) -> None:
        """Do something there in one of the loop's next turns, asked from any thread."""
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            reason = f"{self._name}: the event loop that opened the store has been closed"
            raise StoreClosedError(None, reason) from None

    def _check_usable(self, execution_id: str | None) -> None:
        if self._pid != os.getpid():
            raise StoreClosedError(
                execution_id, f"{self._name}: the store belongs to the process that opened it; open one here"
            )
        if self._closed:
            raise StoreClosedError(execution_id, f"{self._name}: the store has been closed")


def _abandon(connections: Connections, writer: Writer, listener: Listener) -> None:
    """Drop what a store held that nobody closed."""
    listener.terminate()
    writer.terminate()
    connections.terminate()


def _failed(execution_id: str | None, cause: Exception) -> StorageWriteError:
    return write_error(execution_id, None, cause, doubtful=is_lost(cause))
