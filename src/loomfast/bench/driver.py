"""The two drivers of SQLite for Python, side by side: apsw, which the store uses, and the standard library's.

Each has its own file, with the store's tables in it, and runs the same statements: the fetch of a replay, and
inserts of rows as the writer makes them, many to a statement. Each brings its own copy of SQLite, and two
copies must never share a file in one process; so the rows are written twice.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

from loomfast import _kernels
from loomfast.bench import logs
from loomfast.bench.timing import interleaved
from loomfast.stores import _sqlite_reader as reader
from loomfast.stores import _sqlite_rows as rows_of
from loomfast.stores._sqlite_migrations import MIGRATIONS

_ROWS_AT_ONCE = 256
_INSERT = f"INSERT INTO events ({rows_of.COLUMNS}) VALUES " + ",".join(
    ["(" + ",".join("?" * rows_of.WIDTH) + ")"] * _ROWS_AT_ONCE
)

_ALL = (1 << 32, 2 << 32)

Execute = Callable[..., Any]


def drivers(size: int, rounds: int) -> dict[str, float]:
    """Per row: fetching the columns of a replay, and inserting, by each driver."""
    size -= size % _ROWS_AT_ONCE
    events = list(logs.mixed(_kernels, size))
    groups = [
        _kernels.event_rows(1, at + 1, events[at : at + _ROWS_AT_ONCE])
        for at in range(0, size, _ROWS_AT_ONCE)
    ]
    with tempfile.TemporaryDirectory(prefix="loomfast-bench-") as folder:
        ours = apsw.Connection(str(Path(folder) / "apsw.db"), flags=_FLAGS)
        theirs = sqlite3.connect(Path(folder) / "sqlite3.db", isolation_level=None)
        try:
            return _measure({"apsw": ours.execute, "sqlite3": theirs.execute}, groups, size, rounds)
        finally:
            ours.close()
            theirs.close()


_FLAGS = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_NOMUTEX


def _measure(
    executes: dict[str, Execute], groups: list[list[Any]], size: int, rounds: int
) -> dict[str, float]:
    for execute in executes.values():
        execute("PRAGMA journal_mode=WAL")
        execute("PRAGMA synchronous=NORMAL")
        for statement in _TABLES:
            execute(statement)
    inserts = {f"{name} insert": _inserting(execute, groups) for name, execute in executes.items()}
    fetches = {f"{name} fetch": _fetching(execute) for name, execute in executes.items()}
    taken = interleaved(inserts, rounds, 1)
    ours, theirs = (execute(reader._FOLD, _ALL) for execute in executes.values())
    if any(one != other for one, other in zip(ours, theirs, strict=True)):
        raise AssertionError("the drivers return different rows")
    taken |= interleaved(fetches, rounds, 1)
    return {name: seconds / size for name, seconds in taken.items()}


# The events' table and its index, as the newest version of the store has them.
_TABLES = [
    change
    for changes in MIGRATIONS
    for change in changes
    if isinstance(change, str) and (" events " in change or "ON events" in change)
]


def _inserting(execute: Execute, groups: list[list[Any]]) -> Callable[[], None]:
    def insert() -> None:
        execute("BEGIN IMMEDIATE")
        execute("DELETE FROM events")
        for group in groups:
            execute(_INSERT, group)
        execute("COMMIT")

    return insert


def _fetching(execute: Execute) -> Callable[[], int]:
    def fetch() -> int:
        number = 0
        for _ in execute(reader._FOLD, _ALL):
            number += 1
        return number

    return fetch
