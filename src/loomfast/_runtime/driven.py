"""The table of what this process drives, and the turns of those who act on it from outside.

What lives here: `DrivenExecutions`. What must not: how one execution is driven (execution), what may be said
to one (starting, answering, cancelling, recovering).

Invariant: an execution has at most one driver in a process. Whoever looks at an execution and acts on what
was seen does it in a *turn* (`in_turn`): one at a time for each execution, and whole, whether or not its
caller still waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from logging import DEBUG, WARNING
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from loomfast._core.definitions import FlowDefinition
from loomfast._errors import (
    ConflictError,
    DeterminismError,
    LeaseHeldError,
    LeaseLostError,
    LoomError,
    RuntimeClosedError,
    StoreReadError,
)
from loomfast._kernels import Envelope, State
from loomfast._runtime.deps import RunDeps
from loomfast._runtime.execution import STOP_S, DrivenExecution
from loomfast._runtime.flushing import Flushes
from loomfast._runtime.hooks import Hooks, call, logger
from loomfast._runtime.journal import ExecutionJournal, write_error
from loomfast._runtime.leases import LeaseKeeper
from loomfast._runtime.loading import StateLoader
from loomfast._runtime.threads import waker
from loomfast.stores import EventStore

T = TypeVar("T")

# How often, within the time of a lease, whoever waits for it looks whether it has been given back.
POLLS = 40
# How many executions have their first turn before the event loop gets its own.
BEGIN_A_TURN = 16
# What keeps an execution from going on wherever it is tried: a log its flow does not fit, or a damaged one.
CANNOT_GO_ON = (DeterminismError, StoreReadError)
# Of how many executions it is remembered that they could not go on.
STUCK = 10_000


class DrivenExecutions:
    """What is driven here.

    `executions` by id; `calls` are the turns that are being taken, held until they are done; `watchers` are
    those who wait for news of an execution; `refused` are the journals of executions that nobody drives
    because the runtime was closed on the way. `at_rest` are called with what has been driven, and its state
    at rest, None if it could not go on.
    """

    def __init__(
        self,
        store: EventStore,
        deps: RunDeps,
        hooks: Hooks,
        *,
        batch_events: int,
        leases: LeaseKeeper | None,
    ) -> None:
        self.store = store
        self.deps = deps
        self.hooks = hooks
        self.states = StateLoader(store.primary)
        self.executions: dict[str, DrivenExecution] = {}
        self.calls: set[asyncio.Future[Any]] = set()
        self.refused: list[ExecutionJournal] = []
        self.watchers: dict[str, set[asyncio.Future[None]]] = {}
        self.at_rest: list[Callable[[DrivenExecution, State | None], object]] = []
        self._stuck: set[str] = set()  # of what could not go on, and has been said to
        self._to_begin: deque[tuple[DrivenExecution, contextvars.Context]] = deque()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._batch_events = batch_events
        self._flushes = Flushes()
        self.leases = leases
        if leases is not None:
            leases.lost = self._lost

    @property
    def closed(self) -> bool:
        """Whether the runtime has begun to close."""
        return self.deps.closing.begun

    def check_open(self) -> None:
        """Raise `RuntimeClosedError` once the runtime is closed."""
        if self.closed:
            raise RuntimeClosedError

    def live(self, execution_id: str) -> DrivenExecution | None:
        """Return the execution if it is driven here and can still be written to."""
        live = self.executions.get(execution_id)
        return None if live is None or live.journal.closed else live

    def journal(
        self, execution_id: str, *, state: State | None = None, fence: int | None = None
    ) -> ExecutionJournal:
        """Make a journal that goes on behind `state`."""
        return ExecutionJournal(
            execution_id,
            self.store,
            self.deps.clock,
            self.hooks,
            state=state,
            fence=fence,
            batch_events=self._batch_events,
            on_durable=self._tell,
            check_lease=None if self.leases is None else self.leases.check_of(execution_id),
            flushes=self._flushes,
        )

    async def append(self, *envelopes: Envelope) -> None:
        """Append, all or nothing, and wait for it. Raises `ConflictError` or `StorageWriteError`."""
        try:
            await self.store.append_batch(envelopes)
        except ConflictError:
            raise
        except Exception as error:
            failure = write_error(envelopes[0].execution_id, envelopes[0].sequence, error)
            call(self.hooks.on_storage_error, failure)
            raise failure from failure.__cause__  # it may be `error` itself, which is no cause of its own
        self._tell(envelopes[0].execution_id)

    # --- leases ----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def claimed(
        self, execution_id: str, meanwhile: Callable[[], Awaitable[object]] | None = None
    ) -> AsyncIterator[None]:
        """Hold the lease of an execution that is not driven here; whoever drives it in here keeps it.

        Only in a turn. While another process holds it, `meanwhile` is called again and again, and raises if
        there is no use in waiting; without it, or once a lease's time has passed, raises `LeaseHeldError`.
        """
        if self.leases is None or self.live(execution_id) is not None:
            yield
            return
        held = await self.leases.take(execution_id)
        give_up = asyncio.get_running_loop().time() + self.leases.ttl_s
        while held is None:
            if meanwhile is None or asyncio.get_running_loop().time() >= give_up:
                raise LeaseHeldError(execution_id)
            await meanwhile()
            await asyncio.sleep(self.leases.ttl_s / POLLS)
            self.check_open()
            held = await self.leases.take(execution_id)
        try:
            yield
        finally:
            if self.live(execution_id) is None:
                self.leases.give_back(held)

    async def fence(self, execution_id: str) -> int:
        """Fence out whoever drives an execution, within `claimed`. Raises as `EventStore.acquire_fence`.

        Raises `LeaseLostError` once the lease is not ours: who drives it then is alive. That is judged here,
        and by the store when the request gets there, however late.
        """
        if self.leases is None:
            return await self.store.acquire_fence(execution_id)
        held = self.leases.held(execution_id)
        if held is None:
            raise LeaseLostError(execution_id)
        self.leases.check(held)
        return await self.store.acquire_fence(execution_id, lease=held.lease)

    def _lost(self, execution_id: str) -> None:
        live = self.live(execution_id)
        if live is not None:
            self.keep(live.stop(STOP_S, LeaseLostError(execution_id)))

    # --- turns -----------------------------------------------------------------------------------

    async def in_turn(self, execution_id: str, work: Coroutine[Any, Any, T]) -> T:
        """Do, one at a time for an execution, what must not stop half-way when its caller is cancelled.

        What has been written gets driven, whether or not somebody still waits for the handle.
        """
        return await asyncio.shield(self.keep(self._in_turn(execution_id, work)))

    def keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do something to its end, whoever waits for it; closing waits for it too."""
        task = asyncio.get_running_loop().create_task(work)
        self.calls.add(task)
        task.add_done_callback(self._finished)
        return task

    async def _in_turn(self, execution_id: str, work: Coroutine[Any, Any, T]) -> T:
        async with self.turn(execution_id):
            return await work

    def turn(self, execution_id: str) -> asyncio.Lock:
        """Return the lock of whoever, from outside, looks at this execution and acts on what was seen."""
        return self._turns.setdefault(execution_id, asyncio.Lock())

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self.calls.discard(task)
        if not task.cancelled():
            task.exception()  # seen here, in case the caller is gone

    # --- driving ---------------------------------------------------------------------------------

    def drive(
        self, flow: FlowDefinition, journal: ExecutionJournal, *, inherit: bool = False
    ) -> DrivenExecution:
        """Begin to drive an execution, in the loop's next turn or soon after. Raises `RuntimeClosedError`.

        With `inherit` its first run sees the caller's context variables; any other sees the runtime's.
        """
        if self.closed:  # the call that leads here began before `close`
            self.refused.append(journal)
            raise RuntimeClosedError(journal.execution_id)
        live = DrivenExecution(flow, journal, self.deps, self._ended)
        self.executions[journal.execution_id] = live  # which holds its task
        context = contextvars.copy_context() if inherit else self.deps.context.copy()
        self._to_begin.append((live, context))
        if len(self._to_begin) == 1:
            asyncio.get_running_loop().call_soon(self._begin_some)
        self._tell(journal.execution_id)
        return live

    def _begin_some(self) -> None:
        """Begin a few, and the others in the loop's next turn: a first turn is where a flow does most."""
        for _ in range(min(BEGIN_A_TURN, len(self._to_begin))):
            live, context = self._to_begin.popleft()
            live.begin(context)
        if self._to_begin:
            asyncio.get_running_loop().call_soon(self._begin_some)

    def _ended(self, live: DrivenExecution, state: State | None) -> None:
        execution_id = live.journal.execution_id
        if self.executions.get(execution_id) is live:
            del self.executions[execution_id]
        if state is not None:
            self.states.keep(state)
            self._stuck.discard(execution_id)
        elif isinstance(live.failure, CANNOT_GO_ON):
            self._complain(execution_id, live.failure)
        if self.leases is not None:
            self.leases.give_back_of(execution_id)
        for hear in tuple(self.at_rest):
            hear(live, state)
        self._tell(execution_id)

    def _complain(self, execution_id: str, error: LoomError) -> None:
        """Say why an execution cannot go on: nothing else does where nobody waits for it.

        Softly, when it has been tried again.
        """
        level = DEBUG if execution_id in self._stuck else WARNING
        logger.log(level, "execution %r cannot go on: %s: %s", execution_id, type(error).__name__, error)
        if len(self._stuck) >= STUCK:
            self._stuck.clear()
        self._stuck.add(execution_id)

    # --- watching --------------------------------------------------------------------------------

    def _tell(self, execution_id: str) -> None:
        for watcher in self.watchers.get(execution_id, ()):
            if not watcher.done():
                watcher.set_result(None)

    def on_rest(self, hear: Callable[[str, State | None], object]) -> Callable[[], None]:
        """See `WorkflowRuntime.on_rest`."""

        def rested(live: DrivenExecution, state: State | None) -> None:
            call(partial(hear, live.journal.execution_id), state)

        self.at_rest.append(rested)
        return lambda: self.at_rest.remove(rested)

    @contextlib.contextmanager
    def watching(self, execution_id: str) -> Iterator[asyncio.Future[None]]:
        """Give a future that is done once there is news of an execution: more of it has become durable here,
        its driving here began or ended, or the store tells of it.
        """
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        unwatch = self.store.watch(execution_id, waker(watcher))
        watchers = self.watchers.setdefault(execution_id, set())
        watchers.add(watcher)
        try:
            yield watcher
        finally:
            unwatch()
            watchers.discard(watcher)
            if not watchers:
                del self.watchers[execution_id]
