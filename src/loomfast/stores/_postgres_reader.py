"""The queries that read logs from PostgreSQL.

What lives here: one function per question, each given a connection or a way to one. What must not: writes.

A long log is read page by page, each page one statement that also says where the execution stands, so that
one snapshot holds both: a page that is short of what its head promises is damage, and a cut shows as a cut.
Between pages a log only grows, or loses its front. A page is bounded in events and, by what the pages before
it weighed, in bytes. What a page costs to check and to fold is spent on a thread, unless it is small.

`fold` asks for what the fold needs and no more: a stamped emit is its sequence, kind and stamp.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from loomfast import _events as ev
from loomfast._errors import StoreReadError
from loomfast._kernels import NO_EVENT, Envelope, State, fold_rows
from loomfast.stores._admission import check_range
from loomfast.stores._postgres_connections import AnyConnection
from loomfast.stores._postgres_rows import (
    READ_COLUMNS,
    folded_checksum,
    key_of,
    load_text,
    place_of,
    steers,
    to_event,
)
from loomfast.stores._spi import ExecutionSummary, PositionedEvent
from loomfast.stores._spi_arguments import LAST
from loomfast.stores._unreadable import damaged, incomplete

T = TypeVar("T")

# Answers a question about a connection, trying again when the server is lost.
Use: TypeAlias = Callable[[Callable[[AnyConnection], Awaitable[Any]]], Awaitable[Any]]

FIRST_PAGE: Final = 256
LARGEST_PAGE: Final = 2_000
_PAGE_BYTES: Final = 4_000_000
# Rows that are handled on the event loop, since a thread would cost more.
_AT_HAND: Final = 64

_STEERS = f"(kind > {ev.LAST_INERT} OR (kind = {ev.DOMAIN} AND stamp IS NULL))"
_PAGE = (
    "SELECT x.last_sequence, x.cut, e.* FROM executions x LEFT JOIN LATERAL ("
    " SELECT {} FROM events WHERE execution = x.number AND sequence BETWEEN $2 AND $3"
    " ORDER BY sequence LIMIT $4) e ON true WHERE x.key = $1 AND x.number IS NOT NULL ORDER BY e.sequence"
)
_RANGE = _PAGE.format(READ_COLUMNS)
_FOLD = _PAGE.format(
    f"sequence, kind, stamp, checksum, CASE WHEN {_STEERS} THEN subject END AS subject,"
    f" CASE WHEN {_STEERS} THEN body END AS body"
)
_ALL = (
    "SELECT e.position, coalesce(x.long_id, x.key), "
    + ", ".join(f"e.{column}" for column in READ_COLUMNS.split(", "))
    + " FROM events e LEFT JOIN executions x ON x.number = e.execution"
    " WHERE e.position > $1 ORDER BY e.position LIMIT $2"
)
_LIST = "SELECT coalesce(long_id, key), flow_id, status, last_sequence, number FROM executions WHERE "
_LIST_ALL = _LIST + "number > $1 ORDER BY number LIMIT $2"
_LIST_STATUS = _LIST + "status = $3 AND number > $1 ORDER BY number LIMIT $2"
_LAST_SEQUENCE = "SELECT last_sequence FROM executions WHERE key = $1"


class Pages:
    """How many rows the next page has, by what the ones before it weighed."""

    def __init__(self, limit: int | None = None) -> None:
        self._left = limit
        self.size = FIRST_PAGE if limit is None else min(limit, FIRST_PAGE)

    def weigh(self, rows: Sequence[Any]) -> None:
        """Take in a page of rows that end with the body."""
        if self._left is not None:
            self._left -= len(rows)
        heaviest = max((len(row[-1]) for row in rows if row[-1] is not None), default=0)
        self.size = min(LARGEST_PAGE, self.size * 4, max(1, _PAGE_BYTES // max(heaviest, 1)))
        if self._left is not None:
            self.size = min(self.size, self._left)


async def aside(work: Callable[[], T], rows: int) -> T:
    """Do what a page of rows takes, on a thread unless it is little."""
    return work() if rows <= _AT_HAND else await asyncio.to_thread(work)


async def _fetch(connection: AnyConnection, sql: str, arguments: tuple[object, ...]) -> list[Any]:
    rows: list[Any] = await connection.fetch(sql, *arguments)
    return rows


async def _page(
    use: Use, sql: str, execution_id: str, first: int, last: int | None, pages: Pages
) -> tuple[list[Any], bool]:
    """The rows of one page from `first` on, without the head's columns, and whether the range ends with it.

    Raises `PrefixTruncatedError` and `StoreReadError` for a page that is not all there.
    """
    size = pages.size
    low, high = max(first, 0), LAST if last is None else last
    found = await use(lambda connection: connection.fetch(sql, key_of(execution_id), low, high, size))
    if not found:
        return [], True
    last_sequence, cut = found[0][0], found[0][1]
    check_range(execution_id, first, last, cut)
    rows = [row[2:] for row in found if row[2] is not None]
    end = min(high, last_sequence)
    # A log has no gaps, so what comes must begin where it was asked for and go on as far as the page can.
    expected = max(min(size, end - low + 1), 0)
    if len(rows) != expected or (rows and (rows[0][0] != low or rows[-1][0] != low + expected - 1)):
        raise incomplete(execution_id)
    pages.weigh(rows)
    return rows, low + expected > end


async def read_range(use: Use, execution_id: str, first: int, last: int | None) -> list[Envelope]:
    events: list[Envelope] = []
    place = place_of(execution_id)
    pages = Pages()
    ended = False
    while not ended:
        rows, ended = await _page(use, _RANGE, execution_id, first, last, pages)
        events += await aside(partial(_events, execution_id, place, rows), len(rows))
        first = max(first, 0) + len(rows)
    return events


def _events(execution_id: str, place: int, rows: Sequence[Any]) -> list[Envelope]:
    return [to_event(execution_id, place, row) for row in rows]


async def fold(use: Use, execution_id: str, state: State | None) -> State | None:
    place = place_of(execution_id)
    pages = Pages()
    ended = False
    while not ended:
        first = 0 if state is None else state.sequence + 1
        rows, ended = await _page(use, _FOLD, execution_id, first, None, pages)
        if rows:
            state = await aside(partial(_fold, state, execution_id, place, rows), len(rows))
    return state


def _fold(state: State | None, execution_id: str, place: int, rows: Sequence[Any]) -> State:
    checked = []
    for sequence, kind, stamp, checksum, subject, body in rows:
        steering = steers(kind, stamp)
        if folded_checksum(place, sequence, kind, stamp, subject, body) != checksum & 0xFFFFFFFF:
            raise damaged(execution_id, sequence)
        text = load_text(subject) if steering and subject is not None else None
        checked.append((sequence, kind, text, stamp, body))
    return fold_rows(state, execution_id, checked)


async def last_sequence(use: Use, execution_id: str) -> int | None:
    last = await use(lambda connection: connection.fetchval(_LAST_SEQUENCE, key_of(execution_id)))
    return None if last is None or last == NO_EVENT else int(last)


async def list_executions(use: Use, status: str | None, after: int, limit: int) -> list[ExecutionSummary]:
    page = after, limit
    if status is None:
        rows = await use(lambda connection: connection.fetch(_LIST_ALL, *page))
    elif "\x00" in status or not status.isascii():
        return []  # no status is such a text, and the server takes no such text
    else:
        rows = await use(lambda connection: connection.fetch(_LIST_STATUS, *page, status))
    return [
        ExecutionSummary(load_text(execution_id), load_text(flow_id), standing, last, number)
        for execution_id, flow_id, standing, last, number in rows
    ]


async def read_all(use: Use, after: int, limit: int) -> list[PositionedEvent]:
    page: list[PositionedEvent] = []
    pages = Pages(limit)
    while True:
        rows = await use(partial(_fetch, sql=_ALL, arguments=(after, pages.size)))
        some, fault = await aside(partial(_positioned, rows), len(rows))
        page += some
        if fault is not None:
            if not page:
                raise fault
            return page
        full = len(rows) == pages.size
        pages.weigh(rows)
        if not full or not pages.size:
            return page
        after = page[-1].position


def _positioned(rows: Sequence[Any]) -> tuple[list[PositionedEvent], StoreReadError | None]:
    """The events of rows up to one that is damaged, and what is wrong with that."""
    events: list[PositionedEvent] = []
    places: dict[bytes, tuple[str, int]] = {}
    for position, stored_id, *row in rows:
        if stored_id is None:
            reason = f"position {position}: the row belongs to no execution"
            return events, StoreReadError(None, reason, position=position)
        known = places.get(stored_id)
        if known is None:
            execution_id = load_text(stored_id)
            known = places[stored_id] = execution_id, place_of(execution_id)
        try:
            events.append(PositionedEvent(position, to_event(*known, row)))
        except StoreReadError as error:
            return events, StoreReadError(known[0], str(error), position=position)
    return events, None
