"""The context a flow talks to: every call is answered from the log, or done once and logged.

What lives here: the syscalls of one run. What must not: how events become durable (the journal), when an
emit is served (the emit rule), how an effect is executed (effects).

Every syscall first asks whether the run may go on, then whether the log has the answer, and only then acts. A
served call appends nothing. What a flow hands over is turned to its JSON form at the call, and what it is
given back is parsed afresh, so no value is shared between a flow and the log.
"""

from __future__ import annotations

import asyncio
import datetime
import inspect
import math
import uuid
from collections.abc import Callable
from typing import Any

from loomfast import _events as ev
from loomfast._core.answers import TIMER_FIRED, released
from loomfast._core.arguments import text_argument
from loomfast._core.definitions import Effect, StepDefinition, define_step
from loomfast._core.emit_rule import EmitRule, Verdict
from loomfast._core.keys import CallKeys
from loomfast._errors import (
    BadInputError,
    DeterminismError,
    JsonFormError,
    RunOverError,
    StoreReadError,
)
from loomfast._kernels import State, canonical, decode, encode, encode_digest, fnv1a64, format_digest
from loomfast._runtime.deps import RunDeps
from loomfast._runtime.effects import EffectTools, LiveStep, executing, served_failure
from loomfast._runtime.hooks import logger
from loomfast._runtime.journal import ExecutionJournal, Room
from loomfast._runtime.recorded import read_recorded
from loomfast._runtime.signals import AbortSignal, CancelSignal, SuspendSignal, WindDownSignal
from loomfast._runtime.threads import LoopCalls
from loomfast._runtime.ui import SurfacePatches

# The last millisecond of the year 9999, in UTC.
LAST_MS = 253_402_300_799_999


class WorkflowContext:
    """The syscalls of one run. It belongs to that run: a call after its end raises `RunOverError`."""

    def __init__(self, journal: ExecutionJournal, deps: RunDeps, rule: EmitRule | None = None) -> None:
        self._journal = journal
        self._deps = deps
        self._rule = rule or EmitRule()
        self._steps = CallKeys()
        self._decisions = CallKeys()
        self._consumed = 0
        self._patches: dict[str, bool] = {}
        self._live: dict[asyncio.Task[Any], LiveStep] = {}
        self._deliberating: dict[asyncio.Future[None], asyncio.Task[Any] | None] = {}
        self._settling = False
        self._calls = LoopCalls()
        self._tools = EffectTools(journal, self._rule, self._calls, deps)
        self._warned: set[str] = set()
        self._parked = False
        self._cancelled = False
        self._wound_down = False
        self._divergence: DeterminismError | None = None
        self._damage: StoreReadError | None = None
        self._ended = False

    @property
    def execution_id(self) -> str:
        """The id of this execution."""
        return self._journal.execution_id

    @property
    def segment(self) -> int:
        """How many gates this run has passed so far."""
        return self._rule.segment

    @property
    def ui(self) -> SurfacePatches:
        """Changes to a surface that a person looks at; each is one emit."""
        return SurfacePatches(self.emit)  # made anew: kept, it would be a cycle with this context

    # --- steps -----------------------------------------------------------------------------------

    async def run(
        self, step: StepDefinition | Effect, input: object = None, *, key: str | None = None
    ) -> Any:
        """Run a step once per execution and return its output in JSON form.

        Served from the log when it has completed, or failed through a declared class (which is then raised).
        `key` gives the call an identity of its own; by default it is the step's id, with `#1`, `#2` … for
        later calls. Raises `JsonFormError` for an input without JSON form, `DeterminismError` when the log
        recorded this key with another input, and whatever the effect raises. Cancelling it cancels the
        effect.
        """
        self._enter()
        definition = step if isinstance(step, StepDefinition) else define_step(step)
        if input is not None and not definition.wants_input:
            raise BadInputError(f"step {definition.id!r} takes no input")
        if key is not None:
            text_argument("key", key)
        name = self._steps.next(definition.id, key)
        asked = format_digest(fnv1a64(canonical(input)))
        known = self._journal.state.steps.get(name)
        self._consumed += known is not None
        if known is not None and self._recorded(known.sequence, lambda: known.served):
            before, outcome = self._recorded(known.sequence, lambda: _outcome(known))
            if before not in (None, asked):
                self._diverged(name, known.sequence, f"input {before}", f"input {asked}")
            if known.phase == ev.FAILED:
                raise served_failure(definition, name, outcome)
            return outcome
        self._rule.syscall_live()
        if known is not None and definition.at_most_once and not released(known):
            self._park_in_doubt(name, known.phase)
        number = 1 if known is None else self._recorded(known.sequence, lambda: known.attempt) + 1
        # The effect gets a copy in JSON form, so that flow and effect share nothing, on any run.
        given = decode(encode(input))
        live = LiveStep(self._tools, definition, name, number, asked)
        try:
            if self._journal.outcomes_pending:
                await self._journal.outcomes_durable()
            self._check_beginning()
            live.begin()
            self._consumed += live.first
            return await self._execute(live, given)
        except asyncio.CancelledError:
            # The flow goes on with a cancellation, and the next run with the step's outcome, if it has one.
            self._rule.ended_unsettled()
            raise
        except WindDownSignal:
            self._wound_down = True
            raise

    execute = run  # the records' word for it

    async def _execute(self, live: LiveStep, input: object) -> Any:
        task = asyncio.get_running_loop().create_task(live.run(input))
        self._live[task] = live
        task.add_done_callback(self._forget)
        try:
            return await live.waiter()
        except asyncio.CancelledError:
            if not self._parked and not live.closing and not task.done():
                live.stop(task)
                await asyncio.wait((task,))
            raise
        finally:
            if live.over:  # its outcome is recorded: nothing more to wait for, or to stop
                self._live.pop(task, None)
            del task  # it holds the failure, whose traceback holds this frame

    def _forget(self, task: asyncio.Task[Any]) -> None:
        live = self._live.pop(task, None)
        if live is not None:
            live.done()
        if not task.cancelled():
            task.exception()  # seen here, so that an abandoned branch makes no "never retrieved" noise

    def _park_in_doubt(self, key: str, phase: str) -> None:
        self._rule.ended_unsettled()
        if phase != ev.IN_DOUBT:
            self._journal.commit("EFFECT_INDOUBT", encode({"key": key}), key)
        self._parked = True
        raise SuspendSignal

    # --- decisions -------------------------------------------------------------------------------

    async def decide(
        self,
        id: str,
        decider: Callable[..., Any],
        *,
        context: object = None,
        alternatives: list[Any] | None = None,
        policy: dict[str, Any] | None = None,
    ) -> Any:
        """Make a choice once per execution and return it in JSON form.

        `decider` is called with `context` if it requires a parameter, and may be async. `context`,
        `alternatives` and `policy` (`{id, version, propensity}`) are recorded beside the choice. A later call
        of the same id is a decision of its own (`id#1` …). What the decider raises is raised here and not
        recorded.
        """
        self._enter()
        text_argument("id", id)
        if "#" in id:
            raise BadInputError(f"decision id {id!r}: '#' is kept for the keys of repeated calls")
        name = self._decisions.next(id)
        known = self._journal.state.decisions.get(name)
        if known is not None:
            self._consumed += 1
            return self._recorded(known.sequence, lambda: known.choice)
        grounds: dict[str, Any] = {}
        if context is not None:
            grounds["context"] = context
        if alternatives is not None:
            grounds["alternatives"] = alternatives
        if policy is not None:
            grounds["policy"] = policy
        # In JSON form from here on: what the decider does to its grounds changes nothing that is recorded.
        body = encode(grounds)
        payload = {"id": name, "choice": None, **decode(body)}
        fault = ev.payload_fault(ev.DECISION_RECORDED, payload)
        if fault is not None:
            raise BadInputError(f"decide({id!r}): {fault[0].removeprefix('payload.')} {fault[1]}")
        self._check_beginning()
        self._rule.syscall_live()
        payload["choice"] = await self._deliberate(decider, decode(body).get("context"))
        try:
            body = encode(payload)
        except JsonFormError:
            self._rule.ended_unsettled()
            raise
        # Recorded even when the run has reached a gate in the meantime: a choice is made once.
        self._check_recording()
        self._consumed += 1
        self._journal.commit("DECISION_RECORDED", body, name)
        await self._journal.room(self._rule.ended_unsettled)
        return self._journal.state.decisions.get(name).choice

    async def _deliberate(self, decider: Callable[..., Any], context: Any) -> Any:
        done = asyncio.get_running_loop().create_future()
        self._deliberating[done] = asyncio.current_task()
        self._rule.began()
        outside = executing.set(self._rule)
        try:
            choice = decider(context) if _takes_context(decider) else decider()
            return await choice if inspect.isawaitable(choice) else choice
        except BaseException:
            self._rule.ended_unsettled()
            raise
        finally:
            executing.reset(outside)
            self._rule.ended()
            del self._deliberating[done]
            done.set_result(None)

    def _once(self, id: str, make: Callable[[], Any]) -> Any:
        """Make a value once per execution: a decision that needs no deliberation."""
        self._enter()
        name = self._decisions.next(id)
        known = self._journal.state.decisions.get(name)
        if known is not None:
            self._consumed += 1
            return self._recorded(known.sequence, lambda: known.choice)
        self._rule.syscall_live()
        self._consumed += 1
        value = make()
        self._journal.commit("DECISION_RECORDED", encode({"id": name, "choice": value}), name)
        return value

    def now(self) -> datetime.datetime:
        """Return the time, in UTC to the millisecond, as it was when the execution first came here."""
        at_ms: int = self._once("ctx.now", self._deps.clock.now_ms)
        return datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(milliseconds=at_ms)

    def random(self) -> float:
        """Return a random number, 0 <= x < 1, the same on every run."""
        number: float = self._once("ctx.random", lambda: (int.from_bytes(self._deps.entropy(7)) >> 3) / 2**53)
        return number

    def uuid(self) -> uuid.UUID:
        """Return a random UUID (version 4), the same on every run."""
        text = self._once("ctx.uuid", lambda: str(uuid.UUID(bytes=self._deps.entropy(16), version=4)))
        return uuid.UUID(text)

    def patched(self, id: str) -> bool:
        """Tell whether this execution takes the path that a deploy added here under `id`.

        True, and recorded, for an execution that comes here for the first time; False for one that was past
        this place before `id` existed, which is seen by what is recorded behind it and not yet served to this
        run. Every later run gets the same answer.
        """
        self._enter()
        text_argument("id", id)
        name = f"patched##{id}"
        state = self._journal.state
        taken = self._patches.get(id)
        if taken is None:
            taken = self._patches[id] = self._takes_patch(name, state)
        return taken

    def _takes_patch(self, name: str, state: State) -> bool:
        if state.decisions.get(name) is None:
            recorded = len(state.steps) + len(state.decisions) + len(state.gates)
            if recorded > self._consumed:
                return False
            self._rule.syscall_live()
            self._journal.commit("DECISION_RECORDED", encode({"id": name, "choice": True}), name)
        self._consumed += 1
        return True

    # --- gates -----------------------------------------------------------------------------------

    async def suspend(
        self,
        on: str,
        *,
        correlation_key: str | None = None,
        wake_at: int | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Wait for an answer: park the execution until `resume` brings an event of type `on`; return its
        payload.

        Gates are matched by order: the i-th `suspend` of a run is the i-th gate of the log. `correlation_key`
        is what an answer must name to fit. With `timeout_s`, so many seconds from when the execution first
        came here, or with `wake_at`, an instant in milliseconds since the epoch, a timer answers with null if
        nobody has. The due time is recorded once. Raises `BadInputError`, and `DeterminismError` when the
        log's gate of this ordinal waits for another event type.
        """
        self._enter()
        text_argument("on", on)
        if on in ev.KIND_OF:
            raise BadInputError(f"a gate cannot wait for {on!r}: the kernel writes that type itself")
        state = self._journal.state
        ordinal = self._rule.segment
        passed = state.gates.get(ordinal)
        gate = passed if passed is not None else state.pending
        if gate is not None and gate.on != on:
            self._diverged(f"gate {ordinal}", gate.sequence, f"a gate on {gate.on!r}", f"one on {on!r}")
        if passed is not None:
            self._consumed += 1
            self._rule.gate_passed()
            return self._recorded(passed.sequence, lambda: passed.payload)
        if gate is None:
            if timeout_s is not None:
                if wake_at is not None:
                    raise BadInputError(f"suspend({on!r}): either timeout_s or wake_at, not both")
                wake_at = self._in(timeout_s, f"suspend({on!r}, timeout_s={_short(timeout_s)})")
            opened: dict[str, Any] = {"gate": ordinal, "on": on}
            if correlation_key is not None:
                opened["correlationKey"] = correlation_key
            if wake_at is not None:
                opened["wakeAt"] = wake_at
            fault = ev.payload_fault(ev.EXECUTION_SUSPENDED, opened)
            if fault is not None:
                name = fault[0].removeprefix("payload.")
                name = "wake_at, in milliseconds since the epoch," if name == "wakeAt" else name
                raise BadInputError(f"suspend({on!r}): {name} {fault[1]}")
            self._journal.commit("EXECUTION_SUSPENDED", encode(opened))
        self._parked = True
        raise SuspendSignal

    async def sleep(self, seconds: float) -> None:
        """Park until `seconds` from when the execution first came here; a timer passes this gate.

        The due time is recorded once, in absolute milliseconds, and every later run waits for the same.
        Raises `BadInputError` for a duration that is negative, not a number, or ends beyond the year 9999.
        """
        self._enter()
        gate = self._journal.state.pending or self._journal.state.gates.get(self._rule.segment)
        if gate is not None:
            await self.suspend(TIMER_FIRED)
            return
        wake_at = self._in(seconds, f"sleep({_short(seconds)})")
        await self.suspend(TIMER_FIRED, wake_at=wake_at)

    def _in(self, seconds: float, call: str) -> int:
        """Return the instant (ms) that lies so many seconds ahead. Raises `BadInputError` for the call."""
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise BadInputError(f"{call}: must be a number of seconds, 0 or more")
        now_ms = self._deps.clock.now_ms()
        if seconds > (LAST_MS - now_ms) / 1000:
            raise BadInputError(f"{call}: ends beyond the year 9999")
        return now_ms + math.ceil(seconds * 1000)

    # --- emits -----------------------------------------------------------------------------------

    def emit(self, event_type: str, payload: object = None) -> Room:
        """Append an event once per execution: a re-run that proves it was made already appends nothing.

        Its content, within its gate segment, is its identity (ADR 0102, D2 and D3). Works from the thread of
        a sync step, where it is appended without a stamp. Raises `JsonFormError` where the store persists
        JSON; the memory store takes such a payload, unstamped. Await the result to wait for room in the
        journal; a flow that emits without end and never awaits holds the whole queue in memory.
        """
        if not isinstance(event_type, str) or not event_type:
            text_argument("event_type", event_type)
        if event_type in ev.RESERVED:
            raise BadInputError(f"{event_type!r} is a kernel fact; a flow cannot emit it")
        if self._calls.here():
            self._emit(event_type, payload)
        else:
            self._calls.call(lambda: self._emit(event_type, payload))
        # Cancelled here, the flow may go on another way than a re-run, which does not wait.
        return self._journal.room(self._rule.ended_unsettled)

    def stream(self, channel: str, chunk: object) -> Room:
        """Append one chunk to a channel, once per execution; as `emit`."""
        text_argument("channel", channel)
        return self.emit("STREAM_CHUNK", {"channel": channel, "chunk": chunk})

    def _emit(self, event_type: str, payload: object) -> None:
        self._check()
        journal = self._journal
        try:
            body, digest = encode_digest(self._rule.segment, event_type, payload)
        except JsonFormError:
            if self._deps.persists_json:
                raise
            journal.commit(event_type, ev.Opaque(payload))
            return
        inside = executing.get() is self._rule
        verdict = self._rule.judge(digest, journal.state.emits.get(digest), inside=inside)
        if verdict is Verdict.STAMPED:
            journal.commit(event_type, body, None, digest)
        elif verdict is Verdict.UNSTAMPED:
            journal.commit(event_type, body)

    # --- the run's own ---------------------------------------------------------------------------

    def _enter(self) -> None:
        """Raise unless the flow itself may make a call that a re-run finds again in its place.

        Inside an effect or decider it could not: a re-run that is served their outcome makes no such call.
        """
        if not self._calls.here():
            raise BadInputError("a thread may only emit; every other call belongs to the flow itself")
        if executing.get() is self._rule:
            raise BadInputError("an effect or decider may only emit; every other call belongs to the flow")
        self._check()

    def _check(self) -> None:
        """Raise unless the run may go on: every syscall asks first, whatever the flow has caught before."""
        self._check_recording()
        if self._cancelled:
            raise CancelSignal
        if self._wound_down:
            raise WindDownSignal
        if self._parked:
            raise SuspendSignal
        if self._stopped_by is not None:
            raise self._stopped_by

    def _check_beginning(self) -> None:
        """Raise unless an effect or decider may begin: none does once the runtime closes."""
        self._check()
        if self._deps.closing.begun:
            self._wound_down = True
            raise WindDownSignal

    def _check_recording(self) -> None:
        """Raise unless this run may still record what it has done."""
        if self._journal.failure is not None:
            raise AbortSignal from self._journal.failure
        if self._ended:
            if self._parked:
                raise SuspendSignal
            raise RunOverError(f"execution {self.execution_id!r}: this run is over")

    def _recorded(self, sequence: int, read: Callable[[], Any]) -> Any:
        """Return what `read` takes from the body of an event; a damaged one stops the run."""
        try:
            return read_recorded(self.execution_id, sequence, read)
        except StoreReadError as error:
            self._damage = error
            raise

    def _diverged(self, key: str, sequence: int, recorded: str, requested: str) -> None:
        error = DeterminismError(self.execution_id, key, sequence, recorded, requested)
        if self._deps.determinism == "error":
            self._divergence = error
            raise error
        if self._deps.determinism == "warn" and key not in self._warned:
            self._warned.add(key)
            logger.warning("%s", error)

    @property
    def _stopped_by(self) -> DeterminismError | StoreReadError | None:
        """Why this run must not go on, and has no outcome: it left its log, or its log is damaged."""
        return self._divergence or self._damage

    async def _settle(self) -> None:
        """Wait until every step and decider of this run has ended, and its outcome is recorded."""
        self._settling = True
        if self._cancelled:
            self._cancel_deciders()
        while self._live or self._deliberating:
            await asyncio.wait((*self._live, *self._deliberating))
            await asyncio.sleep(0)  # a decider's own task records its choice in its next turn

    def _end(self) -> None:
        """End the run: later calls raise, and what still runs is stopped without an outcome."""
        self._ended = True
        if self._live:
            self._close()

    def _cancel(self) -> None:
        """Let no further effect start, and cancel those that run; each records its outcome."""
        self._cancelled = True
        for task, live in self._live.items():
            live.stop(task)
        if self._settling:
            self._cancel_deciders()

    def _cancel_deciders(self) -> None:
        # Only those that the flow has left behind: its own unwinding has cancelled the others, and whoever
        # cleans up is cancelled once.
        for task in self._deliberating.values():
            if task is not None and task.cancelling() == 0:
                task.cancel()

    @property
    def _busy(self) -> bool:
        """Whether an effect or decider of this run has yet to end."""
        return bool(self._live or self._deliberating)

    def _wind_down(self) -> None:
        """The runtime closes: what runs may finish; what waits to be tried again stops waiting."""
        for live in self._live.values():
            live.wind_down()

    def _close(self) -> None:
        """Stop the steps that still run without recording an outcome for them."""
        for task, live in self._live.items():
            live.stop(task, closing=True)


def _outcome(step: Any) -> tuple[str | None, Any]:
    """The digest of what a served step was asked, and its output or its failure."""
    return step.input_digest, step.error if step.phase == ev.FAILED else step.output


def _takes_context(decider: Callable[..., Any]) -> bool:
    return any(
        parameter.kind is parameter.VAR_POSITIONAL
        or (
            parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.default is parameter.empty
        )
        for parameter in inspect.signature(decider).parameters.values()
    )


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return type(value).__name__
    return text if len(text) <= 40 else f"{text[:40]}…"
