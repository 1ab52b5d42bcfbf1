"""What a SQLite store keeps for timers.

What lives here: `SqliteTimerStore`, the tasks that write schedules, and the queries that read what is due.
What must not: events. When an execution's gate wakes stands in its head, which every append writes.

A partial index holds the gates that have a time, in order, so what is due is at its front.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import apsw

from loomfast.stores._spi_arguments import bounded, check_texts, limit_of
from loomfast.stores._spi_timers import (
    ScheduleRow,
    ScheduleRows,
    TimerStore,
    Wake,
    check_schedule,
    due_mark,
    wake_mark,
)
from loomfast.stores._sqlite_rows import load_text, store_text
from loomfast.stores._sqlite_writer import Ledger, Task

if TYPE_CHECKING:
    from loomfast.stores._sqlite import SqliteEventStore

# Behind a wake: those of its time, and those of later ones. Each half is a range of the index, and is read as
# far as the page goes. A comparison of rows would walk over all of that time that stand before the page.
_WAKES: Final = (
    "SELECT id, wake_at, number FROM executions WHERE wake_at = ?2 AND wake_at <= ?1"
    " AND number > ifnull((SELECT number FROM executions WHERE id = ?3), 0)"
    " UNION ALL SELECT id, wake_at, number FROM executions WHERE wake_at > ?2 AND wake_at <= ?1"
    " ORDER BY wake_at, number LIMIT ?4"
)
_SCHEDULE: Final = "SELECT id, body, next_ms, version FROM schedules WHERE "
_DUE: Final = (
    _SCHEDULE + "next_ms IS NOT NULL AND next_ms <= ? AND (next_ms, id) > (?, ?) ORDER BY next_ms, id LIMIT ?"
)
_ONE: Final = _SCHEDULE + "id = ?"
_LIST: Final = _SCHEDULE + "id > ? ORDER BY id LIMIT ?"
_REPLACE: Final = "INSERT OR REPLACE INTO schedules (id, body, next_ms) VALUES (?, ?, ?)"


class SqliteTimerStore(TimerStore):
    """Due gates and schedules in the database of a `SqliteEventStore`, written by its writer thread."""

    def __init__(self, store: SqliteEventStore) -> None:
        """Not for callers: use `store.timers`."""
        self._store = store

    async def due_wakes(self, at_ms: int, *, after: Wake | None = None, limit: int = 100) -> list[Wake]:
        query = partial(
            read_wakes, at_ms=bounded("at_ms", at_ms), mark=wake_mark(after), limit=limit_of(limit)
        )
        wakes: list[Wake] = await self._store._read(None, query)
        return wakes

    async def due_schedules(
        self, at_ms: int, *, after: ScheduleRow | None = None, limit: int = 100
    ) -> ScheduleRows:
        next_ms, schedule_id = due_mark(after)
        return await self._schedules(
            _DUE, bounded("at_ms", at_ms), next_ms, _key(schedule_id), limit_of(limit)
        )

    async def put(self, schedule: ScheduleRow) -> ScheduleRow | None:
        check_schedule(schedule)
        kept: ScheduleRow | None = await self._store._write(None, PutSchedule(schedule))
        return kept

    async def get(self, schedule_id: str) -> ScheduleRow | None:
        found = await self._schedules(_ONE, _key(schedule_id))
        return found[0] if found else None

    async def delete(self, schedule_id: str) -> bool:
        there: bool = await self._store._write(None, DeleteSchedule(schedule_id))
        return there

    async def list(self, *, after: str = "", limit: int = 100) -> ScheduleRows:
        return await self._schedules(_LIST, _key(after), limit_of(limit))

    async def _schedules(self, sql: str, *values: int | bytes) -> ScheduleRows:
        schedules: ScheduleRows = await self._store._read(
            None, partial(read_schedules, sql=sql, values=values)
        )
        return schedules


class PutSchedule(Task):
    """Keep a schedule in place of the one of its version; answered with it, or with None."""

    __slots__ = ("schedule",)

    def __init__(self, schedule: ScheduleRow) -> None:
        super().__init__()
        self.schedule = schedule

    def perform(self, ledger: Ledger) -> ScheduleRow | None:
        schedule = self.schedule
        key = _key(schedule.schedule_id)
        known = read_schedules(ledger.connection, _ONE, (key,))
        if schedule.version != (known[0].version if known else 0):
            return None
        ledger.connection.execute(_REPLACE, (key, schedule.body, schedule.next_ms))
        return schedule._replace(version=ledger.connection.last_insert_rowid())


class DeleteSchedule(Task):
    """Forget a schedule; answered with whether there was one."""

    __slots__ = ("schedule_id",)

    def __init__(self, schedule_id: str) -> None:
        check_texts(schedule_id)
        super().__init__()
        self.schedule_id = schedule_id

    def perform(self, ledger: Ledger) -> bool:
        ledger.connection.execute("DELETE FROM schedules WHERE id = ?", (_key(self.schedule_id),))
        return ledger.connection.changes() > 0


def read_wakes(connection: apsw.Connection, at_ms: int, mark: Wake, limit: int) -> list[Wake]:
    rows = connection.execute(_WAKES, (at_ms, mark.wake_at, store_text(mark.execution_id), limit))
    return [Wake(load_text(stored_id), stored_at) for stored_id, stored_at, _ in rows]


def read_schedules(connection: apsw.Connection, sql: str, values: tuple[int | bytes, ...]) -> ScheduleRows:
    rows: Any = connection.execute(sql, values)
    return [
        ScheduleRow(schedule_id.decode("utf-8", "surrogatepass"), body, next_ms, version)
        for schedule_id, body, next_ms, version in rows
    ]


def _key(schedule_id: str) -> bytes:
    """The form of an id that sorts by code point, whatever it holds. Raises `BadInputError`."""
    check_texts(schedule_id)
    return schedule_id.encode("utf-8", "surrogatepass")
