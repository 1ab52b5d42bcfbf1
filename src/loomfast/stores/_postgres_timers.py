"""What a PostgreSQL store keeps for timers.

What lives here: `PostgresTimerStore`. What must not: logs. When an execution's gate wakes by itself stands in
its head (`executions.wake_at`), written by the append that opens or closes the gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loomfast.stores._postgres_rows import key_and_long, key_of, load_text, store_text
from loomfast.stores._spi_arguments import bounded, limit_of
from loomfast.stores._spi_timers import (
    ScheduleRow,
    ScheduleRows,
    TimerStore,
    Wake,
    check_schedule,
    due_mark,
    wake_mark,
)

if TYPE_CHECKING:
    from loomfast.stores._postgres import PostgresEventStore

_NUMBER: Final = "SELECT number FROM executions WHERE key = $1"
_WAKES: Final = (
    "SELECT coalesce(long_id, key), wake_at FROM executions"
    " WHERE wake_at <= $1 AND (wake_at, number) > ($2, $3) ORDER BY wake_at, number LIMIT $4"
)
_COLUMNS: Final = "coalesce(long_id, key), body, next_ms, version"
_DUE: Final = (
    f"SELECT {_COLUMNS} FROM schedules WHERE next_ms <= $1 AND (next_ms, coalesce(long_id, key)) > ($2, $3)"
    " ORDER BY next_ms, coalesce(long_id, key) LIMIT $4"
)
_INSERT: Final = (
    "INSERT INTO schedules (key, long_id, body, next_ms, version)"
    " VALUES ($1, $2, $3, $4, nextval('schedule_versions')) ON CONFLICT (key) DO NOTHING RETURNING version"
)
_UPDATE: Final = (
    "UPDATE schedules SET body = $2, next_ms = $3, version = nextval('schedule_versions')"
    " WHERE key = $1 AND version = $4 RETURNING version"
)
_GET: Final = f"SELECT {_COLUMNS} FROM schedules WHERE key = $1"
_DELETE: Final = "DELETE FROM schedules WHERE key = $1 RETURNING true"
_LIST: Final = (
    f"SELECT {_COLUMNS} FROM schedules WHERE coalesce(long_id, key) > $1"
    " ORDER BY coalesce(long_id, key) LIMIT $2"
)


class PostgresTimerStore(TimerStore):
    """Due gates and schedules in the schema of a `PostgresEventStore`."""

    def __init__(self, store: PostgresEventStore) -> None:
        """Not for callers: use `store.timers`."""
        self._store = store

    async def due_wakes(self, at_ms: int, *, after: Wake | None = None, limit: int = 100) -> list[Wake]:
        at_ms, limit, mark = bounded("at_ms", at_ms), limit_of(limit), wake_mark(after)
        number: Any = 0
        if after is not None:
            number = await self._store._read(
                mark.execution_id,
                lambda connection: connection.fetchval(_NUMBER, key_of(mark.execution_id)),
            )
        rows = await self._read(_WAKES, at_ms, mark.wake_at, number or 0, limit)
        return [Wake(load_text(execution_id), wake_at) for execution_id, wake_at in rows]

    async def due_schedules(
        self, at_ms: int, *, after: ScheduleRow | None = None, limit: int = 100
    ) -> ScheduleRows:
        next_ms, schedule_id = due_mark(after)
        rows = await self._read(
            _DUE, bounded("at_ms", at_ms), next_ms, store_text(schedule_id), limit_of(limit)
        )
        return [_schedule(row) for row in rows]

    async def put(self, schedule: ScheduleRow) -> ScheduleRow | None:
        check_schedule(schedule)
        key, long_id = key_and_long(schedule.schedule_id)
        if schedule.version == 0:
            version = await self._write(_INSERT, key, long_id, schedule.body, schedule.next_ms)
        else:
            version = await self._write(_UPDATE, key, schedule.body, schedule.next_ms, schedule.version)
        return None if version is None else schedule._replace(version=version)

    async def get(self, schedule_id: str) -> ScheduleRow | None:
        rows = await self._read(_GET, key_of(schedule_id))
        return _schedule(rows[0]) if rows else None

    async def delete(self, schedule_id: str) -> bool:
        return bool(await self._write(_DELETE, key_of(schedule_id)))

    async def list(self, *, after: str = "", limit: int = 100) -> ScheduleRows:
        return [_schedule(row) for row in await self._read(_LIST, store_text(after), limit_of(limit))]

    async def _read(self, sql: str, *arguments: object) -> Any:
        return await self._store._read(None, lambda connection: connection.fetch(sql, *arguments))

    async def _write(self, sql: str, *arguments: object) -> Any:
        return await self._store._write(None, lambda connection: connection.fetchval(sql, *arguments))


def _schedule(row: Any) -> ScheduleRow:
    schedule_id, body, next_ms, version = row
    return ScheduleRow(load_text(schedule_id), body, next_ms, version)
