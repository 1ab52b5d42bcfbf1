"""The tables of the SQLite store, version by version.

What lives here: `MIGRATIONS`, and what one of them does that a statement cannot say. What must not: whatever
the store of today does. A migration, once released, is never edited, so nothing it calls may change with the
store: it brings its own form of what it reads and writes.

Invariant: what was damaged before a migration is still found to be damaged after it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import apsw

from loomfast._core.snapshots import Snapshot, state_of
from loomfast._errors import BadSnapshotError
from loomfast._kernels import decode

# A statement, or what makes a change to the rows.
Change: TypeAlias = str | Callable[[apsw.Connection], None]

_SUSPENDED: Final = 11
_LAST: Final = 0xFFFFFFFF


def _fill_wake_at(connection: apsw.Connection) -> None:
    """Give each execution whose gate is open the `wakeAt` of that gate, from its log or from a snapshot."""
    rows: Any = connection.execute("SELECT number, id FROM executions WHERE pending").fetchall()
    for number, stored_id in rows:
        wake_at = _wake_at(connection, number, stored_id)
        if type(wake_at) is int and wake_at >= 0:
            connection.execute(
                "UPDATE executions SET wake_at = ? WHERE number = ?", (min(wake_at, 2**63 - 1), number)
            )


def _wake_at(connection: apsw.Connection, number: int, stored_id: str | bytes) -> object:
    first, last = number << 32, (number << 32) + _LAST
    row = connection.execute(
        "SELECT id, kind, stamp, subject, fence, timestamp, checksum, extra, body FROM events"
        " WHERE id BETWEEN ? AND ? AND kind = ? ORDER BY id DESC LIMIT 1",
        (first, last, _SUSPENDED),
    ).fetchone()
    if row is not None:
        return decode(row[8]).get("wakeAt") if _is_intact(*row) else None
    execution_id = stored_id if isinstance(stored_id, str) else stored_id.decode("utf-8", "surrogatepass")
    for snapshot_id, version, checksum, body in connection.execute(
        "SELECT id, schema_version, checksum, body FROM snapshots WHERE id BETWEEN ? AND ? ORDER BY id DESC",
        (first, last),
    ):
        try:
            state = state_of(Snapshot(execution_id, snapshot_id & _LAST, version, body, checksum))
            return None if state.pending is None else state.pending.wake_at
        except (BadSnapshotError, TypeError):
            continue
    return None


def _is_intact(
    row_id: int,
    kind: int,
    stamp: int | None,
    subject: str | bytes | None,
    fence: int | None,
    timestamp: int,
    checksum: int,
    extra: bytes | None,
    body: Any,
) -> bool:
    """Whether a row passes its checksum."""
    try:
        return checksum == _checksum(row_id, kind, stamp, subject, fence, timestamp, extra, body)
    except (TypeError, AttributeError):
        return False


def _checksum(
    row_id: int,
    kind: int,
    stamp: int | None,
    subject: str | bytes | None,
    fence: int | None,
    timestamp: int,
    extra: bytes | None,
    body: Any,
) -> int:
    """The checksum of rows: over the kind up to version 3, since then over what stands in its place."""
    name = subject.encode() if isinstance(subject, str) else subject
    head = f"{row_id},{kind},{stamp},{fence},{timestamp},{None if name is None else len(name)},".encode()
    crc = zlib.crc32(body, zlib.crc32(head if name is None else head + name))
    return crc if extra is None else zlib.crc32(extra, zlib.crc32(b"+", crc))


def _guard_rows(connection: apsw.Connection) -> None:
    """Give every row its guard, and a checksum that covers it. One that was damaged gets wrong ones."""
    columns = "id, coded, stamp, subject, fence, timestamp, checksum, extra, body"
    page = f"SELECT {columns} FROM events WHERE id > ? ORDER BY id LIMIT 1000"
    rows: list[Any] = connection.execute(page, (-1,)).fetchall()
    while rows:
        connection.executemany("UPDATE events SET coded = ?, checksum = ? WHERE id = ?", map(_guarded, rows))
        rows = connection.execute(page, (rows[-1][0],)).fetchall()


def _guarded(row: Any) -> tuple[int, int, int]:
    row_id, kind, stamp, subject, fence, timestamp, _, extra, body = row
    if not _is_intact(*row):
        return ~kind if isinstance(kind, int) else -1, -1, row_id  # no kind and no checksum is negative
    name = subject.encode() if isinstance(subject, str) else subject
    shape, texts = int(stamp is not None), b""
    if kind > 2 or (kind == 0 and stamp is None):
        shape |= 0 if name is None else (len(name) + 1) << 1
        texts = (name or b"") + body
    digest = 0 if stamp is None else stamp & 0xFFFFFFFFFFFFFFFF
    guard = zlib.crc32(struct.pack("<QIIQ", row_id, kind, shape, digest) + texts)
    coded = kind << 32 | guard
    return coded, _checksum(row_id, coded, stamp, subject, fence, timestamp, extra, body), row_id


MIGRATIONS: Final[tuple[tuple[Change, ...], ...]] = (
    (
        # status is '' and last_sequence -1 while an execution has a fence and no event yet
        """CREATE TABLE executions (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            flow_id TEXT NOT NULL,
            status TEXT NOT NULL,
            last_sequence INTEGER NOT NULL,
            fence INTEGER,
            pending INTEGER NOT NULL,
            in_doubt BLOB,
            odd_text INTEGER NOT NULL
        )""",
        "CREATE INDEX executions_by_status ON executions (status)",
        # what a replay needs of a stamped emit comes first, so that the rest of its record is not parsed
        """CREATE TABLE events (
            id INTEGER PRIMARY KEY,
            kind INTEGER NOT NULL,
            stamp INTEGER,
            subject TEXT,
            position INTEGER NOT NULL,
            fence INTEGER,
            timestamp INTEGER NOT NULL,
            checksum INTEGER NOT NULL,
            extra BLOB,
            body BLOB NOT NULL
        )""",
        "CREATE UNIQUE INDEX events_by_position ON events (position)",
    ),
    (
        # the first sequence beyond 0 that was not truncated; 1 while nothing was
        "ALTER TABLE executions ADD COLUMN cut INTEGER NOT NULL DEFAULT 1",
        # an id is an execution's number and a sequence, as an event's is
        """CREATE TABLE snapshots (
            id INTEGER PRIMARY KEY,
            schema_version TEXT NOT NULL,
            checksum TEXT NOT NULL,
            body BLOB NOT NULL
        )""",
        # origin, execution and parent are numbers of executions; an origin's own row has no parent, no cut
        """CREATE TABLE branches (
            number INTEGER PRIMARY KEY,
            origin INTEGER NOT NULL,
            name TEXT NOT NULL,
            execution INTEGER NOT NULL UNIQUE,
            parent INTEGER,
            cut INTEGER,
            main INTEGER NOT NULL,
            UNIQUE (origin, name)
        )""",
        "CREATE INDEX branches_by_parent ON branches (parent)",
    ),
    (
        # when a timer answers the open gate (ms); what is due is read from the index, however many are parked
        "ALTER TABLE executions ADD COLUMN wake_at INTEGER",
        "CREATE INDEX executions_by_wake ON executions (wake_at) WHERE wake_at IS NOT NULL",
        _fill_wake_at,
        # AUTOINCREMENT never gives a number twice, also when the row is gone: that makes it a token
        """CREATE TABLE leases (
            token INTEGER PRIMARY KEY AUTOINCREMENT,
            key TEXT NOT NULL UNIQUE,
            owner TEXT NOT NULL,
            expires_ms INTEGER NOT NULL
        )""",
        # execution is its number
        """CREATE TABLE recoveries (
            execution INTEGER PRIMARY KEY,
            crashes INTEGER NOT NULL,
            progress INTEGER NOT NULL,
            orderly INTEGER NOT NULL,
            set_aside TEXT
        )""",
        "CREATE INDEX recoveries_set_aside ON recoveries (execution) WHERE set_aside IS NOT NULL",
        # an id is UTF-8, surrogates passed, always as a BLOB: these sort by code point
        """CREATE TABLE schedules (
            id BLOB PRIMARY KEY NOT NULL,
            body BLOB NOT NULL,
            next_ms INTEGER,
            version INTEGER NOT NULL
        )""",
        "CREATE INDEX schedules_by_next ON schedules (next_ms, id) WHERE next_ms IS NOT NULL",
    ),
    (
        # the kind in the high 32 bits, in the low ones a CRC-32 over what a fold reads of the row
        "ALTER TABLE events RENAME COLUMN kind TO coded",
        _guard_rows,
        # that a log held text without a UTF-8 form mattered to the fold of version 3
        "ALTER TABLE executions DROP COLUMN odd_text",
    ),
    (
        # AUTOINCREMENT, as for leases: the versions of a schedule that was deleted do not come again. Those
        # given here are newer than all that are kept.
        """CREATE TABLE versioned (
            version INTEGER PRIMARY KEY AUTOINCREMENT,
            id BLOB NOT NULL UNIQUE,
            body BLOB NOT NULL,
            next_ms INTEGER
        )""",
        "INSERT INTO versioned (version, id, body, next_ms)"
        " SELECT (SELECT max(version) FROM schedules) + row_number() OVER (ORDER BY id), id, body, next_ms"
        " FROM schedules",
        "DROP TABLE schedules",
        "ALTER TABLE versioned RENAME TO schedules",
        "CREATE INDEX schedules_by_next ON schedules (next_ms, id) WHERE next_ms IS NOT NULL",
    ),
)
