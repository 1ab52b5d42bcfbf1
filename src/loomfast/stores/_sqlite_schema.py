"""How a connection to the SQLite store's database is opened, and what its tables are like.

What lives here: the pragmas, the length of the write-ahead log, taking the write lock, migrating, and telling
our files from others'. What must not: the tables themselves (`_sqlite_migrations.py`), rows of events.

The driver is apsw, chosen by measurement over the standard library's `sqlite3` (`loomfast bench driver`):
rows are fetched and inserted more than twice as fast, and a replay beside a busy event loop keeps more of its
speed. It brings its own copy of SQLite. Two copies of SQLite must not have one file open in one process
(closing it in one drops the other's locks), so nothing here, tests included, opens it with `sqlite3`.

A connection belongs to one thread, so it is opened without SQLite's own mutexes (9% of a replay's fetch).
Memory-mapped reads would save another quarter of it and are not used: a read error would end the process.

One execution's log is one contiguous range of the `events` b-tree, because an event's id is its execution's
number and its sequence in one integer (`number << 32 | sequence`): a replay reads pages in a row, and no
sequence can exist twice. `position` is the commit order: it counts on from the highest one inside the write
transaction, and SQLite has one writer at a time over all processes, so positions become visible in order
and without holes. Cutting a log's prefix leaves its newest event, and so the highest position.

Migrations run in order, in the one transaction that also raises `user_version`; whoever loses the race for
the write lock finds the version raised and does nothing.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

import apsw

from loomfast._errors import NotAStoreError, StorageError, StoreBusyError, StoreMissingError, StoreTooNewError
from loomfast.stores._sqlite_faults import open_error
from loomfast.stores._sqlite_migrations import MIGRATIONS

T = TypeVar("T")

APPLICATION_ID: Final = 0x4C4F4F4D  # "LOOM"

# Retries of a taken lock: short, so that writers of many processes get their turn, and not in step.
_FIRST_WAIT_S = 0.0002
_LONGEST_WAIT_S = 0.005

# So small a cache hands what is written on to the log at once, before the transaction ends.
_SMALL_CACHE_PAGES = 16
_LARGE_ROW = "INSERT INTO snapshots (id, schema_version, checksum, body) VALUES (-1, '', '', zeroblob(?))"


def connect_reader(path: str, busy_timeout_ms: int) -> apsw.Connection:
    """Open a connection of the calling thread that cannot write, to a database that exists.

    It never waits for a writer; the timeout is for the moments when another process recovers or removes the
    write-ahead log. Raises `apsw.Error`.
    """
    connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOMUTEX)
    try:
        connection.set_busy_timeout(busy_timeout_ms)
        connection.execute("PRAGMA query_only=ON")
        connection.execute("PRAGMA cell_size_check=ON")
    except BaseException:
        connection.close()
        raise
    return connection


def open_writer(path: str, synchronous: str, busy_timeout_ms: int, *, create: bool = True) -> apsw.Connection:
    """Open the connection of the writer thread, in WAL mode and with this version's tables.

    Creates the database if need be and `create` allows. Raises `StoreMissingError`, `NotAStoreError`,
    `StoreBusyError`, `StoreTooNewError`, `StorageError` for a database that cannot be opened.
    """
    # Switching to WAL and migrating take exclusive locks; whoever meets one starts over.
    return _retry(lambda: _open_writer(path, synchronous, create), time.monotonic() + busy_timeout_ms / 1000)


def _open_writer(path: str, synchronous: str, create: bool) -> apsw.Connection:
    _look(path, create)
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOMUTEX
    if create:
        flags |= apsw.SQLITE_OPEN_CREATE
    connection = _connect(path, flags)
    try:
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute("PRAGMA cell_size_check=ON")
        connection.execute("PRAGMA journal_size_limit=67108864")
        if _version(connection, path, create) < len(MIGRATIONS):
            _migrate(connection, path, create)
        mode = connection.pragma("journal_mode")
        if mode != "wal":
            raise StorageError(None, f"{path}: write-ahead logging cannot be used here, the mode is {mode!r}")
    except (apsw.BusyError, apsw.LockedError):
        connection.close()
        raise
    except apsw.Error as error:
        system_errno = connection.system_errno
        connection.close()
        raise open_error(path, error, system_errno) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: str, flags: int) -> apsw.Connection:
    """Raises `StorageError`: a connection that could not be made cannot tell what the system said."""
    try:
        return apsw.Connection(path, flags=flags, statementcachesize=256)
    except apsw.Error as error:
        denied = not os.access(path if os.path.exists(path) else os.path.dirname(path), os.W_OK)
        raise open_error(path, error, errno.EACCES if denied else 0) from error


def _look(path: str, create: bool) -> None:
    """Refuse what is not ours, through a connection that leaves the file and what stands beside it alone.

    It is this SQLite that looks: reading the header by hand would drop the locks that this process holds on
    the file. A write-ahead log that another application left behind is not folded into its database.
    """
    if os.path.isdir(path):
        raise NotAStoreError(path, "is a folder, not a database")
    if not os.path.exists(path):
        _look_at_folder(path)
        if not create:
            raise StoreMissingError(path)
        return
    left_behind = os.path.exists(path + "-wal")
    flags = apsw.SQLITE_OPEN_READONLY if left_behind else apsw.SQLITE_OPEN_READWRITE
    try:
        connection = apsw.Connection(path, flags=flags | apsw.SQLITE_OPEN_NOMUTEX)
        try:
            _version(connection, path, create)
        finally:
            connection.close()
    except apsw.NotADBError as error:
        raise NotAStoreError(path, f"is not a loomfast database: {error}") from error
    except (apsw.ReadOnlyError, apsw.CantOpenError):
        pass  # it needs recovery before it can be read: whoever opens it next looks again before writing
    except (apsw.BusyError, apsw.LockedError):
        raise
    except apsw.Error as error:
        raise open_error(path, error, 0) from error


def _look_at_folder(path: str) -> None:
    """Refuse a path whose folder is missing, or is none; one that may not be looked at is left to SQLite."""
    folder = os.path.dirname(path)
    try:
        os.stat(os.path.join(folder, ""))
    except FileNotFoundError as error:
        raise StoreMissingError(path, f"there is no folder {folder}") from error
    except NotADirectoryError as error:
        raise StoreMissingError(path, f"{folder} is no folder") from error
    except OSError:
        return


def _migrate(connection: apsw.Connection, path: str, create: bool) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        for changes in MIGRATIONS[_version(connection, path, create) :]:
            for change in changes:
                if callable(change):
                    change(connection)
                else:
                    connection.execute(change)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        roll_back(connection)
        raise


def _version(connection: apsw.Connection, path: str, create: bool) -> int:
    """The schema version: 0 for a file without content, which only `create` may fill."""
    version, owner, tables = connection.execute(
        "SELECT (SELECT user_version FROM pragma_user_version),"
        " (SELECT application_id FROM pragma_application_id), (SELECT count(*) FROM sqlite_schema)"
    ).get
    blank = not version and not tables and owner in (0, APPLICATION_ID)
    if blank and not create:
        raise NotAStoreError(path, "is empty, and not a loomfast database")
    if not blank and (owner != APPLICATION_ID or not version):
        raise NotAStoreError(path, "is not a loomfast database but another application's")
    if version > len(MIGRATIONS):
        raise StoreTooNewError(path, version, len(MIGRATIONS))
    return int(version)


def lengthen_log(connection: apsw.Connection, path: str) -> None:
    """Make the write-ahead log at once as long as commits make it before SQLite begins it anew.

    A commit that lengthens a file waits for the file system's journal too: several times as long. What makes
    it long is a row too large for the cache, which is taken back. It takes a few milliseconds. Without room
    for it nothing happens.
    """
    try:
        pages: int = connection.pragma("wal_autocheckpoint")
        size = pages * connection.pragma("page_size")
        if os.path.getsize(path + "-wal") >= size:
            return
        cache: int = connection.pragma("cache_size")
        connection.pragma("cache_size", _SMALL_CACHE_PAGES)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_LARGE_ROW, (size,))
        finally:
            roll_back(connection)
            connection.pragma("cache_size", cache)
    except (apsw.Error, OSError):
        return  # whoever writes next finds out what is wrong, if something is


def begin(connection: apsw.Connection, deadline: float) -> None:
    """Take the write lock, waiting for it until `deadline` (monotonic seconds). Raises `StoreBusyError`.

    A transaction that reads first and writes later can fail at once in spite of any busy timeout; so every
    write transaction starts by taking the lock. SQLite's own waiting grows to steps of 100 ms, in which a
    writer among many starves; these steps stay short.
    """
    _retry(lambda: connection.execute("BEGIN IMMEDIATE"), deadline)


def _retry(attempt: Callable[[], T], deadline: float) -> T:
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            return attempt()
        except (apsw.BusyError, apsw.LockedError) as error:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StoreBusyError(None, None, "busy: the database is locked by another writer") from error
            time.sleep(min(wait_s * random.uniform(0.5, 1.0), left_s))
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)


def roll_back(connection: apsw.Connection) -> None:
    """Undo the open transaction, if the error that is being handled has not ended it already."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")
