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
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from loomfast._core.definitions import FlowDefinition
from loomfast._errors import ConflictError, RuntimeClosedError
from loomfast._kernels import Envelope, State
from loomfast._runtime.deps import RunDeps
from loomfast._runtime.execution import DrivenExecution
from loomfast._runtime.hooks import Hooks, call
from loomfast._runtime.journal import ExecutionJournal, write_error
from loomfast._runtime.loading import StateLoader
from loomfast._runtime.threads import waker
from loomfast.stores import EventStore

T = TypeVar("T")


class DrivenExecutions:
    """What is driven here.

    `executions` by id; `tasks` holds what must not be collected before it is done; `watchers` are those who
    wait until somebody here drives an execution. `at_rest` is called with the durable state of an execution
    that has come to rest.
    """

    def __init__(self, store: EventStore, deps: RunDeps, hooks: Hooks, *, batch_events: int) -> None:
        self.store = store
        self.deps = deps
        self.hooks = hooks
        self.states = StateLoader(store.primary)
        self.closed = False
        self.executions: dict[str, DrivenExecution] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        self.watchers: dict[str, set[asyncio.Future[None]]] = {}
        self.at_rest: Callable[[State], object] = lambda state: None
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._batch_events = batch_events

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
            raise failure from error

    # --- turns -----------------------------------------------------------------------------------

    async def in_turn(self, execution_id: str, work: Coroutine[Any, Any, T]) -> T:
        """Do, one at a time for an execution, what must not stop half-way when its caller is cancelled.

        What has been written gets driven, whether or not somebody still waits for the handle.
        """
        task = asyncio.get_running_loop().create_task(self._in_turn(execution_id, work))
        self.tasks.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    async def _in_turn(self, execution_id: str, work: Coroutine[Any, Any, T]) -> T:
        async with self.turn(execution_id):
            return await work

    def turn(self, execution_id: str) -> asyncio.Lock:
        """Return the lock of whoever, from outside, looks at this execution and acts on what was seen."""
        return self._turns.setdefault(execution_id, asyncio.Lock())

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen here, in case the caller is gone

    # --- driving ---------------------------------------------------------------------------------

    def drive(
        self, flow: FlowDefinition, journal: ExecutionJournal, *, inherit: bool = False
    ) -> DrivenExecution:
        """Begin to drive an execution. Raises `RuntimeClosedError`."""
        if self.closed:  # the call that leads here began before `close`
            raise RuntimeClosedError(journal.execution_id)
        live = DrivenExecution(flow, journal, self.deps, self._ended)
        self.executions[journal.execution_id] = live  # which holds its task
        live.begin(inherit=inherit)
        for watcher in self.watchers.get(journal.execution_id, ()):
            if not watcher.done():
                watcher.set_result(None)
        return live

    def _ended(self, live: DrivenExecution, state: State | None) -> None:
        if self.executions.get(live.journal.execution_id) is live:
            del self.executions[live.journal.execution_id]
        if state is not None:
            self.states.keep(state)
            self.at_rest(state)

    @contextlib.contextmanager
    def watching(self, execution_id: str) -> Iterator[asyncio.Future[None]]:
        """Give a future that is done once somebody here drives the execution, or the store tells of it."""
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
