"""Opening a store that a command was given the path of, without ever making one by looking.

Invariant: a command that reads leaves no file behind, and changes no file that is not loomfast's.
"""

from __future__ import annotations

import os

import apsw

import loomfast
from loomfast.cli.output import CommandError
from loomfast.stores._sqlite_schema import APPLICATION_ID


async def open_existing(path: str) -> loomfast.SqliteEventStore:
    """Open the database at `path`. Raises `CommandError` unless it is there and is loomfast's."""
    _refuse_unnameable(path)
    _refuse_missing(path)
    _refuse_foreign(path)
    return await loomfast.SqliteEventStore.open(path)


async def open_or_create(path: str) -> loomfast.SqliteEventStore:
    """Open the database at `path`, or make it there. Raises `CommandError` for a file of somebody else's."""
    _refuse_unnameable(path)
    if not _is_free(path):
        _refuse_foreign(path)
    return await loomfast.SqliteEventStore.open(path)


def _refuse_unnameable(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise CommandError(f"{path}: SQLite takes names in UTF-8 only") from None


def _refuse_missing(path: str) -> None:
    if not os.path.exists(path):
        raise CommandError(f"{path}: no such database")


def _is_free(path: str) -> bool:
    """Whether a database may be made at `path`: nothing is there, or an empty file."""
    return not os.path.exists(path) or (os.path.isfile(path) and not os.path.getsize(path))


def _refuse_foreign(path: str) -> None:
    """Look at the file through a connection that cannot write.

    It is the store's SQLite that looks: a second copy of the library in one process would undo the first
    one's locks when it closes the file.
    """
    if os.path.isdir(path):
        raise CommandError(f"{path}: is a folder, not a database")
    try:
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            owner = connection.pragma("application_id")
        finally:
            connection.close()
    except apsw.Error as error:
        raise CommandError(f"{path}: cannot be read as a database: {error}") from error
    if owner != APPLICATION_ID:
        raise CommandError(f"{path}: is not a loomfast database")
