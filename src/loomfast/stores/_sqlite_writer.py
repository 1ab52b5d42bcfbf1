"""The one thread that writes to a SQLite store: group commit.

What lives here: `Writer`, the calls it serves (`Append`, `AcquireFence`, `Task`) and the transaction they
share. What must not: what the tasks do (they stand in the files named after what they write), envelopes'
mapping to rows, event loops.

Theory of operation. The writer takes the first call of its queue and all that wait behind it, up to a bound,
and makes them one transaction; so the lone caller is never held back, and a hundred concurrent callers share
one flush. Nobody is answered before COMMIT has returned.

Each call is judged on its own (`admit`) against the heads of its executions as the calls before it in this
transaction leave them. A refused call has changed nothing, and its neighbours go on. When the transaction
itself fails (a full disk, a value SQLite cannot bind), it is rolled back and its calls are tried one by one,
so that only those that fail alone are told so. A locked database fails all of them at once: no single one is
the reason.

A task is anything rarer than an append. What waits before it in its transaction is written before it is
performed, in a savepoint, so that one that is refused half-way leaves nothing and its neighbours go on.

Heads are kept from one transaction to the next, save those of executions that have ended. The data version of
the file, read under the write lock, tells whether another connection has committed since this one did; if so
they are forgotten.

Every statement executed gives up the interpreter lock, and a busy event loop is slow to give it back. So
rows are inserted many to a statement, and a transaction costs a handful of statements, not one per event.
Between two statements the loop waits for the lock in its turn. So what is done for each event is compiled:
judging (`admit`) and building rows (`event_rows`).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import apsw

from loomfast._errors import (
    LeaseLostError,
    LoomError,
    StoreBusyError,
    StoreLostError,
    UnknownExecutionError,
)
from loomfast._events import END_KIND
from loomfast._kernels import NO_EVENT, Envelope, Head, admit, decode, encode, event_rows
from loomfast.stores import _sqlite_schema as schema
from loomfast.stores._spi_arguments import check_texts
from loomfast.stores._sqlite_faults import DatabaseFile, write_error
from loomfast.stores._sqlite_rows import COLUMNS, WIDTH, load_text, store_text
from loomfast.stores._threads import Call, Worker, deliver

# Bounds of one transaction, so that no caller waits for the whole of an endless queue, and of the head cache.
MAX_CALLS = 1_000
MAX_EVENTS = 10_000
MAX_HEADS = 10_000
# After how many rounds of calls the write-ahead log is made long: who opens a store for less is spared it.
LENGTHEN_AFTER = 10

# Rows to a statement, the most first: x 10 columns, below the limit on parameters (32,766). Few sizes, so
# that few statements are prepared.
_ROWS_AT_ONCE = (256, 64)
_IDS_AT_ONCE = 128
_HEAD_COLUMNS = "number, id, flow_id, status, last_sequence, fence, pending, in_doubt, wake_at"
_HEAD_WIDTH = 9
_INSERT_EVENTS = f"INSERT INTO events ({COLUMNS}) VALUES "
_UPSERT_HEADS = f"INSERT INTO executions ({_HEAD_COLUMNS}) VALUES "
# An update that does not name `status` leaves the index over it alone.
_ON_ADVANCE = " ON CONFLICT (number) DO UPDATE SET last_sequence = excluded.last_sequence"
_ON_CHANGE = (
    _ON_ADVANCE + ", flow_id = excluded.flow_id, status = excluded.status, fence = excluded.fence,"
    " pending = excluded.pending, in_doubt = excluded.in_doubt, wake_at = excluded.wake_at"
)


class Append(Call):
    """Append these events, all or nothing; answered with None."""

    __slots__ = ("envelopes",)

    def __init__(self, envelopes: Sequence[Envelope]) -> None:
        super().__init__()
        self.envelopes = envelopes


class AcquireFence(Call):
    """Raise the execution's token; answered with the new one.

    `held` tells, within the transaction, whether the lease is held that it is asked for under, if any.
    """

    __slots__ = ("execution_id", "held")

    def __init__(self, execution_id: str, held: Callable[[apsw.Connection], bool] | None) -> None:
        check_texts(execution_id)
        super().__init__()
        self.execution_id = execution_id
        self.held = held


class Task(Call):
    """A write of another kind. `execution_ids` are those it concerns, if any, the one to blame first."""

    __slots__ = ("execution_ids",)

    def __init__(self, *execution_ids: str) -> None:
        check_texts(*execution_ids)
        super().__init__()
        self.execution_ids = execution_ids

    @abstractmethod
    def perform(self, ledger: Ledger) -> Any:
        """Do it and return the answer, or raise a `LoomError` to refuse it.

        Changes what the ledger remembers by `ledger.adopt` only, and as the last thing it does.
        """


class Open(Call):
    """Open and migrate the database; answered with None. The first call of a writer."""

    __slots__ = ()


class Writer(Worker):
    """Serves `Open`, then every other call."""

    def __init__(
        self, file: DatabaseFile, synchronous: str, busy_timeout_ms: int, *, create: bool = True
    ) -> None:
        super().__init__("loomfast-sqlite-writer")
        self._file = file
        self._create = create
        self._synchronous = synchronous
        self._busy_timeout_ms = busy_timeout_ms

    def run(self) -> None:
        call = self.queue.get()
        if call is None:
            return
        try:
            connection = schema.open_writer(
                self._file.path, self._synchronous, self._busy_timeout_ms, create=self._create
            )
        except Exception as error:
            deliver([(call, error)])
            return
        try:
            self._file.remember()
            deliver([(call, None)])
            del call
            self._serve(connection)
        finally:
            self._close(connection)

    def _close(self, connection: apsw.Connection) -> None:
        try:
            self._file.check()
        except StoreLostError:
            # The last to close removes the log beside the file, by its name: it may be another file's by now.
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.close()

    def _serve(self, connection: apsw.Connection) -> None:
        ledger = Ledger(connection)
        ending = False
        served = 0
        while not ending:
            call = self.queue.get()
            if call is None:
                return
            calls, ending = self.drain(call, MAX_CALLS)
            del call
            for group in _groups(calls):
                deliver(self._commit(ledger, group))
            del calls, group  # or an idle writer would keep the last events alive
            served += 1
            if served == LENGTHEN_AFTER:
                schema.lengthen_log(connection, self._file.path)

    def _commit(self, ledger: Ledger, calls: list[Call]) -> list[tuple[Call, Any]]:
        deadline = time.monotonic() + self._busy_timeout_ms / 1000
        try:
            outcomes = ledger.commit(calls, deadline)
            self._file.check()
            return outcomes
        except StoreBusyError as error:
            return [(call, _busy(call, error)) for call in calls]
        except StoreLostError as error:  # all of them are written, and none where anybody will find it
            return [(call, write_error(*_subject(call), error, 0)) for call in calls]
        except Exception as error:
            if len(calls) == 1:
                system_errno = ledger.connection.system_errno
                return [(calls[0], write_error(*_subject(calls[0]), self._file.blamed(error), system_errno))]
        outcomes = []
        for call in calls:
            outcomes += self._commit(ledger, [call])
        return outcomes


def _groups(calls: list[Call]) -> Iterable[list[Call]]:
    """Cut calls into transactions of at most about MAX_EVENTS events; a call is never cut."""
    group: list[Call] = []
    size = 0
    for call in calls:
        group.append(call)
        size += len(call.envelopes) if isinstance(call, Append) else 1
        if size >= MAX_EVENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _subject(call: Call) -> tuple[str | None, int | None]:
    if isinstance(call, Append):
        return call.envelopes[0].execution_id, call.envelopes[0].sequence
    if isinstance(call, Task):
        return (call.execution_ids[0] if call.execution_ids else None), None
    return (call.execution_id, None) if isinstance(call, AcquireFence) else (None, None)


def _busy(call: Call, cause: StoreBusyError) -> StoreBusyError:
    error = StoreBusyError(*_subject(call), f"{cause.reason}; nothing was written, it is safe to repeat")
    error.__cause__ = cause.__cause__
    return error


class Ledger:
    """The writer's connection, and what it knows of the database between transactions.

    `position` and `number` are the highest ones given to an event and to an execution.
    """

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        self.position = 0
        self.number = 0
        self._version = -1
        self._heads: dict[str, Head] = {}
        self._ended: list[str] = []

    def commit(self, calls: list[Call], deadline: float) -> list[tuple[Call, Any]]:
        """Serve calls in one transaction. Raises, having written nothing, when the transaction fails."""
        schema.begin(self.connection, deadline)
        try:
            self._refresh(calls)
            outcomes = self._apply(calls)
            self.connection.execute("COMMIT")
            self._version = self.connection.data_version()
        except BaseException:
            self._version = -1
            schema.roll_back(self.connection)
            raise
        self._forget_ended()
        return outcomes

    def _forget_ended(self) -> None:
        for execution_id in self._ended:
            self._heads.pop(execution_id, None)
        self._ended.clear()

    def _refresh(self, calls: list[Call]) -> None:
        version = self.connection.data_version()
        if version != self._version:
            self._heads.clear()
            self._ended.clear()
            self.position, self.number = self.connection.execute(
                "SELECT (SELECT ifnull(max(position), 0) FROM events),"
                " (SELECT ifnull(max(number), 0) FROM executions)"
            ).get
            self._version = version
        elif len(self._heads) > MAX_HEADS:
            self._heads.clear()
        wanted: dict[str, None] = {}
        for call in calls:
            if isinstance(call, Append):
                for event in call.envelopes:
                    wanted[event.execution_id] = None
            elif isinstance(call, AcquireFence):
                wanted[call.execution_id] = None
            elif isinstance(call, Task):
                wanted.update(dict.fromkeys(call.execution_ids))
        self._load([execution_id for execution_id in wanted if execution_id not in self._heads])

    def _load(self, execution_ids: list[str]) -> None:
        for start in range(0, len(execution_ids), _IDS_AT_ONCE):
            some = [store_text(execution_id) for execution_id in execution_ids[start : start + _IDS_AT_ONCE]]
            marks = ",".join("?" * len(some))
            rows = self.connection.execute(
                f"SELECT {_HEAD_COLUMNS} FROM executions WHERE id IN ({marks})", some
            )
            for number, execution_id, flow_id, status, last, fence, pending, in_doubt, wake_at in rows:
                parked = frozenset[str](() if in_doubt is None else decode(in_doubt))
                self._heads[load_text(execution_id)] = Head(
                    number, load_text(flow_id), status, last, fence, bool(pending), parked, wake_at
                )

    def _apply(self, calls: list[Call]) -> list[tuple[Call, Any]]:
        outcomes: list[tuple[Call, Any]] = []
        before: dict[str, Head | None] = {}
        values: list[Any] = []
        for call in calls:
            try:
                if isinstance(call, Task):
                    self._write_appended(before, values)
                    with self.connection:  # a savepoint
                        outcomes.append((call, call.perform(self)))
                    continue
                heads, answer = self._judge(call)
            except LoomError as error:
                outcomes.append((call, error.with_traceback(None)))  # it would hold `outcomes`, a cycle
                continue
            for execution_id, head in heads.items():
                before.setdefault(execution_id, self._heads.get(execution_id))
                self._number_head(execution_id, head)
            self._heads.update(heads)
            if isinstance(call, Append):
                values += self._rows(heads, call.envelopes)
            outcomes.append((call, answer))
        self._write_appended(before, values)
        return outcomes

    def _rows(self, heads: dict[str, Head], events: Sequence[Envelope]) -> list[Any]:
        first = self.position + 1
        self.position += len(events)
        if len(heads) == 1:
            return event_rows(heads[events[0].execution_id].number, first, events)
        values: list[Any] = []
        for position, event in enumerate(events, first):
            values += event_rows(heads[event.execution_id].number, position, (event,))
        return values

    def _write_appended(self, before: dict[str, Head | None], values: list[Any]) -> None:
        """Write what the appends and fences so far amount to, and forget it."""
        if before:
            self.write_events(values)
            self._write_heads(before)
            before.clear()
            values.clear()

    def write_events(self, values: list[Any]) -> None:
        """Insert rows of events, given as `event_rows` gives them."""
        self._write(_INSERT_EVENTS, "", WIDTH, values)

    def write_head(self, execution_id: str, head: Head) -> None:
        """Insert the row of a new execution."""
        self._write(_UPSERT_HEADS, _ON_CHANGE, _HEAD_WIDTH, list(_head_row(execution_id, head)))

    def adopt(self, execution_id: str, head: Head, position: int) -> None:
        """Remember a new execution that a task has written, and the position of its last event."""
        self._heads[execution_id] = head
        self.number = head.number
        self.position = position

    def _judge(self, call: Call) -> tuple[dict[str, Head], int | None]:
        if isinstance(call, Append):
            return admit(self.head, call.envelopes), None
        assert isinstance(call, AcquireFence)
        if call.held is not None and not call.held(self.connection):
            raise LeaseLostError(call.execution_id)
        head = self.head(call.execution_id).copy()
        head.fence = (head.fence or 0) + 1
        return {call.execution_id: head}, head.fence

    def head(self, execution_id: str) -> Head:
        """Where an execution stands. Knows those that this transaction's calls concern."""
        return self._heads.get(execution_id) or Head()

    def existing(self, execution_id: str) -> Head:
        """As `head`. Raises `UnknownExecutionError` for an execution without events."""
        head = self.head(execution_id)
        if head.last_sequence == NO_EVENT:
            raise UnknownExecutionError(execution_id)
        return head

    def _number_head(self, execution_id: str, head: Head) -> None:
        """Give a new execution its number. One that only had a fence gets a new one with its first event:
        numbers order the listing, and a reader of the listing may have passed the old one."""
        known = self._heads.get(execution_id)
        if known is None or (known.status == "" and head.status != ""):
            if known is not None:
                self.connection.execute("DELETE FROM executions WHERE number = ?", (known.number,))
            self.number += 1
            head.number = self.number

    def _write_heads(self, before: dict[str, Head | None]) -> None:
        advanced: list[Any] = []
        changed: list[Any] = []
        for execution_id, old in before.items():
            head = self._heads[execution_id]
            same = (
                old is not None
                and old.number == head.number
                and old.status == head.status
                and old.fence == head.fence
                and old.pending == head.pending
                and old.in_doubt == head.in_doubt
                and old.wake_at == head.wake_at
            )
            values = advanced if same else changed
            values += _head_row(execution_id, head)
            if head.status in END_KIND:
                self._ended.append(execution_id)
        self._write(_UPSERT_HEADS, _ON_ADVANCE, _HEAD_WIDTH, advanced)
        self._write(_UPSERT_HEADS, _ON_CHANGE, _HEAD_WIDTH, changed)

    def _write(self, sql: str, ending: str, width: int, values: list[Any]) -> None:
        rows = len(values) // width
        start = 0
        while start < rows:
            left = rows - start
            size = next((size for size in _ROWS_AT_ONCE if size <= left), left)
            some = values if size == rows else values[start * width : (start + size) * width]
            self.connection.execute(_statement(sql, ending, width, size), some)
            start += size


@cache
def _statement(sql: str, ending: str, width: int, rows: int) -> str:
    mark = "(" + ",".join("?" * width) + ")"
    return sql + ",".join([mark] * rows) + ending


def _head_row(execution_id: str, head: Head) -> tuple[Any, ...]:
    """A row of `_HEAD_COLUMNS`."""
    return (
        head.number,
        store_text(execution_id),
        store_text(head.flow_id),
        head.status,
        head.last_sequence,
        head.fence,
        head.pending,
        encode(sorted(head.in_doubt)) if head.in_doubt else None,
        head.wake_at,
    )
