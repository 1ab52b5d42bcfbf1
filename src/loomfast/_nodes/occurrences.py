"""The due occurrences of a schedule, started once over all nodes.

What lives here: `Occurrences`. What must not: when an occurrence is due, and which are made up for
(`_core/schedules.py`); how many may run (`limits`).

Theory of operation
-------------------
An occurrence is an execution whose id is chosen, `<scheduleId>@<occurrence>`, so `start` is start-once: of
nodes that start the same one, the store lets one through before any body runs, and the others are refused
(ADR 0103, D1 and D4). That is why no node needs to own a schedule, and why a start is not fenced: a token
would protect nothing, and would stop the winner (L12).

The *mark*, `next_ms`, is the earliest occurrence that may not have been started. It moves once sequence 0 of
the occurrence is durable, so a process that dies in between starts it again, and is refused:

    mark 02:30 → start "nightly@…02:30" → its EXECUTION_STARTED is durable → mark = the one after
                                         ↑ dies here: the next node is refused, and moves the mark

It moves by comparing versions: whoever comes second, or behind an edit, moves nothing.
"""

from __future__ import annotations

from loomfast._core.schedules import ScheduleDefinition, occurrence_id
from loomfast._errors import ExecutionAlreadyExistsError
from loomfast._nodes.limits import Room
from loomfast._runtime.runtime import WorkflowRuntime
from loomfast.stores import Schedule


class Occurrences:
    """Starts occurrences in one runtime."""

    def __init__(self, runtime: WorkflowRuntime, room: Room | None = None) -> None:
        self._runtime = runtime
        self._room = room
        self._timers = runtime.store.timers

    async def start(self, schedule: ScheduleDefinition, at_ms: int) -> bool:
        """Start an occurrence; False if it has been, here or elsewhere. Raises as `WorkflowRuntime.start`."""
        execution_id = occurrence_id(schedule.schedule_id, at_ms)
        if await self._runtime.load_state(execution_id) is not None:
            return False
        try:
            flow = self._runtime.flow(schedule.flow_id)
            await self._runtime.start(flow, schedule.input, execution_id=execution_id)
        except ExecutionAlreadyExistsError:
            return False
        return True

    async def start_due(self, row: Schedule, now_ms: int) -> int | None:
        """Start what is due of a schedule, oldest first, and return its mark; None if it moved without us.

        Where there is no room, the mark stays before what was not started. Raises what reading the definition
        and starting raise.
        """
        schedule = ScheduleDefinition.from_body(row.schedule_id, row.body, row.next_ms, row.version)
        due = schedule.due(now_ms)
        if not due and row.next_ms is not None and row.next_ms <= now_ms:
            # What was missed is not made up for.
            moved = await self._timers.put(row._replace(next_ms=schedule.after(now_ms)))
            return None if moved is None else moved.next_ms
        for at_ms in due:
            if not await self._started(schedule, at_ms):
                return row.next_ms
            moved = await self._timers.put(row._replace(next_ms=schedule.after(at_ms)))
            if moved is None:  # another node was first, or an edit
                return None
            row = moved
        return row.next_ms

    async def _started(self, schedule: ScheduleDefinition, at_ms: int) -> bool:
        """See to it that an occurrence is started; False if there is no room for it."""
        if self._room is None:
            await self.start(schedule, at_ms)
            return True
        execution_id = occurrence_id(schedule.schedule_id, at_ms)
        if self._runtime.drives(execution_id):
            return True
        if not self._room.take(execution_id, schedule.flow_id):
            return False
        try:
            await self.start(schedule, at_ms)
        finally:
            if not self._runtime.drives(execution_id):
                self._room.give_back(execution_id)
        return True
