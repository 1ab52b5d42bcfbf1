"""The SQLite store, as the event loop sees it. Nothing here touches the database.

What lives here: `SqliteEventStore`: checking arguments, passing calls to the writer and the reader threads,
closing, and refusing to work in a forked child. What must not: SQL, and anything that waits.

Invariant: every method either raises at once or awaits one `Call`.
"""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Never, Self

from loomfast._errors import BadInputError, StoreClosedError
from loomfast._kernels import Envelope, State
from loomfast.stores import _sqlite_reader as reader
from loomfast.stores._admission import refuse_unstorable
from loomfast.stores._forking import Copier, check_branch, check_cut
from loomfast.stores._spi import EventStore, ExecutionSummary, PositionedEvent
from loomfast.stores._spi_arguments import check_some, limit_of, position_of, range_of
from loomfast.stores._spi_leases import Lease, key_and_token
from loomfast.stores._sqlite_branches import SqliteBranchRegistry
from loomfast.stores._sqlite_check import check_storage
from loomfast.stores._sqlite_compaction import CopyPrefix, TruncatePrefix
from loomfast.stores._sqlite_faults import DatabaseFile
from loomfast.stores._sqlite_leases import SqliteLeaseStore, is_held
from loomfast.stores._sqlite_recoveries import SqliteRecoveryStore
from loomfast.stores._sqlite_snapshots import SqliteSnapshotStore
from loomfast.stores._sqlite_timers import SqliteTimerStore
from loomfast.stores._sqlite_writer import AcquireFence, Append, Open, Writer
from loomfast.stores._threads import Call, Worker, stopped


class SqliteEventStore(EventStore):
    """Event logs in one SQLite file, which the processes, threads and event loops of one machine may share.

    Made by `open`, ended by `close` or by leaving `async with`. An append is durable when it returns: with
    `synchronous="FULL"` against a power failure, with `"NORMAL"` against the end of the process (after a
    power failure the newest appends may be gone; what is left is whole and in order).

    Do not open the same file with the `sqlite3` module in the same process: that is a second copy of SQLite,
    and by closing the file it would drop this store's locks. In another process anything may read it.

    A write that finds the database locked by another process waits in the writer thread for at most
    `busy_timeout_ms` and is then refused with `StoreBusyError`. A caller that is cancelled stops waiting at
    once; its write happens whole or not at all.
    """

    def __init__(self, *_: Never, **__: Never) -> None:
        """Raises `BadInputError`: use `open`, which waits."""
        raise BadInputError("a SqliteEventStore is not constructed: use await SqliteEventStore.open(path)")

    def _begin(self, path: str, writer: Writer, readers: reader.Reader, now_ms: Callable[[], int]) -> None:
        self._path = path
        self._now_ms = now_ms
        self._pid = os.getpid()
        self._writer = writer
        self._reader = readers
        self._closed = False

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        synchronous: Literal["FULL", "NORMAL"] = "FULL",
        busy_timeout_ms: int = 5000,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> Self:
        """Open the database at `path`, creating it if it is not there and `create`; its folder must exist.

        A file without content counts as not there. An older version's database is brought up to date.
        `now_ms` is the clock that leases run out by, the machine's own: it is the same for every process that
        may open the file. It is asked on the store's threads too.

        Raises `BadInputError` for the arguments, `StoreMissingError` when nothing is there and `create` is
        off, or its folder is missing, `NotAStoreError` for a file that is not loomfast's (it is not changed),
        `StoreBusyError` when it is locked for longer than `busy_timeout_ms`, `StoreFullError`,
        `StoreReadOnlyError`, `StoreCorruptError`, and `StorageError` (with its cause) when it cannot be
        opened for another reason or is a newer version's.
        """
        name = _file_name(path)
        if synchronous not in ("FULL", "NORMAL"):
            raise BadInputError(f"synchronous={synchronous!r}: choose FULL or NORMAL")
        if busy_timeout_ms < 0:
            raise BadInputError(f"busy_timeout_ms={busy_timeout_ms}: must be 0 or more")
        file = DatabaseFile(name)
        writer = Writer(file, synchronous, busy_timeout_ms, create=create)
        call = Open()
        writer.submit(call)
        writer.start()
        try:
            await call.answer()
        except BaseException:  # cancellation too: the writer ends once it has opened
            writer.stop()
            raise
        readers = reader.Reader(file, busy_timeout_ms)
        readers.start()
        store = cls.__new__(cls)
        store._begin(name, writer, readers, now_ms)
        return store

    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        envelopes = tuple(envelopes)
        self._check_usable(envelopes[0].execution_id if envelopes else None)
        if not envelopes:
            return
        refuse_unstorable(envelopes)
        await self._write(envelopes[0].execution_id, Append(envelopes))

    def write(self, envelopes: Sequence[Envelope]) -> asyncio.Future[Exception | None]:
        check_some(envelopes)
        execution_id = envelopes[0].execution_id
        self._check_usable(execution_id)
        refuse_unstorable(envelopes)
        call = Append(envelopes)
        self._submit(self._writer, execution_id, call)
        return call.future

    @property
    def snapshots(self) -> SqliteSnapshotStore:
        return SqliteSnapshotStore(self)

    @property
    def branches(self) -> SqliteBranchRegistry:
        return SqliteBranchRegistry(self)

    @property
    def leases(self) -> SqliteLeaseStore:
        return SqliteLeaseStore(self, self._now_ms)

    @property
    def recoveries(self) -> SqliteRecoveryStore:
        return SqliteRecoveryStore(self)

    @property
    def timers(self) -> SqliteTimerStore:
        return SqliteTimerStore(self)

    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[Envelope]:
        first, last = range_of(first, last)
        query = partial(reader.read_range, execution_id=execution_id, first=first, last=last)
        events: list[Envelope] = await self._read(execution_id, query)
        return events

    async def fold(self, execution_id: str, state: State | None = None) -> State | None:
        """Fold on a reader thread, from rows whose bodies are fetched only where the fold needs them."""
        query = partial(reader.fold, execution_id=execution_id, state=state)
        folded: State | None = await self._read(execution_id, query)
        return folded

    async def last_sequence(self, execution_id: str) -> int | None:
        query = partial(reader.last_sequence, execution_id=execution_id)
        last: int | None = await self._read(execution_id, query)
        return last

    async def list_executions(
        self, *, status: str | None = None, after: int = 0, limit: int = 100
    ) -> list[ExecutionSummary]:
        after, limit = position_of(after), limit_of(limit)
        query = partial(reader.list_executions, status=status, after=after, limit=limit)
        page: list[ExecutionSummary] = await self._read(None, query)
        return page

    async def acquire_fence(self, execution_id: str, *, lease: Lease | None = None) -> int:
        under = key_and_token(lease)
        held = None if under is None else partial(is_held, key=under[0], token=under[1], now_ms=self._now_ms)
        token: int = await self._write(execution_id, AcquireFence(execution_id, held))
        return token

    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        after, limit = position_of(after), limit_of(limit)
        query = partial(reader.read_all, after=after, limit=limit)
        page: list[PositionedEvent] = await self._read(None, query)
        return page

    async def truncate_prefix(self, execution_id: str, before: int) -> int:
        """As the contract says. The space is used again by later writes; the file does not shrink."""
        check_cut(before)
        removed: int = await self._write(execution_id, TruncatePrefix(execution_id, before))
        return removed

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
        await self._write(target_id, CopyPrefix(source_id, target_id, through, copier, branch_name))

    async def check_storage(self) -> list[str]:
        """As the contract says: SQLite's integrity check, and whether every row belongs to an execution."""
        complaints: list[str] = await self._read(None, check_storage)
        return complaints

    async def close(self) -> None:
        """Finish what is queued, then close. A second call returns at once; a forked child closes nothing.

        Cancelling it leaves the closing to the store's threads, which end by themselves.
        """
        if self._closed or self._pid != os.getpid():
            self._closed = True
            return
        self._closed = True
        # The writer goes last: the last connection to close folds the write-ahead log into the database.
        await stopped(self._reader, self._writer)

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or self._pid != os.getpid():
            return
        self._reader.stop()
        self._writer.stop()
        warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<SqliteEventStore {self._path}>"

    async def _read(self, execution_id: str | None, query: reader.Query) -> Any:
        self._check_usable(execution_id)
        return await self._ask(self._reader, execution_id, reader.Read(execution_id, query))

    async def _write(self, execution_id: str | None, call: Call) -> Any:
        self._check_usable(execution_id)
        return await self._ask(self._writer, execution_id, call)

    async def _ask(self, worker: Worker, execution_id: str | None, call: Call) -> Any:
        self._submit(worker, execution_id, call)
        return await call.answer()

    def _submit(self, worker: Worker, execution_id: str | None, call: Call) -> None:
        if not worker.submit(call):
            raise StoreClosedError(execution_id, f"{self._path}: the store has been closed")

    def _check_usable(self, execution_id: str | None) -> None:
        if self._pid != os.getpid():
            raise StoreClosedError(
                execution_id, f"{self._path}: the store belongs to the process that opened it; open one here"
            )
        if self._closed:
            raise StoreClosedError(execution_id, f"{self._path}: the store has been closed")


def _file_name(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    if not isinstance(name, str) or not name or name == ":memory:" or "\x00" in name:
        raise BadInputError(f"path {name!r}: must name a file; for a store in memory use MemoryEventStore")
    name = os.path.abspath(name)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadInputError(f"{name}: SQLite takes names in UTF-8 only") from None
    return name
