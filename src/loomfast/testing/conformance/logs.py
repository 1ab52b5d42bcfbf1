"""Events and logs that the suites put into a store.

What lives here: values, and functions that make them. What must not: a store. Invariant: the same call makes
the same events, so that what comes back can be compared with what went in.
"""

from __future__ import annotations

from typing import Any, Final

from loomfast._kernels import Envelope

START: Final = {"flowId": "guard", "flowVersion": "1", "input": None}


def event(
    execution_id: str, sequence: int, event_type: str = "note", payload: object = None, **metadata: Any
) -> Envelope:
    """Return an event; sequence 0 is an EXECUTION_STARTED unless another type is asked for."""
    if sequence == 0 and event_type == "note":
        event_type, payload = "EXECUTION_STARTED", START
    return Envelope.make(execution_id, sequence, event_type, payload, 1_700_000_000_000 + sequence, metadata)


def log(execution_id: str, length: int, first: int = 0, **metadata: Any) -> list[Envelope]:
    """Return `length` events, from sequence `first` on."""
    return [event(execution_id, n, payload={"n": n}, **metadata) for n in range(first, first + length)]


def parked(execution_id: str, wake_at: int | None) -> list[Envelope]:
    """Return a log whose gate a timer answers at `wake_at` (ms); None: no timer does."""
    timer = {} if wake_at is None else {"wakeAt": wake_at}
    return [
        event(execution_id, 0),
        event(execution_id, 1, "EXECUTION_SUSPENDED", {"gate": 0, "on": "go", **timer}),
    ]


def step_started(key: str) -> dict[str, Any]:
    """Return the payload of a STEP_STARTED."""
    return {"key": key, "stepId": "s", "attempt": 1, "inputDigest": "0" * 16}


# A log of 11 events with a gate at 4, a step, stamps, metadata and a fence.
GATED: Final = [
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
