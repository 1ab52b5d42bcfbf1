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
