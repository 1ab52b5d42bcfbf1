"""The runtime: the door to everything that is done to executions from outside a flow.

What lives here: `WorkflowRuntime`, which says what each call promises and puts its parts together. What must
not: how any of it is done: starting, answering, cancelling, recovering, history and waiting are files of
their own, around the table of what this process drives (driven).
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from loomfast._core.definitions import FlowDefinition, FlowFunction
from loomfast._errors import BadInputError, StorageWriteError
from loomfast._kernels import Envelope, State
from loomfast._runtime.answering import Answering
from loomfast._runtime.cancelling import Cancelling
from loomfast._runtime.clock import Clock, SystemClock
from loomfast._runtime.deps import DeterminismPolicy, RunDeps
from loomfast._runtime.driven import DrivenExecutions
from loomfast._runtime.effects import EffectMiddleware
from loomfast._runtime.flows import FlowTable
from loomfast._runtime.handle import ExecutionHandle
from loomfast._runtime.history import History
from loomfast._runtime.hooks import Hooks
from loomfast._runtime.ids import new_ulid
from loomfast._runtime.journal import BATCH_EVENTS
from loomfast._runtime.recovering import Recovering
from loomfast._runtime.starting import Starting
from loomfast._runtime.waiting import Waiting
from loomfast.stores import EventStore


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
        self._own_executor: Executor | None = None
        if executor is None:
            executor = ThreadPoolExecutor(step_threads, thread_name_prefix="loomfast-step")
            self._own_executor = executor
        deps = RunDeps(
            clock or SystemClock(),
            entropy,
            executor,
            tuple(middleware),
            determinism,
            store.persists_json,
            contextvars.copy_context(),
        )
        hooks = Hooks(on_event, on_commit, on_storage_error)
        id_factory = id_factory or new_ulid
        self._flows = FlowTable(flows)
        self._driven = driven = DrivenExecutions(store, deps, hooks, batch_events=batch_events)
        self._waiting = Waiting(driven)
        self._starting = Starting(driven, self._flows, id_factory)
        self._answering = Answering(driven, self._flows)
        self._cancelling = Cancelling(driven)
        self._recovering = Recovering(driven, self._flows)
        self._history = History(
            driven, self._flows, id_factory, snapshot_every=snapshot_every, truncate=truncate
        )
        driven.at_rest = self._history.rested

    def register(self, flow: FlowDefinition | FlowFunction) -> FlowDefinition:
        """Make a flow known by its id. Raises `BadInputError` when the id stands for another function."""
        return self._flows.register(flow)

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
        self._driven.check_open()
        live = await self._starting.start(flow, input, execution_id, compute_target, fence)
        return self._waiting.handle(live.journal.execution_id, live)

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
        self._driven.check_open()
        live = await self._answering.resume(execution_id, event_type, payload, correlation_key, gate)
        return self._waiting.handle(execution_id, live)

    async def fire(self, execution_id: str) -> ExecutionHandle:
        """Pass the pending gate of an execution whose `wakeAt` has come, with the answer null.

        Raises `GateRefusedError` when no gate waits for a timer, it is not due yet, or somebody else was
        first; otherwise as `resume`.
        """
        self._driven.check_open()
        return self._waiting.handle(execution_id, await self._answering.fire(execution_id))

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
        self._driven.check_open()
        live = await self._answering.resolve_in_doubt(execution_id, key, output, error, release)
        return self._waiting.handle(execution_id, live)

    async def cancel(self, execution_id: str, reason: Any = None) -> State:
        """Cancel an execution and return its final state. A repeat is a no-op.

        One driven here unwinds first: what runs is cancelled, no further effect starts, and `finally` blocks
        of the flow run, without any call of the context. One that is parked ends at once and is not
        re-entered: no `finally` block runs. One driven elsewhere is fenced out, and ends at once too.
        Raises `ExecutionEndedError` for one that has completed or failed, `UnknownExecutionError`,
        `JsonFormError`, `StorageWriteError`.
        """
        self._driven.check_open()
        return await self._cancelling.cancel(execution_id, reason)

    # --- recovering ------------------------------------------------------------------------------

    async def recover(self, execution_id: str) -> ExecutionHandle:
        """Drive on an execution whose process died while it ran; one that rests is left as it is.

        It is fenced first: a process that still drives it, against the caller's belief, is refused at its
        next write. Raises `UnknownExecutionError`, `UnknownFlowError`.
        """
        self._driven.check_open()
        return self._waiting.handle(execution_id, await self._recovering.recover(execution_id))

    # --- history ---------------------------------------------------------------------------------

    async def snapshot(self, execution_id: str) -> int:
        """Save a snapshot of the durable state of an execution, and return the sequence it covers.

        Raises `UnknownExecutionError`, `TooDeepError`, `StorageError`. The execution may go on meanwhile.
        """
        self._driven.check_open()
        return await self._history.snapshot(execution_id)

    async def truncate_prefix(self, execution_id: str, before: int | None = None) -> int:
        """Remove the events below `before` that a snapshot covers, and return how many were removed.

        Without `before`, a snapshot is taken now and everything it covers goes. Sequence 0 and the newest
        event stay, so the id remains taken and the log goes on where it was. Raises `SnapshotNeededError`,
        and as `snapshot`.
        """
        self._driven.check_open()
        return await self._history.truncate_prefix(execution_id, before)

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
        self._driven.check_open()
        child_id, live = await self._history.fork(execution_id, at_sequence, branch_name, fork_id)
        return self._waiting.handle(child_id, live)

    # --- looking ---------------------------------------------------------------------------------

    def handle(self, execution_id: str) -> ExecutionHandle:
        """Return a handle to any execution, driven here or elsewhere."""
        return self._waiting.handle(execution_id)

    async def load_state(self, execution_id: str) -> State | None:
        """Fold and return the durable state of an execution, or None if the store does not know it."""
        return await self._driven.states.find(execution_id)

    # --- closing ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop driving, without recording an outcome for anything, and drain what is queued. Idempotent.

        Every execution stays as the log has it and can be recovered. The store stays open: it is the
        caller's.
        """
        self._driven.closed = True
        await asyncio.gather(*(live.close() for live in tuple(self._driven.executions.values())))
        if self._history.snapshots_due:
            await asyncio.wait(tuple(self._history.snapshots_due))
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
