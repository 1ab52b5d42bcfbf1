"""The threads that read a SQLite store, and its queries.

What lives here: `Reader` and one function per question, each run on a reader thread's own connection. What
must not: writes. A reader sees what was committed before its statement began and never waits for a writer.

`fold` asks SQLite for what the fold needs and no more: a stamped emit is its sequence and its stamp. SQLite
reads a record's columns in order and stops at the last one asked for, so bodies that are not needed are not
even read from their overflow pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

import apsw

from loomfast import _events as ev
from loomfast._errors import MalformedEventError, StoreCorruptError, StoreReadError
from loomfast._kernels import NO_EVENT, Envelope, State, fold_guarded
from loomfast.stores import _sqlite_schema as schema
from loomfast.stores._admission import check_range
from loomfast.stores._spi import ExecutionSummary, PositionedEvent
from loomfast.stores._sqlite_faults import DatabaseFile, read_error
from loomfast.stores._sqlite_rows import READ_COLUMNS, load_text, store_text, to_event
from loomfast.stores._threads import Call, Worker, deliver
from loomfast.stores._unreadable import damaged, incomplete

THREADS: Final = 2

_LAST: Final = 0xFFFFFFFF
# The fold wants the body of every kernel fact, and of a domain event that may answer a gate. That this also
# fetches those of unstamped chunks and patches, which are rare, costs less than telling them from the rest.
_STEERS = f"stamp IS NULL OR coded >= {ev.LAST_INERT + 1 << 32}"
_FOLD = (
    f"SELECT id, coded, CASE WHEN {_STEERS} THEN subject END, stamp,"
    f" CASE WHEN {_STEERS} THEN body END FROM events WHERE id BETWEEN ? AND ? ORDER BY id"
)
_RANGE = f"SELECT {READ_COLUMNS} FROM events WHERE id BETWEEN ? AND ? ORDER BY id"
_ALL = (
    "SELECT e.position, x.id, "
    + ", ".join(f"e.{column}" for column in READ_COLUMNS.split(", "))
    + " FROM events e LEFT JOIN executions x ON x.number = e.id >> 32 WHERE e.position > ?"
    " ORDER BY e.position LIMIT ?"
)
# Answered from the index over positions alone, so also where the event itself cannot be read.
_NEXT = (
    "SELECT e.position, x.id FROM events e LEFT JOIN executions x ON x.number = e.id >> 32"
    " WHERE e.position > ? ORDER BY e.position LIMIT 1"
)
_LIST = "SELECT id, flow_id, status, last_sequence, number FROM executions WHERE "

Query = Callable[[apsw.Connection], Any]


class Read(Call):
    """Answer `query`; `execution_id` is the one it concerns, None for all."""

    __slots__ = ("execution_id", "query")

    def __init__(self, execution_id: str | None, query: Query) -> None:
        super().__init__()
        self.execution_id = execution_id
        self.query = query


class Reader(Worker):
    """Serves `Read`, on a few threads that each open a connection when they first need one."""

    def __init__(self, file: DatabaseFile, busy_timeout_ms: int) -> None:
        super().__init__("loomfast-sqlite-reader", THREADS)
        self._file = file
        self._busy_timeout_ms = busy_timeout_ms

    def run(self) -> None:
        connection: apsw.Connection | None = None
        try:
            while (call := self.queue.get()) is not None:
                assert isinstance(call, Read)
                outcome: Any = None
                try:
                    if connection is None:
                        connection = schema.connect_reader(self._file.path, self._busy_timeout_ms)
                    if not call.future.cancelled():
                        outcome = call.query(connection)
                        self._file.check()
                except Exception as error:
                    outcome = read_error(call.execution_id, self._file.blamed(error))
                deliver([(call, outcome)])
                del call, outcome  # or an idle reader would keep the last answer alive
        finally:
            if connection is not None:
                connection.close()


def _span(number: int, first: int, last: int | None) -> tuple[int, int]:
    """The range of event ids for a range of sequences; empty where no sequence is in it."""
    low = min(max(first, 0), _LAST + 1)
    high = _LAST if last is None else min(last, _LAST)
    return (number << 32) + low, (number << 32) + high if high >= low else -1


def _find(connection: apsw.Connection, execution_id: str) -> tuple[int, int, int] | None:
    """The number, last sequence and cut of an execution that has events."""
    row: tuple[int, int, int] | None = connection.execute(
        "SELECT number, last_sequence, cut FROM executions WHERE id = ? AND last_sequence > ?",
        (store_text(execution_id), NO_EVENT),
    ).fetchone()
    return row


def _check_again(connection: apsw.Connection, execution_id: str, first: int, last: int | None) -> None:
    """Refuse a range that was cut after its execution was looked up: the two statements see two states."""
    found = _find(connection, execution_id)
    if found is not None:
        check_range(execution_id, first, last, found[2])


def read_range(
    connection: apsw.Connection, execution_id: str, first: int, last: int | None
) -> list[Envelope]:
    found = _find(connection, execution_id)
    if found is None:
        return []
    number, last_sequence, cut = found
    check_range(execution_id, first, last, cut)
    events = [to_event(execution_id, row) for row in connection.execute(_RANGE, _span(number, first, last))]
    low = max(first, 0)
    high = last_sequence if last is None else min(last, last_sequence)
    # A log has no gaps, so what comes must begin where it was asked for and go on to the end it had.
    if high >= low and (len(events) <= high - low or events[-1].sequence - len(events) + 1 != low):
        _check_again(connection, execution_id, first, last)
        raise incomplete(execution_id)
    return events


def fold(connection: apsw.Connection, execution_id: str, state: State | None) -> State | None:
    found = _find(connection, execution_id)
    if found is None:
        return state
    number, last_sequence, cut = found
    first = 0 if state is None else state.sequence + 1
    check_range(execution_id, first, None, cut)
    rows: Iterator[Any] = iter(connection.execute(_FOLD, _span(number, first, None)))
    head = next(rows, None)
    try:
        folded = state if head is None else fold_guarded(state, execution_id, chain((head,), rows))
    except MalformedEventError as error:
        _check_again(connection, execution_id, first, None)
        if error.field == "guard" and error.sequence is not None:
            raise damaged(execution_id, error.sequence) from error
        raise
    if folded is None or folded.sequence < last_sequence:
        _check_again(connection, execution_id, first, None)
        raise incomplete(execution_id)
    return folded


def last_sequence(connection: apsw.Connection, execution_id: str) -> int | None:
    found = _find(connection, execution_id)
    return None if found is None else found[1]


def list_executions(
    connection: apsw.Connection, status: str | None, after: int, limit: int
) -> list[ExecutionSummary]:
    if status is None:
        rows = connection.execute(
            _LIST + "last_sequence > ? AND number > ? ORDER BY number LIMIT ?", (NO_EVENT, after, limit)
        )
    else:
        rows = connection.execute(
            _LIST + "status = ? AND number > ? ORDER BY number LIMIT ?", (store_text(status), after, limit)
        )
    return [
        ExecutionSummary(load_text(execution_id), load_text(flow_id), standing, last, number)
        for execution_id, flow_id, standing, last, number in rows
    ]


def read_all(connection: apsw.Connection, after: int, limit: int) -> list[PositionedEvent]:
    page: list[PositionedEvent] = []
    try:
        for position, stored_id, *row in connection.execute(_ALL, (after, limit)):
            if stored_id is None:
                raise StoreReadError(None, f"position {position}: the event belongs to no execution")
            page.append(PositionedEvent(position, to_event(load_text(stored_id), row)))
    except (StoreReadError, apsw.CorruptError) as cause:
        if page:
            return page
        raise _unreadable(connection, after, cause) from cause
    return page


def _unreadable(connection: apsw.Connection, after: int, cause: Exception) -> StoreReadError:
    """What `read_all` raises for the first event beyond `after`."""
    found: Any = connection.execute(_NEXT, (after,)).fetchone()
    position, stored_id = (None, None) if found is None else found
    execution_id = None if stored_id is None else load_text(stored_id)
    where = f"position {position}: " if isinstance(cause, apsw.Error) else ""
    error = StoreCorruptError if isinstance(cause, apsw.Error) else StoreReadError
    return error(execution_id, f"{where}{cause}", position=position)
