"""`TimerService`: sleeps and gate timeouts wake on time, and schedules start executions.

What lives here: the service. What must not: how due work is found (`due`), how an occurrence starts once
(`occurrences`), when one is due (`_core/schedules.py`), changing schedules (`schedules`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from loomfast._errors import BadInputError, GateRefusedError, LeaseHeldError, UnknownScheduleError
from loomfast._kernels import State
from loomfast._nodes.due import DueLoop
from loomfast._nodes.occurrences import start_due, start_occurrence
from loomfast._nodes.schedules import Schedules
from loomfast._runtime.leases import LeaseKeeper
from loomfast._runtime.runtime import WorkflowRuntime
from loomfast.stores import LeaseStore, ScheduleRow


class TimerService:
    """Wakes what sleeps in a runtime's store, and starts what its schedules call for.

    Any number of processes may run one over the same store. A due gate is passed once whatever happens; what
    differs is what becomes of the effects behind it when two fire at once. With a runtime that has leases
    (`lease_ttl_s`), or with `leases` here where it has none, a node that cannot claim a wake leaves it alone:
    each wake is driven once. Without, the node that comes second is refused, and with `fenced` it may fence
    out the first in the middle of its run: at least once per wake (ADR 0103, open residual). A start is never
    fenced, and an occurrence starts once in every mode.

    `leases` given here may be kept anywhere, so the runtime's store cannot ask for them: a node that freezes
    between its claim and a fence may still fence out who claimed next. The runtime's own are the stronger.

    `poll_s`: how often the store is looked at for what other processes have parked; what is parked here wakes
    at its time. `concurrency`: how many wakes and schedules are seen to at a time. `on_error` is called with
    the id of an execution or schedule, and what kept it from going on; it is tried again after a pause.

    Use it as an async context manager, once and within the runtime's; or call `tick` when something may be
    due. `schedules` are the store's.
    """

    def __init__(
        self,
        runtime: WorkflowRuntime,
        *,
        fenced: bool = False,
        leases: LeaseStore | None = None,
        lease_ttl_s: float = 30.0,
        poll_s: float = 1.0,
        concurrency: int = 64,
        on_error: Callable[[str, Exception], object] = lambda key, error: None,
    ) -> None:
        self._runtime = runtime
        self._fenced = fenced
        self._keeper: LeaseKeeper | None = None
        if leases is not None:
            if runtime.leased:
                raise BadInputError("the runtime holds leases of its own: leave out the service's")
            self._keeper = LeaseKeeper(leases, runtime.clock, runtime.entropy, lease_ttl_s)
        self._loop = DueLoop(
            runtime.store.timers,
            runtime.clock,
            lambda wake: self.fire(wake.execution_id),
            self._start_due,
            poll_s=poll_s,
            concurrency=concurrency,
            on_error=on_error,
        )
        self.schedules = Schedules(runtime, changed=self._loop.expect)
        self._unhear = runtime.on_rest(self._rested)
        self._running: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def fire(self, execution_id: str) -> bool:
        """Pass the due gate of an execution and drive it on; False if another node is about it or was first.

        With leases it is claimed before, and given back once it rests. Raises as `WorkflowRuntime.fire`.
        """
        keeper = None if self._runtime.drives(execution_id) else self._keeper
        held = None
        if keeper is not None:
            held = await keeper.take(execution_id)
            if held is None:
                return False
        try:
            await self._runtime.fire(execution_id, fenced=self._fenced)
        except (GateRefusedError, LeaseHeldError):
            return False
        finally:
            if keeper is not None and held is not None and not self._runtime.drives(execution_id):
                keeper.give_back(held)
        return True

    async def start_occurrence(self, schedule_id: str, at_ms: int) -> bool:
        """Start the occurrence of a schedule at a nominal time (ms); False if it has been, on any node.

        It needs not be one that the trigger names: so a run is made by hand, or a past one made up for.
        Raises `UnknownScheduleError`, otherwise as `WorkflowRuntime.start`.
        """
        schedule = await self.schedules.get(schedule_id)
        if schedule is None:
            raise UnknownScheduleError(schedule_id)
        return await start_occurrence(self._runtime, schedule, at_ms)

    async def tick(self) -> None:
        """Do all that is due now, and return once each gate is passed and each start durable.

        Raises what reading the store raises.
        """
        await self._loop.look()
        await self._loop.finish()

    async def close(self) -> None:
        """Begin nothing more, and wait for what has begun. What is due later stays in the store.

        What was driven on goes on, in the runtime. A repeat waits for the first call. Cancelling the caller
        does not stop it.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))
        await self._loop.finish()
        self._unhear()
        if self._keeper is not None:
            await self._keeper.close()

    async def __aenter__(self) -> Self:
        if self._running is not None or self._closing is not None:
            raise BadInputError("a timer service is entered once: make another")
        self._running = asyncio.get_running_loop().create_task(self._loop.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # --- what the loop asks for ------------------------------------------------------------------

    async def _start_due(self, row: ScheduleRow) -> None:
        next_ms = await start_due(self._runtime, row)
        if next_ms is not None:
            self._loop.expect(next_ms)

    def _rested(self, execution_id: str, state: State | None) -> None:
        if self._keeper is not None:
            self._keeper.give_back_of(execution_id)
        self._loop.expect_wake(state)
