"""Re-running a recorded log against today's code, without touching anything.

The flow runs over the whole log on a context that executes nothing: the first syscall that the log does not
answer ends the run. Then what the run did is compared with what the log holds. No effect and no decider is
called, and nothing is written; what the flow does outside its context (waiting, computing) it does for real.

What counts as a divergence, the first one found being reported:

- a served call that asks another question: another input for a step, another event type for a gate;
- a step, decision or gate that the log does not hold, while the log holds some that the run has not come to:
  a re-run of this execution would leave the log here;
- an end that differs from the recorded one.

A log of an execution that still runs or waits may be left at its end: that is where it would go on. Emits are
not compared: one that the log does not prove is appended again by a re-run, and never lost (ADR 0102, D2).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Never

from loomfast._core import failures
from loomfast._core.definitions import Effect, FlowDefinition, StepDefinition
from loomfast._core.emit_rule import EmitRule
from loomfast._core.keys import CallKeys
from loomfast._events import CANCELLED, COMPLETED, FAILED, LAST_INERT, OPEN, Opaque
from loomfast._kernels import Envelope, State, encode, fold_events
from loomfast._runtime.clock import SystemClock
from loomfast._runtime.context import WorkflowContext
from loomfast._runtime.deps import RunDeps
from loomfast._runtime.hooks import Hooks
from loomfast._runtime.journal import ExecutionJournal
from loomfast._runtime.signals import RunSignal
from loomfast.stores import MemoryEventStore

# How long a run may ask for nothing, once a branch of it has left the log, before it counts as stopped.
QUIET_S = 0.05


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where today's code leaves a log: at `sequence` it has `recorded`, and the code `requested` that."""

    execution_id: str
    sequence: int
    recorded: str
    requested: str

    def __str__(self) -> str:
        return (
            f"execution {self.execution_id!r} at sequence {self.sequence}: "
            f"the log has {self.recorded}, the code {self.requested}"
        )


class _LogEnds(RunSignal):
    """The run asks for something that the log does not answer."""


class _Asked(CallKeys):
    """Remembers which keys a run has asked for, and says so to its owner."""

    __slots__ = ("_noun", "_run", "keys", "last")

    def __init__(self, run: _Run, noun: str) -> None:
        super().__init__()
        self._run = run
        self._noun = noun
        self.keys: set[str] = set()
        self.last = ""

    def next(self, call_id: str, explicit: str | None = None) -> str:
        key = super().next(call_id, explicit)
        self.keys.add(key)
        self.last = key
        self._run.latest = f"{self._noun} {key!r}"
        return key


class _ReplayRule(EmitRule):
    """Ends the run where a syscall would be executed."""

    __slots__ = ()

    def syscall_live(self) -> Never:
        raise _LogEnds


class _ReplayJournal(ExecutionJournal):
    """Holds the state of the log. Drops emits, and ends the run where a kernel fact would be appended."""

    run: _Run

    def commit(
        self,
        event_type: str,
        body: bytes | Opaque,
        subject: str | None = None,
        stamp: int | None = None,
        *,
        extra: bytes | None = None,
    ) -> Envelope:
        envelope = self.envelope(event_type, body, subject, stamp, extra=extra)
        if envelope.kind > LAST_INERT:
            self.run.latest = event_type
            raise _LogEnds
        return envelope


class _Run(WorkflowContext):
    """A run of today's code over a log: what it asked for, and where it stopped.

    A branch that asks for what the log does not answer stops there; the others go on. `blind`: it asked for a
    step whose recorded outcome is not served, so that nobody can know how the flow would go on.
    """

    def __init__(self, journal: _ReplayJournal, deps: RunDeps) -> None:
        super().__init__(journal, deps, _ReplayRule())
        journal.run = self
        self.latest = ""
        self.blind = False
        self.stopped = 0
        self._steps = self.asked_steps = _Asked(self, "step")
        self._decisions = self.asked_decisions = _Asked(self, "decision")

    async def run(
        self, step: StepDefinition | Effect, input: object = None, *, key: str | None = None
    ) -> Any:
        try:
            return await super().run(step, input, key=key)
        except _LogEnds:
            known = self._journal.state.steps.get(self.asked_steps.last)
            self.blind = self.blind or (known is not None and known.phase != OPEN)
            return await self._stop()

    execute = run

    async def decide(self, id: str, decider: Callable[..., Any], **grounds: Any) -> Any:
        try:
            return await super().decide(id, decider, **grounds)
        except _LogEnds:
            return await self._stop()

    async def _stop(self) -> Never:
        self.stopped += 1
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nothing wakes a branch that has left the log")

    def progress(self) -> tuple[int, int, int]:
        """Return how much the run has asked for so far."""
        return len(self.asked_steps.keys), len(self.asked_decisions.keys), self.segment

    def missed(self) -> tuple[int, str] | None:
        """Return the earliest `(sequence, what)` that the log holds and the run has not come to."""
        state = self._journal.state
        missed = [
            (step.sequence, f"step {key!r}")
            for key, step in state.steps.items()
            if key not in self.asked_steps.keys
        ]
        patches = {f"patched##{id}" for id in self._patches}
        missed += [
            (decision.sequence, f"decision {key!r}")
            for key, decision in state.decisions.items()
            if key not in self.asked_decisions.keys | patches
        ]
        gates = [state.gates.get(ordinal) for ordinal in range(self.segment, len(state.gates))]
        if state.pending is not None and not self._parked:
            gates.append(state.pending)
        missed += [(gate.sequence, f"gate {gate.ordinal} on {gate.on!r}") for gate in gates]
        return min(missed, default=None)


async def check_log(flow: FlowDefinition, events: Sequence[Envelope]) -> Divergence | None:
    """Return where `flow` leaves the log, or None if it does not.

    Raises `MalformedEventError` for a bad log, `StoreReadError` for one that holds something unreadable.
    """
    state = fold_events(None, events)
    journal = _ReplayJournal(state.execution_id, MemoryEventStore(), SystemClock(), Hooks(), state=state)
    with ThreadPoolExecutor(1) as executor:
        context = contextvars.copy_context()
        run = _Run(journal, RunDeps(SystemClock(), bytes, executor, (), "error", True, context))
        task = asyncio.ensure_future(flow.function(run, state.input))
        while not task.done():
            asked = run.progress()
            await asyncio.wait((task,), timeout=QUIET_S)
            if run.stopped and asked == run.progress():  # every branch waits for one that has left the log
                task.cancel()
                await asyncio.wait((task,))
        ending = _ending(task)
    if run._damage is not None:
        raise run._damage
    if run._divergence is not None:
        found = run._divergence
        return Divergence(state.execution_id, found.sequence, found.recorded, f"asks for {found.requested}")
    return _compare(state, run, *ending)


def _ending(task: asyncio.Task[Any]) -> tuple[str, Any]:
    """Return a run's status and its output or failure; no status for one that left the log or parked."""
    if task.cancelled():
        return "", None
    error = task.exception()
    if error is None:
        return COMPLETED, task.result()
    others = error.split(RunSignal)[1] if isinstance(error, BaseExceptionGroup) else error
    if others is None or isinstance(error, RunSignal):
        return "", None
    return FAILED, failures.record(error)


def _compare(state: State, run: _Run, ended: str, value: Any) -> Divergence | None:
    def diverges(sequence: int, recorded: str, requested: str) -> Divergence:
        return Divergence(state.execution_id, sequence, recorded, requested)

    does = {
        COMPLETED: "ends with an output",
        FAILED: f"fails: {value}",
        "": f"goes on with {run.latest}",
    }[ended]
    if not ended and run.blind:
        return None  # what comes behind an outcome that is not served, nobody can know without executing it
    missed = run.missed()
    if missed is not None and not run._parked and (ended or state.ended is None or state.status != CANCELLED):
        return diverges(*missed, does)
    if state.ended is None or state.status == CANCELLED:
        return None
    if ended != state.status:
        return diverges(state.sequence, f"an end: {state.status}", does)
    if ended == COMPLETED and encode(value) != encode(state.output):
        return diverges(state.sequence, f"the output {state.output!r}", f"ends with {value!r}")
    if ended == FAILED and value["type"] != state.error["type"]:
        return diverges(state.sequence, f"the failure {state.error['type']}", does)
    return None
