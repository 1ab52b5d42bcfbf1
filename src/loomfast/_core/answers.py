"""What may be said to an execution from outside, and the events that say it.

Each function looks at a state, refuses what does not fit it, and returns the drafts that are to be appended
as one atomic batch. Nothing here writes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from loomfast._core import failures, schema
from loomfast._core.definitions import FlowDefinition
from loomfast._errors import BadInputError, GateRefusedError, ResumeIdReusedError, StepRefusedError
from loomfast._events import CANCELLED, COMPLETED, FAILED, IN_DOUBT, Opaque
from loomfast._kernels import Envelope, State, canonical, decode, encode

# The event type that passes the gate of a `ctx.sleep`.
TIMER_FIRED = "timer.fired"
# The reason of the STEP_CANCELLED that lets an at-most-once step run again.
RELEASED = "released"
# The metadata of an answer that names it, so that its repeat is known.
RESUME_ID = "resumeId"


class Draft(NamedTuple):
    """An event that has no place in a log yet. `extra` is the metadata of whoever caused it, as JSON."""

    event_type: str
    body: bytes | Opaque
    subject: str | None = None
    stamp: int | None = None
    extra: bytes | None = None


def answer(
    flow: FlowDefinition | None,
    state: State,
    event_type: str,
    payload: Any,
    correlation_key: str | None,
    gate: int | None,
    resume_id: str | None,
) -> tuple[Draft, ...]:
    """Answer the pending gate. Raises `GateRefusedError`, `InputValidationError`, `JsonFormError`.

    Without its flow, the payload is any JSON.
    """

    def refuse(reason: str) -> GateRefusedError:
        return GateRefusedError(state.execution_id, event_type, reason)

    pending = state.pending
    if state.ended is not None:
        raise refuse(f"it has {_ended(state)}")
    if pending is None:
        raise refuse("no gate is open")
    if pending.on != event_type:
        raise refuse(f"gate {pending.ordinal} waits for {pending.on!r}")
    if event_type == TIMER_FIRED:
        raise refuse("only time passes a sleep; call fire once it is due")
    if gate is not None and gate != pending.ordinal:
        raise refuse(f"the open gate is {pending.ordinal}, not {gate}")
    if pending.correlation_key != correlation_key:
        raise refuse(f"gate {pending.ordinal} has correlation key {pending.correlation_key!r}")
    body = encode(payload)
    # What is judged is what is stored, not the Python value it came as.
    where = f"answer to gate {pending.ordinal} ({event_type!r})"
    if flow is not None:
        schema.check(flow.gates.get(event_type), decode(body), where)
    return _pass(pending.ordinal, event_type, body, resume_id)


def fire(state: State, now_ms: int) -> tuple[Draft, ...]:
    """Pass the pending gate because its time has come. Raises `GateRefusedError`."""
    pending = state.pending
    wake_at = None if pending is None else pending.wake_at
    if state.ended is not None or pending is None or wake_at is None:
        raise GateRefusedError(state.execution_id, TIMER_FIRED, "no gate waits for a timer")
    if wake_at > now_ms:
        raise GateRefusedError(state.execution_id, TIMER_FIRED, f"gate {pending.ordinal} is not due")
    return _pass(pending.ordinal, pending.on, encode(None))


def resolve(
    state: State, key: str, *, output: Any, error: BaseException | None, release: bool
) -> tuple[Draft, ...]:
    """Settle a step that is in doubt: it did complete, it did fail, or it may run again."""
    step = state.steps.get(key)
    if state.ended is not None or step is None or step.phase != IN_DOUBT:
        raise StepRefusedError(state.execution_id, key, "it is not in doubt")
    if release and (output is not None or error is not None):
        raise BadInputError("a step that may run again has neither an output nor an error yet")
    if release:
        return (Draft("STEP_CANCELLED", encode({"key": key, "reason": RELEASED}), key),)
    if error is not None and (output is not None or not isinstance(error, BaseException)):
        raise BadInputError("a step has either an output or an error, and an error is an exception")
    if error is not None:
        payload = {"key": key, "typed": True, "error": failures.record(error)}
        return (Draft("STEP_FAILED", encode(payload), key),)
    return (Draft("STEP_COMPLETED", encode({"key": key, "output": output}), key),)


def released(step: Any) -> bool:
    """Whether an at-most-once step may run although an attempt of it is on record."""
    return bool(step.phase == CANCELLED and decode(step.outcome)["reason"] == RELEASED)


def given(event: Envelope, resume_id: str, event_type: str, payload: Any) -> bool:
    """Whether `event` is this answer. Raises `ResumeIdReusedError` if it is another one of the same id."""
    if event.metadata.get(RESUME_ID) != resume_id:
        return False
    if event.event_type != event_type or canonical(event.payload) != canonical(decode(encode(payload))):
        raise ResumeIdReusedError(event.execution_id, resume_id, event.sequence)
    return True


def _pass(ordinal: int, event_type: str, body: bytes, resume_id: str | None = None) -> tuple[Draft, ...]:
    extra = None if resume_id is None else encode({RESUME_ID: resume_id})
    resumed = encode({"gate": ordinal, "on": event_type})
    return Draft(event_type, body, extra=extra), Draft("EXECUTION_RESUMED", resumed)


def _ended(state: State) -> str:
    return {COMPLETED: "completed", FAILED: "failed", CANCELLED: "been cancelled"}[state.status]
