"""The runtime: the door to everything that is done to executions from outside a flow.

What lives here: `WorkflowRuntime`, which says what each call promises and puts its parts together. What must
not: how any of it is done: starting, answering, cancelling, recovering, history and waiting are files of
their own, around the table of what this process drives (driven).
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Self

from loomfast._core.arguments import count_argument, seconds_argument, text_argument
from loomfast._core.definitions import FlowDefinition, FlowFunction
from loomfast._errors import BadInputError, StorageWriteError
from loomfast._kernels import Envelope, State
from loomfast._runtime.answering import Answering
from loomfast._runtime.cancelling import Cancelling
from loomfast._runtime.clock import Clock, SystemClock
from loomfast._runtime.closing import Closing
from loomfast._runtime.deps import DeterminismPolicy, RunDeps
from loomfast._runtime.driven import DrivenExecutions
from loomfast._runtime.effects import EffectMiddleware
from loomfast._runtime.flows import FlowTable
from loomfast._runtime.handle import ExecutionHandle
from loomfast._runtime.history import History
from loomfast._runtime.hooks import Hooks
from loomfast._runtime.ids import new_ulid
from loomfast._runtime.journal import BATCH_EVENTS
from loomfast._runtime.leases import LeaseKeeper
from loomfast._runtime.recovering import Recovered, Recovering
from loomfast._runtime.starting import Starting
from loomfast._runtime.waiting import Waiting
from loomfast.stores import EventStore, Recovery

# How long, in seconds, a cancelled run may take to unwind, and an effect to finish when the runtime closes.
CANCEL_GRACE_S = 10.0
CLOSE_GRACE_S = 5.0
# Three in a row is soon reached by a bystander, which only ran in a process that another execution killed.
MAX_CRASHES = 5


class WorkflowRuntime:
    """Runs flows on an event store.

    `flows` are the flows that `resume` and `recover` may meet in the store; `start` adds its own. `answer`
    needs none.
    `determinism` says what becomes of a re-run that asks the log a different question than it answers:
    `error` (the default: the run fails loudly and nothing is appended past the difference), `warn` or
    `ignore`. `clock` and `id_factory` are injected so that a run can be repeated exactly. `step_threads`
    bounds the threads of sync steps; `executor` puts the caller's own in their place, and is left open.
    `batch_events` bounds how many events one append carries: 1 makes every event a write of its own, which is
    what a test of crashes wants. With `snapshot_every`, an execution that rests at a gate and has gained so
    many events since its last snapshot gets a new one, and with `truncate` the events that it covers are
    removed.

    `max_crashes`: how often in a row an execution may crash before it is set aside (`recover_abandoned`).
    With `lease_ttl_s`, every execution that is driven here holds a lease of `store.leases` for that many
    seconds, renewed every third of it, so that several processes can share a store: each drives what nobody
    else does, and takes over what a dead one left. It must be longer than the event loop is ever held up.
    `close_grace_s` is the grace of `close`.

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
        max_crashes: int = MAX_CRASHES,
        lease_ttl_s: float | None = None,
        close_grace_s: float = CLOSE_GRACE_S,
    ) -> None:
        if not isinstance(store, EventStore):
            raise BadInputError(f"store must be an EventStore, not {type(store).__name__}")
        if determinism not in ("error", "warn", "ignore"):
            raise BadInputError(f"determinism={determinism!r}: choose error, warn or ignore")
        count_argument("step_threads", step_threads)
        count_argument("batch_events", batch_events)
        if snapshot_every is not None:
            count_argument("snapshot_every", snapshot_every)
        count_argument("max_crashes", max_crashes)
        seconds_argument("close_grace_s", close_grace_s)
        self.store = store
        self._close_grace_s = close_grace_s
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
        leases = None
        if lease_ttl_s is not None:
            leases = LeaseKeeper(store.leases, deps.clock, entropy, lease_ttl_s)
        self._driven = driven = DrivenExecutions(store, deps, hooks, batch_events=batch_events, leases=leases)
        self._waiting = Waiting(driven)
        self._starting = Starting(driven, self._flows, id_factory)
        self._recovering = Recovering(driven, self._flows, max_crashes)
        self._answering = Answering(driven, self._recovering, self._flows)
        self._cancelling = Cancelling(driven, self._recovering)
        self._history = History(
            driven, self._flows, id_factory, snapshot_every=snapshot_every, truncate=truncate
        )
        self._closing = Closing(driven, self._recovering, self._history)
        driven.at_rest = [self._history.rested, self._recovering.rested]

    def register(self, flow: FlowDefinition | FlowFunction) -> FlowDefinition:
        """Make a flow known by its id. Raises `BadInputError` when the id stands for another function."""
        return self._flows.register(flow)

    def flow(self, flow_id: str) -> FlowDefinition:
        """Return the flow that is known by this id. Raises `UnknownFlowError`."""
        return self._flows.named(flow_id)

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
        id is made and nothing is waited for, save the lease where there are leases. Raises
        `InputValidationError`, `JsonFormError`, and with a chosen id `StorageWriteError` or
        `StartFencedOutError`; with leases also `LeaseHeldError`, when another process holds the chosen id for
        longer than `lease_ttl_s` and writes nothing, and what acquiring a lease raises. Cancelled with a
        chosen id, or with leases, the execution may exist.
        """
        self._driven.check_open()
        live = await self._starting.start(flow, input, execution_id, compute_target, fence)
        return self._waiting.handle(live.journal.execution_id, live)

    async def submit(
        self,
        flow: FlowDefinition | FlowFunction,
        input: Any = None,
        *,
        execution_id: str | None = None,
        compute_target: str | None = None,
    ) -> ExecutionHandle:
        """Make an execution for others to drive, and return its handle: a worker's next sweep takes it up.

        It is durable when this returns, and nothing of it runs here. With `execution_id` it is start-once, as
        `start`. Raises `ExecutionAlreadyExistsError`, `InputValidationError`, `JsonFormError`,
        `StorageWriteError`. Cancelled, the execution may exist.
        """
        self._driven.check_open()
        return self._waiting.handle(await self._starting.submit(flow, input, execution_id, compute_target))

    # --- answering -------------------------------------------------------------------------------

    async def resume(
        self,
        execution_id: str,
        event_type: str,
        payload: Any = None,
        *,
        correlation_key: str | None = None,
        gate: int | None = None,
        resume_id: str | None = None,
    ) -> ExecutionHandle:
        """Answer the pending gate of an execution, and drive it on.

        The answer is checked against the flow's schema for that gate before anything is written; the gate's
        event and EXECUTION_RESUMED are then one atomic append, and only then does the body run. `gate` is the
        ordinal the answer is meant for, if the caller knows it.

        `resume_id` names this answer: a repeat of it returns a handle and writes nothing, in any process and
        whatever gate is open by then. It is kept as `resumeId` in the metadata of the gate's event, and
        looked for there, one read for each passed gate; an answer that was truncated is not found, and its
        repeat is judged as a new one (name the `gate` as well).

        An answer that comes before its gate is open is refused; one that comes while the suspension is on its
        way to the store waits for it. Raises `UnknownExecutionError`, `GateRefusedError` (not waiting,
        waiting for something else, or somebody else's answer was first), `ResumeIdReusedError`,
        `InputValidationError`, `JsonFormError`, `StorageWriteError`; with leases also `LeaseHeldError`, when
        another process drives the execution for longer than `lease_ttl_s` behind its open gate. Cancelled
        while the store works, the answer is written whole or not at all.
        """
        self._driven.check_open()
        live = await self._answering.resume(
            execution_id, event_type, payload, correlation_key, gate, resume_id
        )
        return self._waiting.handle(execution_id, live)

    async def answer(
        self,
        execution_id: str,
        event_type: str,
        payload: Any = None,
        *,
        correlation_key: str | None = None,
        gate: int | None = None,
        resume_id: str | None = None,
    ) -> ExecutionHandle:
        """Answer the pending gate for others to drive on from: a worker's next sweep takes it up.

        It is judged, written, refused and repeated as by `resume`, is durable when this returns, and nothing
        of the execution runs here; only one that is still driven here, behind its open gate, goes on here.
        The flow need not be known to this runtime. Where it is not, there is no schema for that gate to check
        the payload against: it goes into the log, and to the flow, as it is. Raises as `resume`.
        """
        self._driven.check_open()
        live = await self._answering.resume(
            execution_id, event_type, payload, correlation_key, gate, resume_id, leave=True
        )
        return self._waiting.handle(execution_id, live)

    async def fire(self, execution_id: str, *, fenced: bool = False) -> ExecutionHandle:
        """Pass the pending gate of an execution whose `wakeAt` has come, with the answer null.

        With `fenced` it is fenced first, unless it is driven here. Without leases that makes the writes of
        two who fire at once safe, not their effects: who comes second may fence out the first in the middle
        of its run, and then drives it on itself. Raises `GateRefusedError` when no gate waits for a timer, it
        is not due yet, or somebody else was first, and with leases `LeaseHeldError` at once, when another
        process holds its lease; otherwise as `resume`.
        """
        self._driven.check_open()
        return self._waiting.handle(execution_id, await self._answering.fire(execution_id, fenced))

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

    async def cancel(
        self, execution_id: str, reason: Any = None, *, grace_s: float = CANCEL_GRACE_S
    ) -> State:
        """Cancel an execution and return its final state. A repeat is a no-op.

        One driven here unwinds first: what runs is cancelled, no further effect starts, and `finally` blocks
        of the flow run, without any call of the context. If that takes longer than `grace_s` seconds, it ends
        over the head of its run: every call of the run raises from then on, and nothing it does is recorded.
        One that is parked ends at once and is not re-entered: no `finally` block runs. One driven elsewhere
        is fenced out, and ends at once too. Raises `ExecutionEndedError` for one that has completed or
        failed, `UnknownExecutionError`, `JsonFormError`, `StorageWriteError`. Cancelling the caller takes
        nothing back, but then the execution waits for its run without a bound.
        """
        self._driven.check_open()
        seconds_argument("grace_s", grace_s)
        return await self._cancelling.cancel(execution_id, reason, grace_s)

    # --- recovering ------------------------------------------------------------------------------

    async def recover(
        self, execution_id: str, *, max_crashes: int | None = None, fence: int | None = None
    ) -> ExecutionHandle:
        """Drive on an execution whose process died while it ran; one that rests is left as it is.

        It is fenced first: a process that still drives it, against the caller's belief, is refused at its
        next write. With a `fence` that was taken before it runs under that token, and raises
        `StaleFenceError`, with nothing run, if somebody has fenced since. The crash counts, as in
        `recover_abandoned`: at `max_crashes` (the runtime's unless given) it is set aside instead. Raises
        `UnknownExecutionError`, `UnknownFlowError`, `ExecutionSetAsideError` (release it first),
        `LeaseHeldError`, `LeaseLostError` (the lease ran out on the way: another process may have it),
        `StorageError`. Cancelling it takes nothing back.
        """
        self._driven.check_open()
        live = await self._recovering.recover(execution_id, max_crashes, fence)
        return self._waiting.handle(execution_id, live)

    async def fence(self, execution_id: str) -> int | ExecutionHandle:
        """Take a new token for an execution, to `start` it or take it over (`recover`) under that token.

        From now on whoever else drives it is refused at its next write. So what need not be fenced out is
        not: for one that this runtime drives, or that rests, its handle is returned instead. Nor is what
        could not be driven on here: raises `UnknownFlowError`, `ExecutionSetAsideError`. With leases, the
        lease decides first: raises `LeaseHeldError` when another process holds it and has written, or writes
        nothing for longer than `lease_ttl_s`. Otherwise raises `StorageError`.
        """
        self._driven.check_open()
        text_argument("execution_id", execution_id)
        fenced = await self._recovering.fence(execution_id)
        return fenced if isinstance(fenced, int) else self._waiting.handle(execution_id, fenced)

    async def recover_abandoned(
        self, *, concurrency: int = 8, max_crashes: int | None = None
    ) -> list[Recovered]:
        """Drive on every execution that is running and that nobody drives, and report on each, oldest first.

        At most `concurrency` of them run at a time: each keeps its place until it rests, and the call lasts
        until all do. New starts and answers are served meanwhile. One that is driven here is skipped; so is
        one whose lease another process holds. Without leases the store does not show who drives what: call
        this only where no other process drives executions of this store, or on the word of an operator.

        Each crash is counted durably before the body runs again, and forgotten once the execution rests;
        progress between two crashes starts the count anew, and a run that was stopped by `close` has not
        crashed. With `max_crashes` (the runtime's unless given) in a row an execution is set aside: not run,
        listed by `set_aside`, until it is released or cancelled. Raises only what listing executions raises;
        what concerns one execution is its outcome. Cancelled, it takes up no more; what it has taken up goes
        on.
        """
        self._driven.check_open()
        return await self._recovering.recover_abandoned(concurrency, max_crashes)

    async def set_aside(self, *, after: str | None = None, limit: int = 100) -> list[Recovery]:
        """Return at most `limit` executions that have crashed too often, behind the execution `after`.

        They can be read, forked and cancelled as any other. Raises as `store.recoveries.list`.
        """
        return await self.store.recoveries.list(after=after, limit=limit)

    async def release(self, execution_id: str) -> bool:
        """Put an execution back that was set aside, with no crash on its account; tell whether it was.

        The next `recover` or `recover_abandoned` runs it. Raises `StorageError`.
        """
        self._driven.check_open()
        return await self._recovering.release(execution_id)

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

    @property
    def clock(self) -> Clock:
        """The clock that this runtime was given."""
        return self._driven.deps.clock

    @property
    def entropy(self) -> Callable[[int], bytes]:
        """The source of random bytes that this runtime was given."""
        return self._driven.deps.entropy

    @property
    def leased(self) -> bool:
        """Whether what this runtime drives is driven under leases."""
        return self._driven.leases is not None

    def drives(self, execution_id: str) -> bool:
        """Whether this runtime drives an execution now."""
        return self._driven.live(execution_id) is not None

    def on_rest(self, hear: Callable[[str, State | None], object]) -> Callable[[], None]:
        """Have `hear` called with the id of each execution that this runtime stops driving, and its state.

        The state is None where the run could not go on. Returns what ends it. What `hear` raises is logged.
        """
        return self._driven.on_rest(hear)

    # --- closing ---------------------------------------------------------------------------------

    async def close(self, *, grace_s: float | None = None) -> None:
        """Stop driving. Closing a process is not a cancellation: nothing is recorded as an outcome for it.

        From now on every call that does something to an execution raises `RuntimeClosedError` (`handle`,
        `load_state` and `set_aside` only look), and no effect begins. Effects that run may finish within
        `grace_s` seconds (the runtime's unless given), and how they ended, a failure included, is recorded; a
        flow that then comes to its next effect stops there. What still runs is cancelled, has 5 s to clean
        up, and leaves no outcome; what ignores that, and the threads of sync steps, are named in a warning
        and left behind. What is queued is written (30 s at most), what was running is marked as stopped in
        order, so that it counts as no crash when it is recovered, and leases are given back.

        A repeat waits for the first call, whose grace counts. Cancelling the caller does not stop it. The
        store stays open: it is the caller's.
        """
        if grace_s is not None:
            seconds_argument("grace_s", grace_s)
        await self._closing.close(self._close_grace_s if grace_s is None else grace_s)
        if self._own_executor is not None:
            self._own_executor.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
