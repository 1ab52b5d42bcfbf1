"""The fold, on both kernels: what each event does to a state, and what no event may do."""

from __future__ import annotations

import copy
import json
from types import ModuleType
from typing import Any

import pytest

from loomfast import FOLD_VECTORS, BadInputError, BadSnapshotError, MalformedEventError
from loomfast import _events as ev
from tests.kernels.logs import random_log
from tests.kernels.make_fold_vectors import TARGET, render

VECTORS = {vector["name"]: vector for vector in FOLD_VECTORS}
SEEDS = range(40)


def fold(kernel: ModuleType, events: list[dict[str, Any]], state: Any = None) -> Any:
    return kernel.fold_events(state, [kernel.Envelope.from_json(event) for event in events])


def test_the_shipped_vectors_are_those_the_hand_written_cases_give() -> None:
    assert TARGET.read_text(encoding="utf-8") == render()


def test_there_is_a_vector_for_every_event_kind_and_for_unknown_ones() -> None:
    seen = {event["eventType"] for vector in FOLD_VECTORS for event in vector["events"]}
    assert set(ev.KIND_OF) <= seen
    assert seen - set(ev.KIND_OF)


@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_folds_to_its_state(fold_kernel: ModuleType, name: str) -> None:
    vector = VECTORS[name]
    assert fold(fold_kernel, vector["events"]).to_json() == vector["state"]


@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_survives_the_wire_form(fold_kernel: ModuleType, name: str) -> None:
    for event in VECTORS[name]["events"]:
        assert fold_kernel.Envelope.from_json(event).to_json() == event
    state = VECTORS[name]["state"]
    assert fold_kernel.State.from_json(state).to_json() == state


@pytest.mark.parametrize("seed", SEEDS)
def test_whole_one_at_a_time_and_from_every_prefix_agree(fold_kernel: ModuleType, seed: int) -> None:
    events = [fold_kernel.Envelope.from_json(event) for event in random_log(seed)]
    whole = fold_kernel.fold_events(None, events)
    prefixes = [None]
    for event in events:
        prefixes.append(fold_kernel.fold_events(prefixes[-1], [event]))
    assert prefixes[-1] == whole
    before = [None if state is None else state.to_json() for state in prefixes]
    for count, state in enumerate(prefixes):
        if count < len(events):
            assert fold_kernel.fold_events(state, events[count:]) == whole
    assert [None if state is None else state.to_json() for state in prefixes] == before


@pytest.mark.parametrize("seed", SEEDS)
def test_a_snapshot_at_any_point_and_the_rest_of_the_log_give_the_same_state(
    fold_kernel: ModuleType, seed: int
) -> None:
    log = random_log(seed)
    events = [fold_kernel.Envelope.from_json(event) for event in log]
    whole = fold_kernel.fold_events(None, events)
    for cut in range(1, len(events)):
        snapshot = json.loads(json.dumps(fold_kernel.fold_events(None, events[:cut]).to_json()))
        restored = fold_kernel.State.from_json(snapshot)
        assert fold_kernel.fold_events(restored, events[cut:]) == whole
        assert fold_kernel.fold_events(restored, events[cut:]).to_json() == whole.to_json()


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_without_the_bodies_nobody_needs_fold_like_events(fold_kernel: ModuleType, seed: int) -> None:
    events = [fold_kernel.Envelope.from_json(event) for event in random_log(seed)]
    rows = []
    for event in events:
        needed = event.kind > ev.LAST_INERT or event.stamp is None
        subject = event.subject if needed else None
        stamp = event.stamp if event.stamp is None or event.stamp < 2**63 else event.stamp - 2**64
        rows.append((event.sequence, event.kind, subject, stamp, event.body if needed else None))
    assert fold_kernel.fold_rows(None, "e", rows) == fold_kernel.fold_events(None, events)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (("0", 10, None, None, b"{}"), "sequence: must be an int, not str"),
        ((0, 10.0, None, None, b"{}"), "kind: must be an int, not float"),
        ((True, None, None, None, b"{}"), "sequence: must be an int, not bool"),
    ],
)
def test_rows_whose_numbers_are_no_ints_are_refused(
    fold_kernel: ModuleType, row: tuple[Any, ...], fault: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        fold_kernel.fold_rows(None, "e", [row])
    assert str(caught.value) == fault


@pytest.mark.parametrize("seed", SEEDS)
def test_both_kernels_write_the_same_and_read_each_other(kernels: dict[str, ModuleType], seed: int) -> None:
    log = random_log(seed)
    states = {name: fold(kernel, log) for name, kernel in kernels.items()}
    written = {name: state.to_json() for name, state in states.items()}
    for name, kernel in kernels.items():
        for other in written.values():
            assert list(other) == list(written[name])
            assert other == written[name]
            assert kernel.State.from_json(other) == states[name]


def test_events_may_be_given_in_their_wire_form(fold_kernel: ModuleType) -> None:
    log = random_log(1)
    assert fold_kernel.fold_events(None, log) == fold(fold_kernel, log)


def test_folding_nothing_returns_the_state_itself(fold_kernel: ModuleType) -> None:
    state = fold(fold_kernel, random_log(2))
    assert fold_kernel.fold_events(state, []) is state
    with pytest.raises(MalformedEventError, match="an empty log has no state"):
        fold_kernel.fold_events(None, [])


def test_a_log_that_never_stamps_never_gains_the_key(fold_kernel: ModuleType) -> None:
    state = fold(fold_kernel, VECTORS["gates are passed in order"]["events"])
    assert "_flowEmits" not in state.to_json()


def test_what_is_served_is_fresh_each_time(fold_kernel: ModuleType) -> None:
    log = VECTORS["a completed step keeps its start and its output"]["events"]
    step = fold(fold_kernel, log).steps.get("charge")
    step.output["a"].append("changed by a run")
    assert step.output == {"z": 1.5, "a": [None, "é"]}
    assert (step.served, step.attempt, step.input_digest) == (True, 1, "0c85d1734a1666a0")


def test_a_failure_is_served_only_when_typed(fold_kernel: ModuleType) -> None:
    log = copy.deepcopy(VECTORS["a typed failure is kept to be served"]["events"])
    assert fold(fold_kernel, log).steps.get("charge").served
    log[-1]["payload"]["typed"] = False
    assert not fold(fold_kernel, log).steps.get("charge").served


GATED = VECTORS["a resumption passes the gate"]["events"]
FULL = [
    *GATED,
    *(
        {**event, "sequence": 4, "id": "exec-1-4"}
        for event in VECTORS["a completion ends the execution"]["events"][1:]
    ),
]


def changed(place: int, path: str, value: Any = ...) -> list[dict[str, Any]]:
    """The log FULL with one field set, or with `...` removed."""
    log = copy.deepcopy(FULL)
    holder: Any = log[place]
    *parents, name = path.split(".")
    for parent in parents:
        holder = holder.setdefault(parent, {})
    if value is ...:
        del holder[name]
    else:
        holder[name] = value
    log[place].pop("id", None)
    return log


MALFORMED = {
    "no payload": (changed(1, "payload"), "payload"),
    "no event type": (changed(1, "eventType"), "eventType"),
    "no timestamp": (changed(1, "timestamp"), "timestamp"),
    "a text for a sequence": (changed(1, "sequence", "1"), "sequence"),
    "true for a sequence": (changed(1, "sequence", True), "sequence"),
    "a gap": (changed(2, "sequence", 3), "sequence"),
    "a repeat": (changed(2, "sequence", 1), "sequence"),
    "a first event that is not 0": (changed(0, "sequence", 1), "sequence"),
    "a first event of another kind": (changed(0, "eventType", "note"), "eventType"),
    "a second start": ([FULL[0], {**FULL[0], "sequence": 1, "id": "exec-1-1"}], "eventType"),
    "another execution's event": (changed(2, "executionId", "exec-2"), "executionId"),
    "an empty execution id": (changed(0, "executionId", ""), "executionId"),
    "a fractional timestamp": (changed(1, "timestamp", 1.5), "timestamp"),
    "a start without a flow": (changed(0, "payload.flowId"), "payload.flowId"),
    "a gate that is not a number": (changed(1, "payload.gate", "0"), "payload.gate"),
    "a gate out of order": (changed(1, "payload.gate", 1), "payload.gate"),
    "a gate on nothing": (changed(1, "payload.on"), "payload.on"),
    "a resumption of another gate": (changed(3, "payload.gate", 1), "payload.gate"),
    "a resumption on another type": (changed(3, "payload.on", "deny"), "payload.on"),
    "a resumption without its answer": (changed(2, "eventType", "note"), "payload.gate"),
    "a stamped answer": (changed(2, "metadata.flowEmit", "0" * 16), "payload.gate"),
    "a short digest": (changed(2, "metadata.flowEmit", "abc"), "metadata.flowEmit"),
    "an upper-case digest": (changed(2, "metadata.flowEmit", "0123456789ABCDEF"), "metadata.flowEmit"),
    "a digest that is a number": (changed(2, "metadata.flowEmit", 5), "metadata.flowEmit"),
    "a negative fence": (changed(2, "metadata.fence", -1), "metadata.fence"),
    "metadata that is a list": (changed(2, "metadata", [1]), "metadata"),
    "an end without an output": (changed(4, "payload.output"), "payload.output"),
    "an unknown id": ([{**FULL[0], "id": "other-0"}], "id"),
    "a kernel fact after the end": (
        [*FULL, {**FULL[1], "sequence": 5, "id": "exec-1-5"}],
        "eventType",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_log_is_refused_naming_the_field(fold_kernel: ModuleType, name: str) -> None:
    log, field = MALFORMED[name]
    with pytest.raises(MalformedEventError) as caught:
        fold(fold_kernel, log)
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize("name", MALFORMED)
def test_both_kernels_refuse_in_the_same_words(kernels: dict[str, ModuleType], name: str) -> None:
    seen = []
    for kernel in kernels.values():
        with pytest.raises(MalformedEventError) as caught:
            fold(kernel, MALFORMED[name][0])
        error = caught.value
        seen.append((str(error), error.execution_id, error.sequence, error.field, error.reason))
    assert len(set(seen)) == 1


def test_a_refused_event_leaves_the_state_as_it_was(fold_kernel: ModuleType) -> None:
    events = [fold_kernel.Envelope.from_json(event) for event in FULL]
    state = fold_kernel.fold_events(None, events[:3])
    before = state.to_json()
    with pytest.raises(MalformedEventError):
        fold_kernel.fold_events(state, [events[3], events[3]])
    assert state.to_json() == before
    assert fold_kernel.fold_events(state, events[3:]) == fold_kernel.fold_events(None, events)


BAD_STATES = {
    "not an object": (lambda state: [], "state"),
    "no execution": (lambda state: state.pop("executionId"), "executionId"),
    "an unknown status": (lambda state: state.update(status="asleep"), "status"),
    "a negative sequence": (lambda state: state.update(sequence=-1), "sequence"),
    "no start": (lambda state: state.pop("started"), "started"),
    "an end while it lives": (lambda state: state.update(status="running"), "ended"),
    "an end of another kind": (lambda state: state.update(ended={"reason": 1}), "ended.output"),
    "steps in a list": (lambda state: state.update(steps=[]), "steps"),
    "a step of no phase": (lambda state: state.update(steps={"a": {"sequence": 1}}), "steps.a.phase"),
    "an open step without a start": (
        lambda state: state.update(steps={"a": {"phase": "open", "sequence": 1}}),
        "steps.a.started",
    ),
    "a gate out of place": (lambda state: state["gates"][0]["opened"].update(gate=4), "gates[0].opened.gate"),
    "a passed gate without an answer": (lambda state: state["gates"][0].pop("answer"), "gates[0]"),
    "a decision without a choice": (
        lambda state: state.update(decisions={"d": {"sequence": 1, "recorded": {"id": "d"}}}),
        "decisions.d.recorded.choice",
    ),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_no_fold_writes_is_refused_naming_the_part(fold_kernel: ModuleType, name: str) -> None:
    spoil, field = BAD_STATES[name]
    state = fold(fold_kernel, FULL).to_json()
    spoiled = spoil(state)
    with pytest.raises(BadSnapshotError) as caught:
        fold_kernel.State.from_json(spoiled if isinstance(spoiled, list) else state)
    assert caught.value.field == field


def test_an_envelope_keeps_everything_it_was_made_of(fold_kernel: ModuleType) -> None:
    event = fold_kernel.Envelope.make(
        "e", 4, "note", {"b": -0.0, "a": "\ud800"}, 9, {"x": 1, "fence": 2, "flowEmit": "00000000000000ff"}
    )
    assert (event.id, event.kind, event.subject, event.stamp, event.fence) == (
        "e-4",
        ev.DOMAIN,
        "note",
        255,
        2,
    )
    assert event.body == b'{"b":-0.0,"a":"\\ud800"}'
    assert event.metadata == {"x": 1, "fence": 2, "flowEmit": "00000000000000ff"}
    assert event == fold_kernel.Envelope.from_json(event.to_json())
    assert event != fold_kernel.Envelope.make("e", 4, "note", None, 9)


def test_a_body_that_was_not_fetched_is_not_made_up(fold_kernel: ModuleType) -> None:
    event = fold_kernel.Envelope("e", 1, "note", None, 0)
    with pytest.raises(MalformedEventError, match="was not fetched"):
        event.payload  # noqa: B018  # reading it is the point
