"""Random but well-formed logs, repeatable from a seed."""

from __future__ import annotations

import random
from typing import Any

Json = dict[str, Any]


def random_log(seed: int, length: int = 60) -> list[Json]:
    """Return a well-formed log of about `length` events in the language-neutral form."""
    return _LogMaker(random.Random(seed)).make(length)


class _LogMaker:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.events: list[Json] = []
        self.gates = 0
        self.open: list[str] = []
        self.attempts: dict[str, int] = {}

    def make(self, length: int) -> list[Json]:
        self.add("EXECUTION_STARTED", {"flowId": "f", "flowVersion": "1", "input": self.value()})
        moves = [self.emit, self.emit, self.emit, self.note, self.begin, self.finish, self.decide, self.gate]
        while len(self.events) < length:
            self.rng.choice(moves)()
        if self.rng.random() < 0.5:
            ending = self.rng.choice(
                [
                    ("EXECUTION_COMPLETED", {"output": self.value()}),
                    ("EXECUTION_FAILED", {"error": {"type": "E", "message": "m"}}),
                    ("EXECUTION_CANCELLED", {"reason": "r"}),
                ]
            )
            self.add(*ending)
        return self.events

    def add(self, event_type: str, payload: Any, metadata: Json | None = None) -> None:
        sequence = len(self.events)
        event = {
            "id": f"e-{sequence}",
            "executionId": "e",
            "sequence": sequence,
            "eventType": event_type,
            "payload": payload,
            "timestamp": 1_790_000_000_000 + sequence,
        }
        if metadata:
            event["metadata"] = metadata
        self.events.append(event)

    def value(self) -> Any:
        return self.rng.choice([None, True, 0, -7, 2**70, 1.5, -0.0, "é\ud800", [1, [2]], {"b": 1, "a": {}}])

    def emit(self) -> None:
        # Few distinct digests, some of them sharing a leaf, so that counts and collisions of place occur.
        digest = f"{self.rng.randrange(40) * 0x1001001001001:016x}"
        self.add(
            self.rng.choice(["note", "STREAM_CHUNK"]), {"channel": "c", "chunk": 1}, {"flowEmit": digest}
        )

    def note(self) -> None:
        self.add(self.rng.choice(["note", "go"]), self.value(), self.rng.choice([None, {"fence": 3, "x": 1}]))

    def begin(self) -> None:
        key = f"s{self.rng.randrange(20)}"
        self.attempts[key] = self.attempts.get(key, 0) + 1
        digest = f"{self.rng.getrandbits(64):016x}"
        payload = {"key": key, "stepId": "s", "attempt": self.attempts[key], "inputDigest": digest}
        self.add("STEP_STARTED", payload)
        self.open.append(key)

    def finish(self) -> None:
        if not self.open:
            return
        key = self.open.pop(self.rng.randrange(len(self.open)))
        kind = self.rng.choice(["STEP_COMPLETED", "STEP_FAILED", "STEP_CANCELLED", "EFFECT_INDOUBT"])
        payload: Json = {"key": key}
        if kind == "STEP_COMPLETED":
            payload["output"] = self.value()
        elif kind == "STEP_FAILED":
            payload |= {"typed": self.rng.random() < 0.5, "error": {"type": "E", "message": "m"}}
        elif kind == "STEP_CANCELLED":
            payload["reason"] = "r"
        self.add(kind, payload)

    def decide(self) -> None:
        self.add("DECISION_RECORDED", {"id": f"d{self.rng.randrange(30)}", "choice": self.value()})

    def gate(self) -> None:
        self.add("EXECUTION_SUSPENDED", {"gate": self.gates, "on": "go"})
        for _ in range(self.rng.randrange(3)):
            self.finish()
        if self.rng.random() < 0.3:
            self.add("go", self.value())
        self.add("go", self.value())
        self.add("EXECUTION_RESUMED", {"gate": self.gates, "on": "go"})
        self.gates += 1
