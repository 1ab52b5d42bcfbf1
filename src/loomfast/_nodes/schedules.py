"""The schedules of a store: made, looked at, changed, paused and taken away.

What lives here: `Schedules`. What must not: when a schedule is due (`_core/schedules.py`), starting what is
(`occurrences`).

Every change replaces the version it was made from, and looks again when somebody else was first, so that of
two changes neither is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loomfast._core import schema
from loomfast._core.arguments import text_argument
from loomfast._core.definitions import FlowDefinition, FlowFunction
from loomfast._core.schedules import CatchUp, ScheduleDefinition, Trigger
from loomfast._errors import UnknownFlowError, UnknownScheduleError
from loomfast._kernels import decode, encode
from loomfast._runtime.runtime import WorkflowRuntime
from loomfast.stores import ScheduleRow


class Schedules:
    """The schedules of a runtime's store. `changed` is called with when one that was changed is due next."""

    def __init__(
        self, runtime: WorkflowRuntime, *, changed: Callable[[int], object] = lambda at_ms: None
    ) -> None:
        self._runtime = runtime
        self._timers = runtime.store.timers
        self._changed = changed

    async def put(
        self,
        schedule_id: str,
        flow: FlowDefinition | FlowFunction | str,
        input: Any = None,
        *,
        trigger: Trigger,
        catch_up: CatchUp = "latest",
        grace_s: float = 60.0,
    ) -> ScheduleDefinition:
        """Make a schedule, or change the one of this id, and return it as it is now.

        `flow` may be the id of one that only other processes know. Said again as it is, it changes nothing,
        so a program may put its schedules whenever it starts. A schedule that is new, or has another trigger
        now, is due next at its first occurrence from now on; otherwise it goes on where it was, and one that
        is paused stays so. Raises `BadInputError`, `InputValidationError`, `JsonFormError`, `StorageError`.
        """
        text_argument("schedule_id", schedule_id)
        flow_id = flow if isinstance(flow, str) else self._runtime.register(flow).id
        given = decode(encode(input))
        self._check_input(flow_id, given)

        def changed(old: ScheduleDefinition | None) -> ScheduleDefinition:
            new = ScheduleDefinition(
                schedule_id=schedule_id,
                flow_id=flow_id,
                input=given,
                trigger=trigger,
                catch_up=catch_up,
                grace_s=grace_s,
                next_ms=None,
                paused=old is not None and old.paused,
            )
            if old is not None and old.trigger == trigger:
                return replace(new, next_ms=old.next_ms)
            return new if new.paused else self._from_now(new)

        return await self._change(schedule_id, changed)

    async def get(self, schedule_id: str) -> ScheduleDefinition | None:
        """Return a schedule, or None. Raises `StorageError`."""
        row = await self._timers.get(schedule_id)
        return None if row is None else definition_of(row)

    async def list(self, *, after: str = "", limit: int = 100) -> list[ScheduleDefinition]:
        """Return at most `limit` schedules, by their ids, behind `after`. Raises `StorageError`."""
        return [definition_of(row) for row in await self._timers.list(after=after, limit=limit)]

    async def pause(self, schedule_id: str) -> ScheduleDefinition:
        """Let a schedule start nothing until `resume`. A repeat changes nothing.

        What has been started goes on. Raises `UnknownScheduleError`, `StorageError`.
        """
        return await self._change(schedule_id, lambda old: _paused(_known(schedule_id, old)))

    async def resume(self, schedule_id: str) -> ScheduleDefinition:
        """Let a paused schedule go on at its first occurrence from now on. A repeat changes nothing.

        What would have been due while it was paused is not made up for. Raises as `pause`.
        """

        def changed(old: ScheduleDefinition | None) -> ScheduleDefinition:
            known = _known(schedule_id, old)
            return self._from_now(replace(known, paused=False)) if known.paused else known

        return await self._change(schedule_id, changed)

    async def delete(self, schedule_id: str) -> bool:
        """Take a schedule away, and tell whether there was one. What it has started goes on."""
        return await self._timers.delete(schedule_id)

    async def _change(
        self, schedule_id: str, change: Callable[[ScheduleDefinition | None], ScheduleDefinition]
    ) -> ScheduleDefinition:
        while True:
            row = await self._timers.get(schedule_id)
            new = change(None if row is None else definition_of(row))
            wanted = ScheduleRow(schedule_id, new.to_body(), new.next_ms, 0 if row is None else row.version)
            if wanted == row:
                return definition_of(row)
            kept = await self._timers.put(wanted)
            if kept is not None:
                if kept.next_ms is not None:
                    self._changed(kept.next_ms)
                return definition_of(kept)

    def _from_now(self, schedule: ScheduleDefinition) -> ScheduleDefinition:
        return replace(schedule, next_ms=schedule.after(self._runtime.clock.now_ms()))

    def _check_input(self, flow_id: str, given: Any) -> None:
        try:
            flow = self._runtime.flow(flow_id)
        except UnknownFlowError:
            return  # another process's; a start checks it again
        if flow.input is not None:
            schema.check(flow.input, given, f"input of flow {flow_id!r}")


def definition_of(row: ScheduleRow) -> ScheduleDefinition:
    """Return the schedule that a store keeps. Raises `StoreReadError`."""
    return ScheduleDefinition.from_body(row.schedule_id, row.body, row.next_ms, row.version)


def _paused(schedule: ScheduleDefinition) -> ScheduleDefinition:
    return replace(schedule, paused=True, next_ms=None)


def _known(schedule_id: str, schedule: ScheduleDefinition | None) -> ScheduleDefinition:
    if schedule is None:
        raise UnknownScheduleError(schedule_id)
    return schedule
