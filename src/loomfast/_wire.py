"""The language-neutral JSON form of events and states: reading it with every check, and writing it.

Both fold kernels delegate here, so there is one reader. Each function that builds something takes `kernel`,
the fold kernel whose classes it builds; nothing else is read from it. Speed does not matter here: the hot
paths construct `Envelope` and `State` directly from bytes that were checked when they were first made.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from loomfast import _events as ev
from loomfast._errors import BadInputError, BadSnapshotError, MalformedEventError

if TYPE_CHECKING:
    from loomfast._pure.fold import Decision, Envelope, Gate, State, Step

# --- events --------------------------------------------------------------------------------------


def make_event(
    kernel: ModuleType,
    execution_id: str,
    sequence: int,
    event_type: str,
    payload: object,
    timestamp: int,
    metadata: Mapping[str, object] | None,
) -> Any:
    """Check, encode and wrap one event.

    `metadata["flowEmit"]` and `metadata["fence"]`, where present, become the stamp and the fence. Raises
    `MalformedEventError` for a field that breaks the contract of its kind, `JsonFormError` for a payload or
    metadata without a JSON form.
    """
    _check_identity(execution_id, sequence, event_type, timestamp)
    body = kernel.encode(payload)
    kind = ev.KIND_OF.get(event_type, ev.DOMAIN)
    subject = None
    if kind != ev.DOMAIN:
        plain = kernel.decode(body)
        fault = ev.payload_fault(kind, plain)
        if fault is not None:
            raise MalformedEventError(execution_id, sequence, *fault)
        if kind in ev.SUBJECT_FIELD:
            subject = plain[ev.SUBJECT_FIELD[kind]]
    stamp = fence = extra = None
    if metadata:
        rest = dict(metadata)
        if "flowEmit" in rest:
            try:
                stamp = kernel.parse_digest(rest.pop("flowEmit"))
            except BadInputError as error:
                raise MalformedEventError(
                    execution_id, sequence, "metadata.flowEmit", "must be 16 lower-case hex digits"
                ) from error
        if "fence" in rest:
            fence = rest.pop("fence")
            if not isinstance(fence, int) or isinstance(fence, bool) or not 0 <= fence < 2**63:
                raise MalformedEventError(execution_id, sequence, "metadata.fence", "must be a whole number")
        extra = kernel.encode(rest) if rest else None
    return kernel.Envelope(execution_id, sequence, event_type, body, timestamp, subject, stamp, fence, extra)


def read_event(kernel: ModuleType, value: object) -> Any:
    """Read `{"id", "executionId", "sequence", "eventType", "payload", "timestamp", "metadata"?}`.

    `id` may be absent, since it follows from the rest. Raises as `make_event`.
    """
    if not isinstance(value, Mapping):
        raise MalformedEventError(None, None, "event", "must be an object")
    execution_id, sequence = value.get("executionId"), value.get("sequence")
    named = (
        execution_id if isinstance(execution_id, str) else None,
        sequence if isinstance(sequence, int) else None,
    )
    for name in ("executionId", "sequence", "eventType", "payload", "timestamp"):
        if name not in value:
            raise MalformedEventError(*named, name, "is missing")
    metadata = value.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise MalformedEventError(*named, "metadata", "must be an object")
    event = make_event(
        kernel,
        value["executionId"],
        value["sequence"],
        value["eventType"],
        value["payload"],
        value["timestamp"],
        metadata,
    )
    if value.get("id", event.id) != event.id:
        raise MalformedEventError(*named, "id", f"must be {event.id!r}")
    return event


def write_event(event: Envelope) -> dict[str, Any]:
    """The language-neutral form of an event; `metadata` is absent when empty."""
    value: dict[str, Any] = {
        "id": event.id,
        "executionId": event.execution_id,
        "sequence": event.sequence,
        "eventType": event.event_type,
        "payload": event.payload,
        "timestamp": event.timestamp,
    }
    metadata = event.metadata
    if metadata:
        value["metadata"] = metadata
    return value


def _check_identity(execution_id: object, sequence: object, event_type: object, timestamp: object) -> None:
    if not isinstance(execution_id, str) or not execution_id:
        raise MalformedEventError(None, None, "executionId", "must be a non-empty text")
    if not isinstance(sequence, int) or isinstance(sequence, bool) or not 0 <= sequence < 2**32:
        raise MalformedEventError(execution_id, None, "sequence", "must be a whole number from 0 to 2^32 - 1")
    if not isinstance(event_type, str) or not event_type:
        raise MalformedEventError(execution_id, sequence, "eventType", "must be a non-empty text")
    if not isinstance(timestamp, int) or isinstance(timestamp, bool) or not -(2**63) <= timestamp < 2**63:
        raise MalformedEventError(execution_id, sequence, "timestamp", "must be whole milliseconds")


# --- states --------------------------------------------------------------------------------------


def write_state(kernel: ModuleType, state: State) -> dict[str, Any]:
    """The language-neutral form of a state. Members of maps are sorted; absent parts are left out.

    `_flowEmits` is the record's trie (ADR 0102, D5); a log that never stamps never gains the key.
    """
    decode = kernel.decode
    value: dict[str, Any] = {
        "executionId": state.execution_id,
        "sequence": state.sequence,
        "status": state.status,
        "started": decode(state.started),
    }
    if state.ended is not None:
        value["ended"] = decode(state.ended)
    if len(state.steps):
        value["steps"] = {key: _write_step(decode, step) for key, step in sorted(state.steps.items())}
    if len(state.decisions):
        value["decisions"] = {
            key: {"sequence": decision.sequence, "recorded": decode(decision.body)}
            for key, decision in sorted(state.decisions.items())
        }
    if len(state.gates):
        value["gates"] = [_write_gate(decode, state.gates.get(i)) for i in range(len(state.gates))]
    if state.pending is not None:
        value["pending"] = _write_gate(decode, state.pending)
    if len(state.emits):
        value["_flowEmits"] = state.emits.to_json()
    return value


def _write_step(decode: Any, step: Step) -> dict[str, Any]:
    value: dict[str, Any] = {"phase": step.phase, "sequence": step.sequence}
    if step.started is not None:
        value["started"] = decode(step.started)
    if step.outcome is not None:
        value["outcome"] = decode(step.outcome)
    return value


def _write_gate(decode: Any, gate: Gate) -> dict[str, Any]:
    value: dict[str, Any] = {"sequence": gate.sequence, "opened": decode(gate.opened)}
    if gate.answer is not None:
        value["answer"] = decode(gate.answer)
    return value


def read_state(kernel: ModuleType, value: object) -> Any:
    """Read what `write_state` wrote.

    Raises `BadSnapshotError` naming the part that is not as the fold writes it.
    """
    whole = _mapping("state", value)
    execution_id, status = whole.get("executionId"), whole.get("status")
    if not isinstance(execution_id, str) or not execution_id:
        raise BadSnapshotError("executionId", "must be a non-empty text")
    if not isinstance(status, str) or status not in ev.STATUSES:
        raise BadSnapshotError("status", f"must be one of {', '.join(ev.STATUSES)}")
    sequence = _sequence("sequence", whole)
    started = _body(kernel, "started", ev.EXECUTION_STARTED, whole.get("started"))
    ended = None
    if status in ev.END_KIND:
        ended = _body(kernel, "ended", ev.END_KIND[status], whole.get("ended"))
    elif "ended" in whole:
        raise BadSnapshotError("ended", f"an execution that is {status} has not ended")
    steps = kernel.Table().draft()
    in_doubt = 0
    for key, member in _mapping("steps", whole.get("steps", {})).items():
        step = _read_step(kernel, f"steps.{key}", member)
        in_doubt += step.phase == ev.IN_DOUBT
        steps.set_in_place(key, step)
    decisions = kernel.Table().draft()
    for key, member in _mapping("decisions", whole.get("decisions", {})).items():
        decisions.set_in_place(key, _read_decision(kernel, f"decisions.{key}", member))
    gates = kernel.Table().draft()
    listed = whole.get("gates", [])
    if not isinstance(listed, list):
        raise BadSnapshotError("gates", "must be a list")
    for ordinal, member in enumerate(listed):
        gate = _read_gate(kernel, f"gates[{ordinal}]", ordinal, member)
        if gate.answer is None:
            raise BadSnapshotError(f"gates[{ordinal}]", "a passed gate has an answer")
        gates.set_in_place(ordinal, gate)
    pending = _read_gate(kernel, "pending", len(listed), whole["pending"]) if "pending" in whole else None
    emits = kernel.Trie.from_json(whole["_flowEmits"]) if "_flowEmits" in whole else kernel.Trie()
    return kernel.State(
        execution_id, sequence, status, started, ended, steps, decisions, gates, pending, in_doubt, emits
    )


def _read_step(kernel: ModuleType, field: str, value: object) -> Step:
    member = _mapping(field, value)
    phase = member.get("phase")
    if not isinstance(phase, str) or phase not in ev.PHASE_KIND:
        raise BadSnapshotError(f"{field}.phase", f"must be one of {', '.join(ev.PHASE_KIND)}")
    started = outcome = None
    if "started" in member:
        started = _body(kernel, f"{field}.started", ev.STEP_STARTED, member["started"])
    elif phase == ev.OPEN:
        raise BadSnapshotError(f"{field}.started", "is missing")
    if phase != ev.OPEN:
        outcome = _body(kernel, f"{field}.outcome", ev.PHASE_KIND[phase], member.get("outcome"))
    step: Step = kernel.Step(phase, _sequence(field, member), started, outcome)
    return step


def _read_decision(kernel: ModuleType, field: str, value: object) -> Decision:
    member = _mapping(field, value)
    recorded = _body(kernel, f"{field}.recorded", ev.DECISION_RECORDED, member.get("recorded"))
    decision: Decision = kernel.Decision(_sequence(field, member), recorded)
    return decision


def _read_gate(kernel: ModuleType, field: str, ordinal: int, value: object) -> Gate:
    member = _mapping(field, value)
    opened = member.get("opened")
    body = _body(kernel, f"{field}.opened", ev.EXECUTION_SUSPENDED, opened)
    if member["opened"]["gate"] != ordinal:
        raise BadSnapshotError(f"{field}.opened.gate", f"must be {ordinal}")
    answer = kernel.encode(member["answer"]) if "answer" in member else None
    gate: Gate = kernel.Gate(ordinal, member["opened"]["on"], _sequence(field, member), body, answer)
    return gate


def _sequence(field: str, member: Mapping[str, Any]) -> int:
    sequence = member.get("sequence")
    if not isinstance(sequence, int) or isinstance(sequence, bool) or not 0 <= sequence < 2**32:
        name = "sequence" if field == "sequence" else f"{field}.sequence"
        raise BadSnapshotError(name, "must be a whole number from 0 to 2^32 - 1")
    return sequence


def _body(kernel: ModuleType, field: str, kind: int, payload: object) -> bytes:
    fault = ev.payload_fault(kind, payload)
    if fault is not None:
        raise BadSnapshotError(field + fault[0].removeprefix("payload"), fault[1])
    body: bytes = kernel.encode(payload)
    return body


def _mapping(field: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadSnapshotError(field, "must be an object")
    return value
