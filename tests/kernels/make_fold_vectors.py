"""Writes src/loomfast/fold_vectors.json: cases {name, events, state} that any Loom kernel's fold must
satisfy.

The states are written out by hand here, never computed by loomfast: this file is what the folds are checked
against. Run it after changing a case; a test fails while the shipped file differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[2] / "src" / "loomfast" / "fold_vectors.json"

Json = dict[str, Any]
STARTED = {"flowId": "order", "flowVersion": "3", "input": {"sku": "A-7", "count": 2}}


def log(*events: tuple[Any, ...]) -> list[Json]:
    """Number `(eventType, payload, metadata?)` tuples from 0, behind the EXECUTION_STARTED every log begins
    with.
    """
    numbered = []
    for sequence, (event_type, payload, *metadata) in enumerate((("EXECUTION_STARTED", STARTED), *events)):
        event = {
            "id": f"exec-1-{sequence}",
            "executionId": "exec-1",
            "sequence": sequence,
            "eventType": event_type,
            "payload": payload,
            "timestamp": 1_790_000_000_000 + sequence,
        }
        if metadata:
            event["metadata"] = metadata[0]
        numbered.append(event)
    return numbered


def state(sequence: int, status: str = "running", **parts: Any) -> Json:
    return {
        "executionId": "exec-1",
        "sequence": sequence,
        "status": status,
        "started": STARTED,
        **{("_flowEmits" if name == "flow_emits" else name): part for name, part in parts.items()},
    }


def trie(counts: dict[str, int]) -> list[Any]:
    """The record's form: three 16-slot levels by the hex digits 13, 14 and 15, then {digest: count}."""
    root: list[Any] = [None] * 16
    for digest, count in sorted(counts.items()):
        first, second, third = (int(digit, 16) for digit in digest[13:])
        root[first] = root[first] or [None] * 16
        root[first][second] = root[first][second] or [None] * 16
        root[first][second][third] = root[first][second][third] or {}
        root[first][second][third][digest] = count
    return root


def step_started(key: str, attempt: int = 1) -> tuple[str, Json]:
    step_id = key.partition("#")[0]
    payload = {"key": key, "stepId": step_id, "attempt": attempt, "inputDigest": "0c85d1734a1666a0"}
    return "STEP_STARTED", payload


def failed(key: str, *, typed: bool) -> tuple[str, Json]:
    error = {"type": "CardDeclined", "message": "no funds", "data": {"args": ["no funds"]}}
    return "STEP_FAILED", {"key": key, "typed": typed, "error": error}


GATE = {"gate": 0, "on": "approve", "correlationKey": "po-9", "wakeAt": 1_790_000_600_000}
ANSWER = {"approved": True, "by": "ada"}
D1, D2, D3 = "00000000000001a5", "ffffffffffff01a5", "0123456789abcdef"

VECTORS: list[Json] = [
    {"name": "a started execution is running", "events": log(), "state": state(0)},
    {
        "name": "a started step is open",
        "events": log(step_started("charge")),
        "state": state(
            1, steps={"charge": {"phase": "open", "sequence": 1, "started": step_started("charge")[1]}}
        ),
    },
    {
        "name": "a completed step keeps its start and its output",
        "events": log(
            step_started("charge"),
            ("STEP_COMPLETED", {"key": "charge", "output": {"z": 1.5, "a": [None, "é"]}}),
        ),
        "state": state(
            2,
            steps={
                "charge": {
                    "phase": "completed",
                    "sequence": 2,
                    "started": step_started("charge")[1],
                    "outcome": {"key": "charge", "output": {"z": 1.5, "a": [None, "é"]}},
                }
            },
        ),
    },
    {
        "name": "repeated calls of one step are separate keys",
        "events": log(
            step_started("ship"),
            step_started("ship#1"),
            ("STEP_COMPLETED", {"key": "ship#1", "output": 1}),
        ),
        "state": state(
            3,
            steps={
                "ship": {"phase": "open", "sequence": 1, "started": step_started("ship")[1]},
                "ship#1": {
                    "phase": "completed",
                    "sequence": 3,
                    "started": step_started("ship#1")[1],
                    "outcome": {"key": "ship#1", "output": 1},
                },
            },
        ),
    },
    {
        "name": "a typed failure is kept to be served",
        "events": log(step_started("charge"), failed("charge", typed=True)),
        "state": state(
            2,
            steps={
                "charge": {
                    "phase": "failed",
                    "sequence": 2,
                    "started": step_started("charge")[1],
                    "outcome": failed("charge", typed=True)[1],
                }
            },
        ),
    },
    {
        "name": "a second attempt replaces an untyped failure",
        "events": log(step_started("charge"), failed("charge", typed=False), step_started("charge", 2)),
        "state": state(
            3,
            steps={"charge": {"phase": "open", "sequence": 3, "started": step_started("charge", 2)[1]}},
        ),
    },
    {
        "name": "a cancelled step is unsettled",
        "events": log(step_started("charge"), ("STEP_CANCELLED", {"key": "charge", "reason": "cancelled"})),
        "state": state(
            2,
            steps={
                "charge": {
                    "phase": "cancelled",
                    "sequence": 2,
                    "started": step_started("charge")[1],
                    "outcome": {"key": "charge", "reason": "cancelled"},
                }
            },
        ),
    },
    {
        "name": "a step in doubt parks the execution",
        "events": log(step_started("pay"), ("EFFECT_INDOUBT", {"key": "pay"})),
        "state": state(
            2,
            "suspended",
            steps={
                "pay": {
                    "phase": "in-doubt",
                    "sequence": 2,
                    "started": step_started("pay")[1],
                    "outcome": {"key": "pay"},
                }
            },
        ),
    },
    {
        "name": "an outcome resolves the doubt",
        "events": log(
            step_started("pay"),
            ("EFFECT_INDOUBT", {"key": "pay"}),
            ("STEP_COMPLETED", {"key": "pay", "output": "receipt-4"}),
        ),
        "state": state(
            3,
            steps={
                "pay": {
                    "phase": "completed",
                    "sequence": 3,
                    "started": step_started("pay")[1],
                    "outcome": {"key": "pay", "output": "receipt-4"},
                }
            },
        ),
    },
    {
        "name": "a decision keeps all that was recorded with it",
        "events": log(
            (
                "DECISION_RECORDED",
                {
                    "id": "route",
                    "choice": "rail",
                    "context": {"kg": 900},
                    "alternatives": ["rail", "road"],
                    "policy": {"id": "p", "version": "2", "propensity": 0.25},
                },
            )
        ),
        "state": state(
            1,
            decisions={
                "route": {
                    "sequence": 1,
                    "recorded": {
                        "id": "route",
                        "choice": "rail",
                        "context": {"kg": 900},
                        "alternatives": ["rail", "road"],
                        "policy": {"id": "p", "version": "2", "propensity": 0.25},
                    },
                }
            },
        ),
    },
    {
        "name": "a suspension opens a gate",
        "events": log(("EXECUTION_SUSPENDED", GATE)),
        "state": state(1, "suspended", pending={"sequence": 1, "opened": GATE}),
    },
    {
        "name": "the gate's own event is its answer until it is resumed",
        "events": log(("EXECUTION_SUSPENDED", GATE), ("approve", ANSWER)),
        "state": state(2, "suspended", pending={"sequence": 2, "opened": GATE, "answer": ANSWER}),
    },
    {
        "name": "a resumption passes the gate",
        "events": log(
            ("EXECUTION_SUSPENDED", GATE),
            ("approve", ANSWER),
            ("EXECUTION_RESUMED", {"gate": 0, "on": "approve"}),
        ),
        "state": state(3, gates=[{"sequence": 2, "opened": GATE, "answer": ANSWER}]),
    },
    {
        "name": "a null answer is an answer",
        "events": log(
            ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}),
            ("go", None),
            ("EXECUTION_RESUMED", {"gate": 0, "on": "go"}),
        ),
        "state": state(3, gates=[{"sequence": 2, "opened": {"gate": 0, "on": "go"}, "answer": None}]),
    },
    {
        "name": "gates are passed in order",
        "events": log(
            ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}),
            ("go", 1),
            ("EXECUTION_RESUMED", {"gate": 0, "on": "go"}),
            ("EXECUTION_SUSPENDED", {"gate": 1, "on": "go"}),
        ),
        "state": state(
            4,
            "suspended",
            gates=[{"sequence": 2, "opened": {"gate": 0, "on": "go"}, "answer": 1}],
            pending={"sequence": 4, "opened": {"gate": 1, "on": "go"}},
        ),
    },
    {
        "name": "an event of the gate's type before the gate opens, or with a stamp, is no answer",
        "events": log(
            ("go", "early"),
            ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}),
            ("go", "emitted", {"flowEmit": D3}),
        ),
        "state": state(
            3,
            "suspended",
            pending={"sequence": 2, "opened": {"gate": 0, "on": "go"}},
            flow_emits=trie({D3: 1}),
        ),
    },
    {
        "name": "a step that ends while a gate is open leaves the execution suspended",
        "events": log(
            step_started("pay"),
            ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}),
            ("STEP_COMPLETED", {"key": "pay", "output": None}),
        ),
        "state": state(
            3,
            "suspended",
            steps={
                "pay": {
                    "phase": "completed",
                    "sequence": 3,
                    "started": step_started("pay")[1],
                    "outcome": {"key": "pay", "output": None},
                }
            },
            pending={"sequence": 2, "opened": {"gate": 0, "on": "go"}},
        ),
    },
    {
        "name": "a completion ends the execution",
        "events": log(("EXECUTION_COMPLETED", {"output": [1, 2.5, "x"]})),
        "state": state(1, "completed", ended={"output": [1, 2.5, "x"]}),
    },
    {
        "name": "a failure ends the execution",
        "events": log(("EXECUTION_FAILED", {"error": {"type": "ValueError", "message": "bad"}})),
        "state": state(1, "failed", ended={"error": {"type": "ValueError", "message": "bad"}}),
    },
    {
        "name": "a cancellation ends the execution and closes its gate",
        "events": log(
            ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}), ("EXECUTION_CANCELLED", {"reason": "by hand"})
        ),
        "state": state(2, "cancelled", ended={"reason": "by hand"}),
    },
    {
        "name": "patches, chunks and unknown kinds without a stamp fold to nothing",
        "events": log(
            ("SURFACE_PATCH", {"surface": "main", "op": "append", "path": "timeline", "value": "x"}),
            ("STREAM_CHUNK", {"channel": "answer", "chunk": "lorem"}),
            ("response.committed", {"text": "hi"}),
            ("SOMETHING_OF_A_LATER_SCHEMA", [1, 2, 3]),
        ),
        "state": state(4),
    },
    {
        "name": "a stamp counts, whatever the event's type",
        "events": log(
            ("note", "a", {"flowEmit": D1}),
            (
                "SURFACE_PATCH",
                {"surface": "main", "op": "set", "path": "p", "value": 1},
                {"flowEmit": D2},
            ),
            ("STREAM_CHUNK", {"channel": "c", "chunk": 1}, {"flowEmit": D3}),
            ("note", "a", {"flowEmit": D1}),
        ),
        "state": state(4, flow_emits=trie({D1: 2, D2: 1, D3: 1})),
    },
    {
        "name": "metadata other than the stamp is not folded",
        "events": log(
            (
                "note",
                None,
                {
                    "fence": 7,
                    "computeTarget": "gpu",
                    "forkOf": {"executionId": "e0", "sequence": 4},
                    "flowEmit": D2,
                },
            ),
        ),
        "state": state(1, flow_emits=trie({D2: 1})),
    },
    {
        "name": "domain events may follow the end",
        "events": log(("EXECUTION_COMPLETED", {"output": None}), ("audit", "kept")),
        "state": state(2, "completed", ended={"output": None}),
    },
]


def render() -> str:
    return "[\n" + ",\n".join(json.dumps(vector, ensure_ascii=False) for vector in VECTORS) + "\n]\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
