"""Closing a runtime: what runs may finish, what cannot is stopped, and none of it becomes an outcome.

What lives here: `Closing`. What must not: anything that ends an execution.

In order: no effect begins any more; effects that run finish, as far as the grace goes, and their outcomes are
recorded; the rest is cancelled without an outcome; the journals are drained; what was running is marked as
stopped in order; leases are given back. Whoever takes over from here finds no driver and no crash.

The bounds are real seconds of the event loop, not of the runtime's clock: a clock that stands still must not
keep a process from ending.
"""

from __future__ import annotations

import asyncio

from loomfast._events import RUNNING
from loomfast._runtime.driven import DrivenExecutions
from loomfast._runtime.execution import STOP_S
from loomfast._runtime.history import History
from loomfast._runtime.recovering import Recovering

# How long, in seconds, a call from outside, or a snapshot, that has begun may take to become whole.
CALLS_S = 30.0


class Closing:
    """Closes a runtime, once."""

    def __init__(self, driven: DrivenExecutions, recovering: Recovering, history: History) -> None:
        self._driven = driven
        self._recovering = recovering
        self._history = history
        self._task: asyncio.Task[None] | None = None

    async def close(self, grace_s: float) -> None:
        """See `WorkflowRuntime.close`."""
        if self._task is None:
            self._driven.deps.closing.begun = True
            self._task = asyncio.get_running_loop().create_task(self._close(grace_s))
        await asyncio.shield(self._task)

    async def _close(self, grace_s: float) -> None:
        driven = self._driven
        stopped = tuple(driven.executions.values())
        for live in stopped:
            live.wind_down()
        await asyncio.gather(*(live.unwound(grace_s) for live in stopped if live.busy))
        await asyncio.gather(*(live.stop(STOP_S) for live in stopped))
        unfinished = {*driven.calls, *self._history.snapshots_due}
        if unfinished:
            await asyncio.wait(unfinished, timeout=CALLS_S)
        journals = [live.journal for live in stopped] + driven.refused
        running = [
            journal for journal in journals if journal.failure is None and journal.state.status == RUNNING
        ]
        await asyncio.gather(*(self._recovering.mark_stopped(journal) for journal in running))
        if driven.leases is not None:
            await driven.leases.close()
