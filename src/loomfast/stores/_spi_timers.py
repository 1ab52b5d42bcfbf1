"""The contract of what every event store keeps for timers: what is due, and the schedules that start things.

What lives here: `TimerStore` and the values its methods return. What must not: what a schedule means, or
what "now" is (the timer service).

The guarantees go on from those of `_spi_recoveries.py`:

23. A gate with a `wakeAt` is in `due_wakes` from when its suspension is durable until its answer, or the end
    of its execution, is. Nothing else is, and the cost does not depend on how many executions are parked.
24. What `put` and `delete` returned is durable as an append is. Of two that replace the same version of a
    schedule, one succeeds; and no version of an id is ever given twice, whatever was deleted in between: who
    read one replaces that one, or nothing. `due_schedules` is paged, so that no number of schedules that
    cannot be started hides those behind them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, TypeAlias

from loomfast._errors import BadInputError
from loomfast.stores._spi_arguments import FIRST, bounded, check_kept, check_texts


class Wake(NamedTuple):
    """An execution that is parked at a gate until `wake_at` (ms since the epoch) at the latest."""

    execution_id: str
    wake_at: int


class ScheduleRow(NamedTuple):
    """A schedule as a store keeps it.

    `body` is its definition, in JSON; `next_ms` when it is next due, None while it is paused. `version` is
    newer with every change: 0 for one that has not been put yet.
    """

    schedule_id: str
    body: bytes
    next_ms: int | None
    version: int = 0


ScheduleRows: TypeAlias = list[ScheduleRow]


class TimerStore(ABC):
    """Due gates by time, and schedules by id."""

    @abstractmethod
    async def due_wakes(self, at_ms: int, *, after: Wake | None = None, limit: int = 100) -> list[Wake]:
        """Return at most `limit` gates whose `wake_at` is not beyond `at_ms`, earliest first, behind `after`.

        Those of one time stand in the order of the listing of executions. Raises `BadInputError` for a limit
        below 1.
        """

    @abstractmethod
    async def due_schedules(
        self, at_ms: int, *, after: ScheduleRow | None = None, limit: int = 100
    ) -> ScheduleRows:
        """Return at most `limit` schedules whose `next_ms` is not beyond `at_ms`, earliest first.

        Those of one time stand in the order of their ids (by code point). The page begins behind `after` as
        it was when it was read, also where it has changed or gone since. Raises
        `BadInputError` for a limit below 1 and for a paused `after`.
        """

    @abstractmethod
    async def put(self, schedule: ScheduleRow) -> ScheduleRow | None:
        """Keep a schedule in place of the one of its version, and return it as it is now.

        None, with nothing written, if there is another version of it by now: 0 stands for no schedule. Raises
        `BadInputError` for an empty id, and as `EventStore.append` for failing storage.
        """

    @abstractmethod
    async def get(self, schedule_id: str) -> ScheduleRow | None:
        """Return a schedule, or None."""

    @abstractmethod
    async def delete(self, schedule_id: str) -> bool:
        """Forget a schedule; tell whether there was one."""

    @abstractmethod
    async def list(self, *, after: str = "", limit: int = 100) -> ScheduleRows:
        """Return at most `limit` schedules in the order of their ids (by code point), behind `after`."""


def wake_mark(after: Wake | None) -> Wake:
    """Behind which gate a page begins. Raises `BadInputError`."""
    if after is None:
        return Wake("", FIRST)
    check_texts(after.execution_id)
    return after._replace(wake_at=bounded("wake_at", after.wake_at))


def due_mark(after: ScheduleRow | None) -> tuple[int, str]:
    """Behind which time and schedule a page begins. Raises `BadInputError`, also for a paused one."""
    if after is None:
        return FIRST, ""
    check_texts(after.schedule_id)
    if after.next_ms is None:
        raise BadInputError(f"after={after.schedule_id!r}: a schedule that is paused is never due")
    return bounded("next_ms", after.next_ms), after.schedule_id


def check_schedule(schedule: ScheduleRow) -> None:
    """Refuse a schedule that no store takes. Raises `BadInputError`."""
    check_texts(schedule.schedule_id)
    if not schedule.schedule_id:
        raise BadInputError("a schedule needs an id that is not empty")
    if not isinstance(schedule.body, bytes):
        raise BadInputError(f"schedule {schedule.schedule_id!r}: its body must be JSON, as bytes")
    if schedule.next_ms is not None:
        check_kept("next_ms", schedule.next_ms)
    check_kept("version", schedule.version)
