"""Executions that are running and that nobody drives, taken up.

What lives here: `Claims`. What must not: how one is taken up (`WorkflowRuntime.recover`), and what else a
worker does.

Theory of operation
-------------------
An execution that is `running` without a lease on it has lost its driver: the process died and the lease ran
out, or it was closed and gave the lease back. A sweep reads what is running, a page at a time, asks once for
each page which of them are leased, and claims the others as far as there is room. The claim is the lease's
acquisition; of two workers that see the same, one gets it. A sweep costs two questions a page, and writes
only for what it claims.

Where there is no room at all the sweep stops, and goes on from there once there is; so none is passed over
for ever for standing far behind. What is due is quicker to take a slot than a sweep is, so one is kept for
the next sweep whenever a sweep could take up nothing. One of a flow or a tenant that has its limit is passed
over; there is another sweep once any slot is given back, after a pause that grows with what a sweep takes.
"""

from __future__ import annotations

import asyncio
from logging import DEBUG, INFO, WARNING

from loomfast._errors import ExecutionSetAsideError, LeaseHeldError, RuntimeClosedError
from loomfast._events import RUNNING
from loomfast._kernels import State
from loomfast._nodes.backoff import BackOff
from loomfast._nodes.due import check_period
from loomfast._nodes.limits import Slots
from loomfast._nodes.telemetry import Telemetry
from loomfast._nodes.tenants import Owner, Runtimes
from loomfast._runtime.clock import Clock, done_within
from loomfast._runtime.hooks import logger
from loomfast.stores import EventStore, ExecutionSummary

# Executions read at a time.
PAGE = 1_000
# How long to wait for more room once there is some: what is short-lived is then taken up by the dozen.
GATHER_S = 0.02


class Claims:
    """Takes up what is abandoned, every `sweep_s` seconds and when there is room again."""

    def __init__(
        self,
        store: EventStore,
        clock: Clock,
        runtimes: Runtimes,
        slots: Slots,
        telemetry: Telemetry,
        *,
        sweep_s: float,
    ) -> None:
        check_period("sweep_s", sweep_s)
        self._store = store.primary
        self._clock = clock
        self._runtimes = runtimes
        self._slots = slots
        self._sweep_s = sweep_s
        self._telemetry = telemetry
        self._back_off = BackOff()
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._taken: dict[tuple[str | None, str], str] = {}  # the stored ids of what was taken up and runs
        self._after = 0
        self._full = False
        self._passed_over = False  # whether something found no room for its flow or tenant
        self._took = 0
        self._room: asyncio.Future[None] | None = None
        self.swept_ms: int | None = None  # when a sweep last came to the end

    def freed(self) -> None:
        """There is room for one more."""
        if (self._full or self._passed_over) and self._room is not None and not self._room.done():
            self._room.set_result(None)

    def rested(self, tenant: str | None, execution_id: str, state: State | None) -> None:
        """It is driven here no longer; without a state it could not go on, and is left alone for a while."""
        stored_id = self._taken.pop((tenant, execution_id), None)
        if stored_id is None:
            return
        if state is None:
            self._back_off.failed(stored_id, self._clock.now_ms())
        else:
            self._back_off.succeeded(stored_id)

    @property
    def failing(self) -> int:
        """How many could not go on when they were last tried."""
        return self._back_off.count(self._clock.now_ms())

    async def run(self) -> None:
        """Sweep, and wait, until cancelled. What has begun goes on: see `finish`."""
        while True:
            self._room = asyncio.get_running_loop().create_future()
            began_ms = self._clock.now_ms()
            try:
                await self.sweep()
            except Exception as error:
                logger.warning("what is abandoned could not be read: %s: %s", type(error).__name__, error)
            took_s = max(0, self._clock.now_ms() - began_ms) / 1000
            await done_within(self._clock, self._sweep_s, self._room)
            if self._full:
                await self._clock.sleep(GATHER_S)
            elif self._passed_over:
                await self._clock.sleep(min(max(GATHER_S, 4 * took_s), self._sweep_s))

    async def sweep(self) -> None:
        """Begin to take up what is abandoned, as far as there is room. Raises what the store raises."""
        try:
            await self._sweep()
        finally:
            self._slots.keep(self._full and not self._took)

    async def _sweep(self) -> None:
        self._took, self._passed_over = 0, False
        self._full = self._slots.full
        while not self._full:
            page = await self._store.list_executions(status=RUNNING, after=self._after, limit=PAGE)
            await self._look_at(page)
            self._full = self._slots.full
            if self._full:
                return  # and begin with this page again
            if len(page) < PAGE:
                self._after = 0
                self.swept_ms = self._clock.now_ms()
                return
            self._after = page[-1].position

    async def finish(self) -> None:
        """Wait until what has begun is taken up, or is not."""
        while self._busy:
            await asyncio.wait(tuple(self._busy.values()))

    async def _look_at(self, page: list[ExecutionSummary]) -> None:
        leased = {lease.key for lease in await self._store.leases.held([each.execution_id for each in page])}
        now_ms = self._clock.now_ms()
        for summary in page:
            stored_id = summary.execution_id
            if stored_id in leased or stored_id in self._busy or self._back_off.waits(stored_id, now_ms):
                continue
            owner = self._runtimes.owner(stored_id)
            if owner.runtime.drives(owner.own_id):
                continue
            if self._slots.take(owner.own_id, summary.flow_id, owner.tenant, abandoned=True):
                self._took += 1
                task = asyncio.get_running_loop().create_task(self._claim(stored_id, owner))
                self._busy[stored_id] = task
            elif self._slots.full:
                return
            else:
                self._passed_over = True

    async def _claim(self, stored_id: str, owner: Owner) -> None:
        level = DEBUG if stored_id in self._back_off else INFO
        logger.log(level, "%r is driven by nobody: taking it up", stored_id)
        self._taken[owner.tenant, owner.own_id] = stored_id
        try:
            await owner.runtime.recover(owner.own_id)
            self._telemetry.recovered()
        except (LeaseHeldError, RuntimeClosedError):
            pass  # another worker was first; or this one is closing
        except ExecutionSetAsideError as error:
            if self._back_off.failed(stored_id, self._clock.now_ms()):
                logger.warning("%s", error)
                self._telemetry.set_aside()
        except Exception as error:
            level = WARNING if self._back_off.failed(stored_id, self._clock.now_ms()) else DEBUG
            logger.log(level, "%r could not be taken up: %s: %s", stored_id, type(error).__name__, error)
            self._telemetry.failed(stored_id, error)
        finally:
            del self._busy[stored_id]
            if not owner.runtime.drives(owner.own_id):
                self._taken.pop((owner.tenant, owner.own_id), None)
                self._slots.give_back(owner.own_id, owner.tenant)
