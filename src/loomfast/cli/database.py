"""Opening a store that a command was given the path of, without ever making one by looking.

Invariant: a command that reads leaves no file behind, and changes no file that is not loomfast's.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import loomfast
from loomfast.cli.output import CommandError
from loomfast.stores._sqlite_schema import APPLICATION_ID


async def open_existing(path: str) -> loomfast.SqliteEventStore:
    """Open the database at `path`. Raises `CommandError` unless it is there and is loomfast's."""
    _refuse_missing(path)
    _refuse_foreign(path)
    return await loomfast.SqliteEventStore.open(path)


async def open_or_create(path: str) -> loomfast.SqliteEventStore:
    """Open the database at `path`, or make it there. Raises `CommandError` for a file of somebody else's."""
    if not _is_free(path):
        _refuse_foreign(path)
    return await loomfast.SqliteEventStore.open(path)


def _refuse_missing(path: str) -> None:
    if not os.path.exists(path):
        raise CommandError(f"{path}: no such database")


def _is_free(path: str) -> bool:
    """Whether a database may be made at `path`: nothing is there, or an empty file."""
    return not os.path.exists(path) or (os.path.isfile(path) and not os.path.getsize(path))


def _refuse_foreign(path: str) -> None:
    """Look at the file through a connection that cannot write."""
    if os.path.isdir(path):
        raise CommandError(f"{path}: is a folder, not a database")
    try:
        connection = sqlite3.connect(Path(path).absolute().as_uri() + "?mode=ro", uri=True)
        try:
            owner = connection.execute("PRAGMA application_id").fetchone()[0]
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise CommandError(f"{path}: cannot be read as a database: {error}") from error
    if owner != APPLICATION_ID:
        raise CommandError(f"{path}: is not a loomfast database")
