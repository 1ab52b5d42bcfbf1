"""Events and logs for the store tests."""

from __future__ import annotations

from typing import Any

from loomfast._kernels import Envelope

START = {"flowId": "guard", "flowVersion": "1", "input": None}


def event(
    execution_id: str, sequence: int, event_type: str = "note", payload: object = None, **metadata: Any
) -> Envelope:
    if sequence == 0 and event_type == "note":
        event_type, payload = "EXECUTION_STARTED", START
    return Envelope.make(execution_id, sequence, event_type, payload, 1_700_000_000_000 + sequence, metadata)


def log(execution_id: str, length: int, first: int = 0, **metadata: Any) -> list[Envelope]:
    return [event(execution_id, n, payload={"n": n}, **metadata) for n in range(first, first + length)]


# A log of 11 events with a gate at 4, a step, stamps, metadata and a fence.
GATED = [
    event("s", 0, computeTarget="gpu"),
    event("s", 1, payload={"k": "\ud800"}, flowEmit="ffffffffffffffff", computeTarget="gpu"),
    event("s", 2, "STEP_STARTED", {"key": "a", "stepId": "a", "attempt": 1, "inputDigest": "0" * 16}),
    event("s", 3, "STEP_COMPLETED", {"key": "a", "output": -0.0}),
    event("s", 4, "EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}, forkOf={"executionId": "q", "sequence": 4}),
    event("s", 5, "go", {"ok": True}, fence=1),
    event("s", 6, "EXECUTION_RESUMED", {"gate": 0, "on": "go"}, fence=1),
    event("s", 7, "SURFACE_PATCH", {"surface": "ui", "op": "set", "path": "a"}, flowEmit="0" * 16, fence=1),
    event("s", 8, "EFFECT_INDOUBT", {"key": "b"}, fence=1),
    event("s", 9, "\udfff", None, fence=1),
    event("s", 10, "EXECUTION_COMPLETED", {"output": 1}, fence=1),
]
