"""What a memory store keeps for timers.

What lives here: `MemoryTimerStore`. What must not: logs. Invariant: everything happens under the lock that it
shares with the event store, which tells it by `follow` where an execution's gate stands.

Gates stand in `_order` by time, so that what is due is at its front; `_wakes` says where an execution stands.
"""

from __future__ import annotations

from bisect import bisect_right, insort

from loomfast.stores._memory_shared import Shared
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


class MemoryTimerStore(TimerStore):
    """Keeps schedules until the process ends. Every call completes without waiting."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._wakes: dict[str, int] = {}
        self._order: list[tuple[int, int, str]] = []  # time, number of the execution, its id
        self._schedules: dict[str, ScheduleRow] = {}
        self._version = 0  # the newest of all schedules

    def follow(self, execution_id: str, number: int, wake_at: int | None) -> None:
        """Take note of when an execution's gate wakes by itself. Called with the lock held."""
        known = self._wakes.get(execution_id)
        if known == wake_at:
            return
        if known is not None:
            del self._wakes[execution_id]
            entry = (known, number, execution_id)
            del self._order[bisect_right(self._order, entry) - 1]
        if wake_at is not None:
            self._wakes[execution_id] = wake_at
            insort(self._order, (wake_at, number, execution_id))

    async def due_wakes(self, at_ms: int, *, after: Wake | None = None, limit: int = 100) -> list[Wake]:
        at_ms, limit, mark = bounded("at_ms", at_ms), limit_of(limit), wake_mark(after)
        with self._shared.lock:
            self._shared.check_open()
            number = self._shared.head(mark.execution_id).number
            first = bisect_right(self._order, (mark.wake_at, number, mark.execution_id))
            found = self._order[first : first + limit]
        return [Wake(execution_id, wake_at) for wake_at, _, execution_id in found if wake_at <= at_ms]

    async def due_schedules(
        self, at_ms: int, *, after: ScheduleRow | None = None, limit: int = 100
    ) -> ScheduleRows:
        at_ms, limit, mark = bounded("at_ms", at_ms), limit_of(limit), due_mark(after)
        with self._shared.lock:
            self._shared.check_open()
            due = sorted(
                ((schedule.next_ms, schedule.schedule_id), schedule)
                for schedule in self._schedules.values()
                if schedule.next_ms is not None and schedule.next_ms <= at_ms
            )
        return [schedule for place, schedule in due if place > mark][:limit]

    async def put(self, schedule: ScheduleRow) -> ScheduleRow | None:
        check_schedule(schedule)
        with self._shared.lock:
            self._shared.check_open()
            known = self._schedules.get(schedule.schedule_id)
            if schedule.version != (0 if known is None else known.version):
                return None
            self._version += 1
            kept = self._schedules[schedule.schedule_id] = schedule._replace(version=self._version)
            return kept

    async def get(self, schedule_id: str) -> ScheduleRow | None:
        with self._shared.lock:
            self._shared.check_open(schedule_id)
            return self._schedules.get(schedule_id)

    async def delete(self, schedule_id: str) -> bool:
        with self._shared.lock:
            self._shared.check_open(schedule_id)
            return self._schedules.pop(schedule_id, None) is not None

    async def list(self, *, after: str = "", limit: int = 100) -> ScheduleRows:
        limit = limit_of(limit)
        with self._shared.lock:
            self._shared.check_open(after)
            ids = sorted(schedule_id for schedule_id in self._schedules if schedule_id > after)
            return [self._schedules[schedule_id] for schedule_id in ids[:limit]]
