"""A worker: a process that takes up by itself what a store holds for it to do.

What lives here: `Worker`, which puts claims, timers and limits together, and `Health`. What must not: how any
of them is done (`claiming`, `due`, `occurrences`, `limits`), processes and signals (the command line).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from loomfast._core.arguments import count_argument
from loomfast._errors import (
    BadInputError,
    GateRefusedError,
    LeaseHeldError,
    RuntimeClosedError,
    UnknownFlowError,
)
from loomfast._kernels import State
from loomfast._nodes.app import App
from loomfast._nodes.claiming import Claims
from loomfast._nodes.due import DueLoop
from loomfast._nodes.limits import Limits, Slots
from loomfast._nodes.occurrences import start_due
from loomfast._nodes.schedules import Schedules
from loomfast._nodes.telemetry import Telemetry
from loomfast._nodes.tenants import Owner, Runtimes
from loomfast._runtime.clock import Clock, SystemClock
from loomfast._runtime.runtime import WorkflowRuntime
from loomfast.stores import EventStore, ScheduleRow, Wake
from loomfast.stores._spi_leases import check_ttl

Phase: TypeAlias = Literal["new", "running", "closing", "closed"]

# What an orderly end of another process leaves is taken up within so many seconds.
LONGEST_SWEEP_S = 5.0
# A worker whose looks at the store have failed for so long is not well.
UNWELL_S = 15.0
# For how many sync steps there are threads, unless the app says otherwise.
STEP_THREADS = 16
# Of how many executions that wait for room the flow is remembered.
FLOW_IDS = 10_000


class Health(NamedTuple):
    """How a worker fares. Times are in seconds; None where it has not happened yet.

    `driving`: executions it took up and that have not come to rest; `limit`: how many that may be at most.
    `looked_s`: since the store last told what is due; `swept_s`: since all that is running was last looked
    at, which a worker that is full does not do. `failing`: what could not go on and is tried again.
    """

    phase: Phase
    driving: int
    limit: int | None
    looked_s: float | None
    swept_s: float | None
    failing: int

    @property
    def well(self) -> bool:
        """Whether it does its work: it runs, and the store answers."""
        return self.phase == "running" and self.looked_s is not None and self.looked_s < UNWELL_S


class Worker:
    """Takes up what is abandoned and what is due in a store, for as long as it is entered.

    It recovers executions that are running and that nobody drives, wakes sleepers and gates whose time has
    come, and starts the occurrences of schedules, as far as `limits` allow. Every execution is driven under
    a lease of `lease_ttl_s` seconds, so any number of workers, and of other processes whose runtimes have
    leases, may share the store. One that keeps crashing its process is set aside (`max_crashes`).

    `poll_s`: how often it asks for what is due; `sweep_s`: how often for what is abandoned; 5 s unless
    given, or a third of the lease's time where that is less. With `tenants`, what `TenantScopedEventStore`
    views of the store hold is driven as that tenant's. `close_grace_s` is the grace that running effects have
    when it is left.

    Use it as an async context manager. The store is the caller's to close.
    """

    def __init__(
        self,
        store: EventStore,
        app: App,
        *,
        limits: Limits | None = None,
        lease_ttl_s: float = 30.0,
        poll_s: float = 1.0,
        sweep_s: float | None = None,
        close_grace_s: float = 20.0,
        tenants: bool = False,
    ) -> None:
        if not isinstance(app, App):
            raise BadInputError(f"app must be a loomfast.App, not {type(app).__name__}")
        _check_options(app)
        check_ttl(lease_ttl_s)
        self.phase: Phase = "new"
        self._app = app
        self._flows = tuple(app.flows)
        self._lease_ttl_s = lease_ttl_s
        self._close_grace_s = close_grace_s
        self._threads = ThreadPoolExecutor(_threads_of(app), thread_name_prefix="loomfast-step")
        self._options = {"clock": SystemClock(), "executor": self._threads, **app.options}
        self._clock: Clock = self._options["clock"]
        self._slots = Slots(limits or Limits(), self._slots_changed)
        self._runtimes = Runtimes(
            store, self._make_runtime, self._slots, tenants=tenants, rested=self._rested
        )
        self.runtime = self._runtimes.base
        self._check_flows(self._slots.limits)
        sweep_s = min(lease_ttl_s / 3, LONGEST_SWEEP_S) if sweep_s is None else sweep_s
        self._telemetry = Telemetry()
        self._due = DueLoop(
            store.timers,
            self._clock,
            self._wake,
            self._start_due,
            poll_s=poll_s,
            concurrency=64,
            on_error=self._telemetry.failed,
            full=self._full_for_due,
        )
        self._claims = Claims(
            store,
            self._clock,
            self._runtimes,
            self._slots,
            self._telemetry,
            sweep_s=sweep_s,
        )
        self.schedules = Schedules(self.runtime, changed=self._due.expect)
        self._due_waits = False  # whether something due found no room
        self._flow_ids: dict[str, str] = {}  # of what was due and found no room
        self._lifespan = AsyncExitStack()
        self._leaving = asyncio.Lock()
        self._leaver: asyncio.Task[Any] | None = None
        self._loops: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None

    def health(self) -> Health:
        """Return how it fares."""
        return Health(
            self.phase,
            len(self._slots.taken),
            self._slots.limits.concurrency,
            self._ago_s(self._due.looked_ms),
            self._ago_s(self._claims.swept_ms),
            self._claims.failing + self._due.failing,
        )

    async def close(self, *, grace_s: float | None = None) -> None:
        """Take nothing up any more, and stop what runs in order: see `WorkflowRuntime.close`.

        Other workers can take over at once what is left. A repeat waits for the first call, whose grace
        counts. Cancelling the caller does not stop it; only the lifespan is then left by whoever closes next.
        """
        if self._closing is None:
            grace_s = self._close_grace_s if grace_s is None else grace_s
            self._closing = asyncio.get_running_loop().create_task(self._close(grace_s))
        await asyncio.shield(self._closing)
        # Here, and not in the task above: what a lifespan opened is often bound to the task that entered it.
        if self._leaver is asyncio.current_task():
            return  # it is the lifespan that calls, on its way out
        async with self._leaving:
            self._leaver = asyncio.current_task()
            try:
                await self._lifespan.aclose()
            finally:
                self._leaver = None
                self.phase = "closed"

    async def __aenter__(self) -> Self:
        if self.phase != "new":
            raise BadInputError("a worker is entered once: make another")
        try:
            if self._app.lifespan is not None:
                await self._lifespan.enter_async_context(self._app.lifespan(self))
            if self._closing is not None:
                raise RuntimeClosedError
        except BaseException:
            await self.close()  # a lifespan may have begun something in the runtime
            raise
        self.phase = "running"
        create_task = asyncio.get_running_loop().create_task
        self._loops = [create_task(self._due.run()), create_task(self._claims.run())]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _close(self, grace_s: float) -> None:
        self.phase = "closing"
        for loop in self._loops:
            loop.cancel()
        if self._loops:
            await asyncio.wait(self._loops)
        await self._runtimes.close(grace_s)
        await self._due.finish()
        await self._claims.finish()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- what its parts ask for ------------------------------------------------------------------

    def _check_flows(self, limits: Limits) -> None:
        for flow_id in limits.per_flow if isinstance(limits.per_flow, Mapping) else ():
            try:
                self.runtime.flow(flow_id)
            except UnknownFlowError as error:
                raise BadInputError(f"per_flow names {flow_id!r}, which is no flow of the app") from error

    def _make_runtime(self, store: EventStore) -> WorkflowRuntime:
        return WorkflowRuntime(
            store,
            flows=self._flows,
            lease_ttl_s=self._lease_ttl_s,
            close_grace_s=self._close_grace_s,
            **self._options,
        )

    async def _wake(self, wake: Wake) -> None:
        owner = self._runtimes.owner(wake.execution_id)
        flow_id = ""
        if self._slots.limits.per_flow is not None:
            flow_id = await self._flow_id(wake.execution_id, owner)
        if not self._slots.take(owner.own_id, flow_id, owner.tenant):
            self._due_waits = True
            if flow_id:
                self._flow_ids[wake.execution_id] = flow_id
            return
        try:
            await owner.runtime.fire(owner.own_id)
        except (GateRefusedError, LeaseHeldError):
            return  # somebody else is about it, or was
        finally:
            if not owner.runtime.drives(owner.own_id):
                self._slots.give_back(owner.own_id, owner.tenant)
        self._telemetry.woken(self._clock.now_ms() - wake.wake_at)

    async def _flow_id(self, stored_id: str, owner: Owner) -> str:
        flow_id = self._flow_ids.pop(stored_id, None)
        if flow_id is None:
            if len(self._flow_ids) >= FLOW_IDS:
                self._flow_ids.clear()
            state = await owner.runtime.load_state(owner.own_id)
            flow_id = "" if state is None else state.flow_id
        return flow_id

    async def _start_due(self, row: ScheduleRow) -> None:
        owner = self._runtimes.owner(row.schedule_id)
        now_ms = self._clock.now_ms()
        own = row._replace(schedule_id=owner.own_id)
        next_ms = await start_due(owner.runtime, own, self._slots, owner.tenant)
        if next_ms is not None and next_ms > now_ms:
            self._due.expect(next_ms)
        elif next_ms is not None:
            self._due_waits = True

    def _rested(self, tenant: str | None, execution_id: str, state: State | None) -> None:
        self._claims.rested(tenant, execution_id, state)
        self._slots.give_back(execution_id, tenant)
        self._due.expect_wake(state)

    def _full_for_due(self) -> bool:
        full = self._slots.full_for_due
        self._due_waits = self._due_waits or full
        return full

    def _slots_changed(self, more: int) -> None:
        if more:
            self._telemetry.driving(more)
        if more > 0:
            return
        if more < 0:
            self._claims.freed()
        if self._due_waits:
            self._due_waits = False
            self._due.expect(self._clock.now_ms())

    def _ago_s(self, at_ms: int | None) -> float | None:
        return None if at_ms is None else (self._clock.now_ms() - at_ms) / 1000


def _threads_of(app: App) -> int:
    """Return how many threads all runtimes of a worker share for sync steps."""
    threads = app.options.get("step_threads", STEP_THREADS)
    count_argument("step_threads", threads)
    return int(threads)


def _check_options(app: App) -> None:
    """Refuse options that are none of a runtime's, or that its worker gives it."""
    known = inspect.signature(WorkflowRuntime).parameters.keys() - {"store"}
    given = {"flows", "lease_ttl_s", "close_grace_s"}
    for name in app.options:
        if name in given:
            raise BadInputError(f"option {name!r} of the app: the worker gives this to its runtimes")
        if name not in known:
            raise BadInputError(
                f"option {name!r} of the app: must be one of {', '.join(sorted(known - given))}"
            )
