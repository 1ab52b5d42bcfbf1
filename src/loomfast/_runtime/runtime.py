"""The runtime: starts, resumes and recovers executions on one store.

What lives here: which executions this process drives, and the calls that come from outside a flow. What must
not: how one run goes (execution, context), how a bootstrap becomes durable (bootstrap).
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

from loomfast._core import answers, schema
from loomfast._core.answers import Draft
from loomfast._core.arguments import text_argument
from loomfast._core.definitions import FlowDefinition, FlowFunction
from loomfast._core.definitions import flow as define_flow
from loomfast._errors import (
    BadInputError,
    BeyondLogError,
    ConflictError,
    DuplicateSequenceError,
    ExecutionAlreadyExistsError,
    ExecutionEndedError,
    GateRefusedError,
    LoomError,
    RuntimeClosedError,
    StaleFenceError,
    StepRefusedError,
    StorageWriteError,
    UnknownExecutionError,
    UnknownFlowError,
)
from loomfast._events import CANCELLED, RUNNING
from loomfast._kernels import Envelope, State, decode, encode, fold_events
from loomfast._runtime.bootstrap import append_bootstrap
from loomfast._runtime.clock import Clock, SystemClock
from loomfast._runtime.deps import DeterminismPolicy, RunDeps
from loomfast._runtime.effects import EffectMiddleware
from loomfast._runtime.execution import DrivenExecution
from loomfast._runtime.handle import ExecutionHandle
from loomfast._runtime.hooks import Hooks, call, logger
from loomfast._runtime.journal import BATCH_EVENTS, ExecutionJournal, write_error
from loomfast._runtime.loading import StateLoader
from loomfast.stores import EventStore

T = TypeVar("T")

# How often a waiter looks for what another process has written.
POLL_S = 0.25


def ulid_factory() -> Callable[[], str]:
    """Return a function that makes ULIDs: 26 characters that sort by time of making."""
    from ulid import ULID  # here, and not with the first start, since importing it takes a while

    return lambda: str(ULID())


class WorkflowRuntime:
    """Runs flows on an event store.

    `flows` are the flows that `resume` and `recover` may meet in the store; `start` adds its own.
    `determinism` says what becomes of a re-run that asks the log a different question than it answers:
    `error` (the default: the run fails loudly and nothing is appended past the difference), `warn` or
    `ignore`. `clock` and `id_factory` are injected so that a run can be repeated exactly. `step_threads`
    bounds the threads of sync steps; `executor` puts the caller's own in their place, and is left open.
    `batch_events` bounds how many events one append carries: 1 makes every event a write of its own, which is
    what a test of crashes wants. With `snapshot_every`, an execution that rests at a gate and has gained so
    many events since its last snapshot gets a new one, and with `truncate` the events that it covers are
    removed.

    One runtime belongs to one event loop. Use it as an async context manager, or call `close`.
    """

    def __init__(
        self,
        store: EventStore,
        *,
        flows: Iterable[FlowDefinition | FlowFunction] = (),
        clock: Clock | None = None,
        id_factory: Callable[[], str] | None = None,
        on_event: Callable[[Envelope], object] | None = None,
        on_commit: Callable[[Envelope], object] | None = None,
        on_storage_error: Callable[[StorageWriteError], object] | None = None,
        determinism: DeterminismPolicy = "error",
        middleware: Sequence[EffectMiddleware] = (),
        entropy: Callable[[int], bytes] = os.urandom,
        step_threads: int = 16,
        executor: Executor | None = None,
        batch_events: int = BATCH_EVENTS,
        snapshot_every: int | None = None,
        truncate: bool = False,
    ) -> None:
        if not isinstance(store, EventStore):
            raise BadInputError(f"store must be an EventStore, not {type(store).__name__}")
        if determinism not in ("error", "warn", "ignore"):
            raise BadInputError(f"determinism={determinism!r}: choose error, warn or ignore")
        if step_threads < 1:
            raise BadInputError(f"step_threads={step_threads}: must be 1 or more")
        if snapshot_every is not None and snapshot_every < 1:
            raise BadInputError(f"snapshot_every={snapshot_every}: must be 1 or more events")
        if batch_events < 1:
            raise BadInputError(f"batch_events={batch_events}: must be 1 or more")
        self.store = store
        self._states = StateLoader(store.primary)
        self._clock = clock or SystemClock()
        self._id_factory = id_factory or ulid_factory()
        self._hooks = Hooks(on_event, on_commit, on_storage_error)
        self._batch_events = batch_events
        self._snapshot_every = snapshot_every
        self._truncate = truncate
        self._own_executor: Executor | None = None
        if executor is None:
            executor = ThreadPoolExecutor(step_threads, thread_name_prefix="loomfast-step")
            self._own_executor = executor
        self._deps = RunDeps(
            self._clock,
            entropy,
            executor,
            tuple(middleware),
            determinism,
            store.persists_json,
            contextvars.copy_context(),
        )
        self._flows: dict[str, FlowDefinition] = {}
        self._driven: dict[str, DrivenExecution] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._snapshots_due: set[asyncio.Task[None]] = set()
        self._watchers: dict[str, set[asyncio.Future[None]]] = {}
        self._closed = False
        for flow in flows:
            self.register(flow)

    def register(self, flow: FlowDefinition | FlowFunction) -> FlowDefinition:
        """Make a flow known by its id. Raises `BadInputError` when the id stands for another function."""
        definition = flow if isinstance(flow, FlowDefinition) else define_flow(flow)
        known = self._flows.setdefault(definition.id, definition)
        if known.function is not definition.function:
            raise BadInputError(f"flow id {definition.id!r} stands for two different functions")
        return known

    # --- starting --------------------------------------------------------------------------------

    async def start(
        self,
        flow: FlowDefinition | FlowFunction,
        input: Any = None,
        *,
        execution_id: str | None = None,
        compute_target: str | None = None,
        fence: int | None = None,
    ) -> ExecutionHandle:
        """Start an execution and return its handle; the flow runs on in the background.

        With `execution_id`, start is start-once (ADR 0103): sequence 0 is durable before the body runs, and a
        repeat raises `ExecutionAlreadyExistsError` with no effect run and no event delivered. Without, a new
        id is made and nothing is waited for. Raises `InputValidationError`, `JsonFormError`, and with a
        chosen id `StorageWriteError` or `StartFencedOutError`. Cancelled with a chosen id, the execution may
        exist.
        """
        self._check_open()
        if fence is not None and (type(fence) is not int or not 0 <= fence < 2**63):
            raise BadInputError(f"fence={fence!r}: must be a token that acquire_fence returned")
        if execution_id is not None:
            text_argument("execution_id", execution_id)
        try:
            definition = self.register(flow)
            body = _started(definition, input)
            extra = None if compute_target is None else encode({"computeTarget": compute_target})
        except BadInputError as error:
            if execution_id is not None and await self.store.read_range(execution_id, 0, 0):
                raise ExecutionAlreadyExistsError(execution_id) from error
            raise
        if execution_id is None:
            journal = self._journal(self._id_factory(), fence=fence)
            journal.commit("EXECUTION_STARTED", body, extra=extra)
            return self._drive(definition, journal, inherit=True)
        journal = self._journal(execution_id, fence=fence)
        envelope = journal.envelope(Draft("EXECUTION_STARTED", body), extra=extra)
        return await self._finish(execution_id, self._start_once(definition, journal, envelope))

    async def _start_once(
        self, flow: FlowDefinition, journal: ExecutionJournal, envelope: Envelope
    ) -> ExecutionHandle:
        try:
            await append_bootstrap(self.store, envelope)
        except StorageWriteError as error:
            call(self._hooks.on_storage_error, error)
            raise
        journal.adopt(envelope)
        return self._drive(flow, journal, inherit=True)

    # --- answering -------------------------------------------------------------------------------

    async def resume(
        self,
        execution_id: str,
        event_type: str,
        payload: Any = None,
        *,
        correlation_key: str | None = None,
        gate: int | None = None,
    ) -> ExecutionHandle:
        """Answer the pending gate of an execution, and drive it on.

        The answer is checked against the flow's schema for that gate before anything is written; the gate's
        event and EXECUTION_RESUMED are then one atomic append, and only then does the body run. `gate` is the
        ordinal the answer is meant for, if the caller knows it. Raises `UnknownExecutionError`,
        `GateRefusedError` (not waiting, waiting for something else, or somebody else's answer was first),
        `InputValidationError`, `JsonFormError`, `StorageWriteError`. Cancelled while the store works, the
        answer is written whole or not at all.
        """
        return await self._tell(
            execution_id,
            lambda state: answers.answer(
                self._flow_of(state), state, event_type, payload, correlation_key, gate
            ),
            lambda: GateRefusedError(execution_id, event_type, "another writer was first"),
        )

    async def fire(self, execution_id: str) -> ExecutionHandle:
        """Pass the pending gate of an execution whose `wakeAt` has come, with the answer null.

        Raises `GateRefusedError` when no gate waits for a timer, it is not due yet, or somebody else was
        first; otherwise as `resume`.
        """
        return await self._tell(
            execution_id,
            lambda state: answers.fire(state, self._clock.now_ms()),
            lambda: GateRefusedError(execution_id, answers.TIMER_FIRED, "another writer was first"),
        )

    async def resolve_in_doubt(
        self,
        execution_id: str,
        key: str,
        output: Any = None,
        *,
        error: BaseException | None = None,
        release: bool = False,
    ) -> ExecutionHandle:
        """Say what became of an at-most-once step that is in doubt, and drive the execution on.

        It completed with `output`, it failed with `error` (served as a declared failure), or, with `release`,
        it did not happen and may run again. Raises `StepRefusedError` when the step is not in doubt;
        otherwise as `resume`.
        """
        return await self._tell(
            execution_id,
            lambda state: answers.resolve(state, key, output=output, error=error, release=release),
            lambda: StepRefusedError(execution_id, key, "another writer was first"),
        )

    async def cancel(self, execution_id: str, reason: Any = None) -> State:
        """Cancel an execution and return its final state. A repeat is a no-op.

        One driven here unwinds first: what runs is cancelled, no further effect starts, and `finally` blocks
        of the flow run, without any call of the context. One that is parked ends at once and is not
        re-entered: no `finally` block runs. One driven elsewhere is fenced out, and ends at once too.
        Raises `ExecutionEndedError` for one that has completed or failed, `UnknownExecutionError`,
        `JsonFormError`, `StorageWriteError`.
        """
        self._check_open()
        body = encode({"reason": reason})
        state: State | None = None
        live = self._live(execution_id)
        if live is not None and not self._turn(execution_id).locked():
            live.cancel(body)  # at once, before it takes another turn
        else:
            state = await self._finish(execution_id, self._cancel_in_turn(execution_id, body))
        if state is None:
            live = self._live(execution_id)
            state = await (self._states.load(execution_id) if live is None else asyncio.shield(live.rest))
        if state.status != CANCELLED:
            raise ExecutionEndedError(execution_id, state.status)
        return state

    async def _cancel_in_turn(self, execution_id: str, body: bytes) -> State | None:
        """Return the final state, or None for an execution that is driven here and unwinds now."""
        live = self._live(execution_id)
        if live is None:
            return await self._cancel_parked(execution_id, body)
        live.cancel(body)
        return None

    async def _cancel_parked(self, execution_id: str, body: bytes) -> State:
        while True:
            state = await self._states.load(execution_id)
            if state.ended is not None:
                return state
            fence = await self.store.acquire_fence(execution_id)
            journal = self._journal(execution_id, state=state, fence=fence)
            envelope = journal.envelope(Draft("EXECUTION_CANCELLED", body))
            try:
                await self._append(envelope)
            except ConflictError:
                continue  # somebody wrote in between: look again
            journal.adopt(envelope)
            return journal.state

    async def _tell(
        self,
        execution_id: str,
        drafted: Callable[[State], tuple[Draft, ...]],
        beaten: Callable[[], ConflictError],
    ) -> ExecutionHandle:
        """Append what `drafted` makes of the state, all or nothing, and drive on.

        `beaten` makes the error for a call that came second.
        """
        self._check_open()
        return await self._finish(execution_id, self._tell_in_turn(execution_id, drafted, beaten))

    async def _tell_in_turn(
        self,
        execution_id: str,
        drafted: Callable[[State], tuple[Draft, ...]],
        beaten: Callable[[], ConflictError],
    ) -> ExecutionHandle:
        live = self._live(execution_id)
        if live is not None:
            await live.journal.drain()
            live = self._live(execution_id)
        if live is not None:
            live.journal.commit_group(drafted(live.journal.state))
            try:
                await live.journal.drain()
            except StorageWriteError as error:
                if isinstance(error.__cause__, ConflictError):
                    raise beaten() from error
                raise
            return ExecutionHandle(self, execution_id, live.rest)
        fence: int | None = None
        while True:
            state = await self._states.load(execution_id)
            flow = self._flow_of(state)
            journal = self._journal(execution_id, state=state, fence=fence)
            try:
                drafts = drafted(state)
            except ConflictError:
                if fence is not None and state.status == RUNNING:
                    # Somebody was first after all, and is fenced out by now: whoever fences must drive.
                    self._drive(flow, journal)
                raise
            envelopes = journal.envelopes(drafts)
            try:
                await self._append(*envelopes)
                break
            except StaleFenceError as error:
                if fence is not None:
                    raise beaten() from error
                # A parked execution that was fenced before needs a token from whoever drives it next. Look
                # again before fencing: who was first must not be stopped by the one who is refused.
                drafted(await self._states.load(execution_id))
                fence = await self.store.acquire_fence(execution_id)
            except ConflictError as error:
                raise beaten() from error
        for envelope in envelopes:
            journal.adopt(envelope)
        return self._drive(flow, journal)

    async def _finish(self, execution_id: str, work: Coroutine[Any, Any, T]) -> T:
        """Do, one at a time for an execution, what must not stop half-way when its caller is cancelled.

        What has been written gets driven, whether or not somebody still waits for the handle.
        """
        task = asyncio.get_running_loop().create_task(self._in_turn(execution_id, work))
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    async def _in_turn(self, execution_id: str, work: Coroutine[Any, Any, T]) -> T:
        async with self._turn(execution_id):
            return await work

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen here, in case the caller is gone

    async def _snapshot_due(self, execution_id: str, sequence: int, every: int) -> None:
        try:
            taken = await self.store.snapshots.list(execution_id)
            newest = max((summary.sequence for summary in taken), default=0)
            if sequence - newest >= every:
                covered = (await self._states.snapshot(execution_id)).sequence
                if self._truncate:
                    await self.store.truncate_prefix(execution_id, covered + 1)
                    await self.store.snapshots.delete(execution_id, covered)
        except LoomError:
            # The log is complete without it; the next rest tries again.
            logger.exception("no snapshot of execution %r could be taken", execution_id)

    async def _append(self, *envelopes: Envelope) -> None:
        try:
            await self.store.append_batch(envelopes)
        except ConflictError:
            raise
        except Exception as error:
            failure = write_error(envelopes[0].execution_id, envelopes[0].sequence, error)
            call(self._hooks.on_storage_error, failure)
            raise failure from error

    # --- recovering ------------------------------------------------------------------------------

    async def recover(self, execution_id: str) -> ExecutionHandle:
        """Drive on an execution whose process died while it ran; one that rests is left as it is.

        It is fenced first: a process that still drives it, against the caller's belief, is refused at its
        next write. Raises `UnknownExecutionError`, `UnknownFlowError`.
        """
        self._check_open()
        return await self._finish(execution_id, self._recover(execution_id))

    async def _recover(self, execution_id: str) -> ExecutionHandle:
        live = self._live(execution_id)
        if live is not None:
            return ExecutionHandle(self, execution_id, live.rest)
        state = await self._states.load(execution_id)
        if state.status != RUNNING:
            return ExecutionHandle(self, execution_id)
        flow = self._flow_of(state)
        fence = await self.store.acquire_fence(execution_id)
        state = await self._states.load(execution_id)  # again: what came before the fence counts
        if state.status != RUNNING:
            return ExecutionHandle(self, execution_id)
        return self._drive(flow, self._journal(execution_id, state=state, fence=fence))

    # --- history ---------------------------------------------------------------------------------

    async def snapshot(self, execution_id: str) -> int:
        """Save a snapshot of the durable state of an execution, and return the sequence it covers.

        Raises `UnknownExecutionError`, `TooDeepError`, `StorageError`. The execution may go on meanwhile.
        """
        self._check_open()
        return (await self._states.snapshot(execution_id)).sequence

    async def truncate_prefix(self, execution_id: str, before: int | None = None) -> int:
        """Remove the events below `before` that a snapshot covers, and return how many were removed.

        Without `before`, a snapshot is taken now and everything it covers goes. Sequence 0 and the newest
        event stay, so the id remains taken and the log goes on where it was. Raises `SnapshotNeededError`,
        and as `snapshot`.
        """
        self._check_open()
        if before is None:
            before = await self.snapshot(execution_id) + 1
        return await self.store.truncate_prefix(execution_id, before)

    async def fork(
        self,
        execution_id: str,
        at_sequence: int,
        branch_name: str | None = None,
        *,
        fork_id: str | None = None,
    ) -> ExecutionHandle:
        """Start a new execution from the events 0 to `at_sequence` of another, and drive it on.

        The child is served what it inherits: no effect of the prefix runs again and nothing is emitted twice.
        It brings along no fence and no end; with `branch_name` it is registered in `store.branches`. To take
        another way at a gate, cut at its EXECUTION_SUSPENDED; to run a failed step again, cut before its
        failure. The origin is not touched. With `fork_id` a repeat raises `ExecutionAlreadyExistsError`.
        Raises `UnknownExecutionError`, `BeyondLogError`, `PrefixTruncatedError`, `BadInputError` for a cut at
        or behind the end, `BranchExistsError`, `UnknownFlowError`, `StorageError`.
        """
        self._check_open()
        if fork_id is not None:
            text_argument("fork_id", fork_id)
        if type(at_sequence) is not int or at_sequence < 0:
            raise BadInputError(f"at_sequence={at_sequence!r}: must be a whole number, 0 or more")
        prefix = await self.store.primary.read_range(execution_id, 0, at_sequence)
        if not prefix:
            raise UnknownExecutionError(execution_id)
        if prefix[-1].sequence < at_sequence:
            raise BeyondLogError(execution_id, at_sequence, prefix[-1].sequence)
        state = fold_events(None, prefix)
        if state.ended is not None:
            raise BadInputError(
                f"execution {execution_id!r} has {state.status} by {at_sequence}: cut before that"
            )
        flow = self._flow_of(state)
        child_id = self._id_factory() if fork_id is None else fork_id
        return await self._finish(
            child_id, self._fork(flow, execution_id, child_id, at_sequence, branch_name)
        )

    async def _fork(
        self, flow: FlowDefinition, source_id: str, child_id: str, at_sequence: int, branch_name: str | None
    ) -> ExecutionHandle:
        try:
            await self.store.copy_prefix(source_id, child_id, at_sequence, branch_name=branch_name)
        except DuplicateSequenceError as error:
            raise ExecutionAlreadyExistsError(child_id) from error
        state = await self._states.load(child_id)
        if state.status != RUNNING:
            return ExecutionHandle(self, child_id)
        return self._drive(flow, self._journal(child_id, state=state))

    # --- looking ---------------------------------------------------------------------------------

    def handle(self, execution_id: str) -> ExecutionHandle:
        """Return a handle to any execution, driven here or elsewhere."""
        return ExecutionHandle(self, execution_id)

    async def load_state(self, execution_id: str) -> State | None:
        """Fold and return the durable state of an execution, or None if the store does not know it."""
        return await self._states.find(execution_id)

    async def _wait_for(
        self,
        execution_id: str,
        statuses: Collection[str],
        failure: Callable[[], BaseException | None] = lambda: None,
    ) -> State:
        """Wait until the execution has one of `statuses`, durably, and return its state.

        An execution driven elsewhere is looked at every `POLL_S` seconds. Raises `UnknownExecutionError`,
        what keeps an execution driven here from resting (`StorageWriteError`, `RuntimeClosedError`), and what
        `failure` returns once nobody here drives the execution.
        """
        while True:
            watcher = self._watch(execution_id)
            try:
                live = self._live(execution_id)
                state: State | None
                if live is not None:
                    state = await self._rest_of(live)
                else:
                    state = await self._states.find(execution_id)
                if state is not None and state.status in statuses:
                    return state
                failed = failure()
                if failed is not None and self._live(execution_id) is None:
                    raise failed
                if state is None:
                    raise UnknownExecutionError(execution_id)
                await self._until(watcher, POLL_S)
            finally:
                self._unwatch(execution_id, watcher)

    async def _rest_of(self, live: DrivenExecution) -> State | None:
        try:
            return await asyncio.shield(live.rest)
        except StorageWriteError as error:
            if not isinstance(error.__cause__, ConflictError):
                raise
            # Fenced out: what became of the execution is for the store to say.
            state = await self._states.find(live.journal.execution_id)
            if state is None or state.ended is None:
                raise
            return state

    # --- closing ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop driving, without recording an outcome for anything, and drain what is queued. Idempotent.

        Every execution stays as the log has it and can be recovered. The store stays open: it is the
        caller's.
        """
        self._closed = True
        await asyncio.gather(*(live.close() for live in tuple(self._driven.values())))
        if self._snapshots_due:
            await asyncio.wait(tuple(self._snapshots_due))
        if self._own_executor is not None:
            self._own_executor.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # --- inside ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeClosedError

    def _journal(
        self, execution_id: str, *, state: State | None = None, fence: int | None = None
    ) -> ExecutionJournal:
        return ExecutionJournal(
            execution_id,
            self.store,
            self._clock,
            self._hooks,
            state=state,
            fence=fence,
            batch_events=self._batch_events,
        )

    def _live(self, execution_id: str) -> DrivenExecution | None:
        live = self._driven.get(execution_id)
        return None if live is None or live.journal.closed else live

    def _turn(self, execution_id: str) -> asyncio.Lock:
        """Return the lock of whoever, from outside, looks at this execution and acts on what was seen."""
        return self._turns.setdefault(execution_id, asyncio.Lock())

    def _drive(
        self, flow: FlowDefinition, journal: ExecutionJournal, *, inherit: bool = False
    ) -> ExecutionHandle:
        if self._closed:  # the call that leads here began before `close`
            raise RuntimeClosedError(journal.execution_id)
        live = DrivenExecution(flow, journal, self._deps)
        self._driven[journal.execution_id] = live
        task = live.begin(inherit=inherit)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._rested(task, live))
        for watcher in self._watchers.get(journal.execution_id, ()):
            if not watcher.done():
                watcher.set_result(None)
        return ExecutionHandle(self, journal.execution_id, live.rest)

    def _rested(self, task: asyncio.Task[None], live: DrivenExecution) -> None:
        self._tasks.discard(task)
        if self._driven.get(live.journal.execution_id) is live:
            del self._driven[live.journal.execution_id]
        if live.rest.exception() is None:
            state = live.rest.result()
            self._states.keep(state)
            if self._snapshot_every is not None and state.ended is None and not self._closed:
                work = self._snapshot_due(state.execution_id, state.sequence, self._snapshot_every)
                due = asyncio.get_running_loop().create_task(work)
                self._snapshots_due.add(due)
                due.add_done_callback(self._snapshots_due.discard)

    def _flow_of(self, state: State) -> FlowDefinition:
        flow = self._flows.get(state.flow_id)
        if flow is None:
            raise UnknownFlowError(state.flow_id, state.execution_id)
        return flow

    def _watch(self, execution_id: str) -> asyncio.Future[None]:
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.setdefault(execution_id, set()).add(watcher)
        return watcher

    def _unwatch(self, execution_id: str, watcher: asyncio.Future[None]) -> None:
        watchers = self._watchers[execution_id]
        watchers.discard(watcher)
        if not watchers:
            del self._watchers[execution_id]

    async def _until(self, watcher: asyncio.Future[None], seconds: float) -> None:
        pause = asyncio.get_running_loop().create_task(self._pause(seconds))
        try:
            await asyncio.wait((watcher, pause), return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()

    async def _pause(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


def _started(flow: FlowDefinition, input: Any) -> bytes:
    """Return the payload of EXECUTION_STARTED, once the input in its JSON form fits the flow's schema."""
    body = encode({"flowId": flow.id, "flowVersion": flow.version, "input": input})
    if flow.input is not None:
        schema.check(flow.input, decode(body)["input"], f"input of flow {flow.id!r}")
    return body
