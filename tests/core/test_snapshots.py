"""Snapshots as values: what they promise, and what finds them out (F07)."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from loomfast import EVENT_SCHEMA_VERSION
from loomfast._core import snapshots
from loomfast._core.snapshots import READABLE_VERSIONS, Snapshot, is_sound, snapshot_of, state_of
from loomfast._errors import BadSnapshotError, LoomError, TooDeepError
from loomfast._kernels import MAX_DEPTH, Envelope, State, decode, encode, fold_events
from loomfast._vectors import FOLD_VECTORS


def state() -> State:
    events = [
        Envelope.make("x", 0, "EXECUTION_STARTED", {"flowId": "f", "flowVersion": "1", "input": "\ud800"}, 1),
        Envelope.make("x", 1, "note", -0.0, 2, {"flowEmit": "00000000deadbeef"}),
        Envelope.make("x", 2, "EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}, 3),
    ]
    return fold_events(None, events)


def remade(snapshot: Snapshot, **changes: Any) -> Snapshot:
    """The snapshot with changes, and a checksum that is right for them."""
    changed = dataclasses.replace(snapshot, **changes)
    checksum = snapshots._checksum(
        changed.execution_id, changed.sequence, changed.schema_version, changed.body
    )
    return dataclasses.replace(changed, checksum=checksum)


@pytest.mark.parametrize("vector", FOLD_VECTORS, ids=lambda vector: vector["name"])
def test_a_state_comes_back_equal_from_its_snapshot_and_goes_on_folding(vector: dict[str, Any]) -> None:
    events = vector["events"]
    for length in range(1, len(events) + 1):
        folded = fold_events(None, events[:length])
        snapshot = snapshot_of(folded)
        restored = state_of(snapshot)
        assert restored == folded
        assert snapshot_of(restored) == snapshot
        if length < len(events):
            assert fold_events(restored, events[length:]) == fold_events(None, events)


def test_a_snapshot_says_what_it_is_and_is_the_persisted_state() -> None:
    snapshot = snapshot_of(state())
    assert (snapshot.execution_id, snapshot.sequence) == ("x", 2)
    assert snapshot.schema_version == EVENT_SCHEMA_VERSION
    assert snapshot.body == encode(state().to_json())
    assert is_sound(snapshot)


def test_the_version_that_is_written_can_be_read() -> None:
    assert EVENT_SCHEMA_VERSION in READABLE_VERSIONS


def test_the_checksum_of_a_known_snapshot_stays_what_it_is() -> None:
    assert snapshot_of(state()).checksum == "9935baa853151da7"


def test_every_byte_of_the_body_is_covered() -> None:
    snapshot = snapshot_of(state())
    for at in range(len(snapshot.body)):
        body = bytearray(snapshot.body)
        body[at] ^= 1
        with pytest.raises(BadSnapshotError) as caught:
            state_of(dataclasses.replace(snapshot, body=bytes(body)))
        error = caught.value
        assert (error.field, error.execution_id, error.sequence) == ("checksum", "x", 2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"execution_id": "y"}, "checksum"),
        ({"sequence": 1}, "checksum"),
        ({"checksum": "0" * 16}, "checksum"),
        ({"schema_version": "999"}, "schemaVersion"),
        ({"schema_version": ""}, "schemaVersion"),
        ({"body": b""}, "checksum"),
    ],
)
def test_what_is_not_as_it_was_made_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    snapshot = dataclasses.replace(snapshot_of(state()), **changes)
    assert not is_sound(snapshot)
    with pytest.raises(BadSnapshotError) as caught:
        state_of(snapshot)
    assert caught.value.field == field
    assert (caught.value.execution_id, caught.value.sequence) == (snapshot.execution_id, snapshot.sequence)
    assert repr(snapshot.execution_id) in str(caught.value)


def test_an_unknown_version_is_named_with_those_that_can_be_read() -> None:
    with pytest.raises(BadSnapshotError, match=r"'999', this loomfast reads 1\.19\.0"):
        state_of(dataclasses.replace(snapshot_of(state()), schema_version="999"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"body": b"{"}, "body"),
        ({"body": b"\xff"}, "body"),
        ({"body": b"[" * 300 + b"]" * 300}, "body"),
        ({"body": b"[]"}, None),
        ({"body": b"{}"}, None),
        ({"execution_id": "y"}, "executionId"),
        ({"sequence": 3}, "sequence"),
    ],
)
def test_a_right_checksum_does_not_make_a_state_of_what_is_none(
    changes: dict[str, Any], field: str | None
) -> None:
    snapshot = remade(snapshot_of(state()), **changes)
    with pytest.raises(BadSnapshotError) as caught:
        state_of(snapshot)
    assert field is None or caught.value.field == field
    assert caught.value.execution_id == snapshot.execution_id


def test_a_damaged_part_of_the_state_is_named() -> None:
    value = decode(snapshot_of(state()).body)
    value["status"] = "asleep"
    with pytest.raises(BadSnapshotError, match="status"):
        state_of(remade(snapshot_of(state()), body=encode(value)))


def test_a_state_too_deep_to_be_written_is_a_typed_error() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    events = [
        Envelope.make("x", 0, "EXECUTION_STARTED", {"flowId": "f", "flowVersion": "1", "input": 0}, 1),
        Envelope.make("x", 1, "EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}, 2),
        Envelope.make("x", 2, "go", deep, 3),
    ]
    with pytest.raises(TooDeepError):
        snapshot_of(fold_events(None, events))


def test_errors_of_snapshots_survive_pickling() -> None:
    error: LoomError = BadSnapshotError("checksum", "is wrong", "x", 3)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
