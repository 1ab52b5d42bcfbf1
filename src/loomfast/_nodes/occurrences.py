"""The due occurrences of a schedule, started once over all nodes.

What lives here: starting one occurrence, and all that are due. What must not: when an occurrence is due, and
which are made up for (`_core/schedules.py`); how many may run (`limits`).

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
from loomfast._nodes.limits import Slots
from loomfast._nodes.schedules import definition_of
from loomfast._runtime.runtime import WorkflowRuntime
from loomfast.stores import ScheduleRow


async def start_occurrence(runtime: WorkflowRuntime, schedule: ScheduleDefinition, at_ms: int) -> bool:
    """Start an occurrence; False if it has been, here or elsewhere. Raises as `WorkflowRuntime.start`."""
    execution_id = occurrence_id(schedule.schedule_id, at_ms)
    if await runtime.load_state(execution_id) is not None:
        return False
    try:
        flow = runtime.flow(schedule.flow_id)
        await runtime.start(flow, schedule.input, execution_id=execution_id)
    except ExecutionAlreadyExistsError:
        return False
    return True


async def start_due(
    runtime: WorkflowRuntime, row: ScheduleRow, slots: Slots | None = None, tenant: str | None = None
) -> int | None:
    """Start what is due of a schedule, oldest first, and return its mark; None if it moved without us.

    With `slots`, each start takes one of the tenant's; where there is none, the mark stays before what was
    not started. Raises what reading the definition and starting raise.
    """
    now_ms = runtime.clock.now_ms()
    schedule = definition_of(row)
    due = schedule.due(now_ms)
    if not due and row.next_ms is not None and row.next_ms <= now_ms:
        # What was missed is not made up for.
        moved = await runtime.store.timers.put(row._replace(next_ms=schedule.after(now_ms)))
        return None if moved is None else moved.next_ms
    for at_ms in due:
        if slots is None:
            await start_occurrence(runtime, schedule, at_ms)
        elif not await _start_in_slot(runtime, schedule, at_ms, slots, tenant):
            return row.next_ms
        moved = await runtime.store.timers.put(row._replace(next_ms=schedule.after(at_ms)))
        if moved is None:  # another node was first, or an edit
            return None
        row = moved
    return row.next_ms


async def _start_in_slot(
    runtime: WorkflowRuntime, schedule: ScheduleDefinition, at_ms: int, slots: Slots, tenant: str | None
) -> bool:
    """See to it that an occurrence is started; False if there is no room for it."""
    execution_id = occurrence_id(schedule.schedule_id, at_ms)
    if runtime.drives(execution_id):
        return True
    if not slots.take(execution_id, schedule.flow_id, tenant):
        return False
    try:
        await start_occurrence(runtime, schedule, at_ms)
    finally:
        if not runtime.drives(execution_id):
            slots.give_back(execution_id, tenant)
    return True
