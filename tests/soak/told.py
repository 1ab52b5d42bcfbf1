"""What was said of one execution, held against its log.

What lives here: `Told`, which takes in testimony, and `promises` and `effects`, which compare it with a log.
What must not: files and stores, and what an undisturbed log would be (undisturbed).

- *Nothing acknowledged is lost.* Each event said to be durable is in the log, checksum for checksum; a
  started execution has the plan that was asked for; an accepted answer has passed its gate, as it was given;
  a result is what the log ends with.
- *No completed step is repeated.* Once a step's outcome has been said to be durable, or was seen in the
  store, or was inherited by a fork, no effect of it begins. An at-most-once effect begins once, and once more
  for each time that it was released, behind a durable STEP_STARTED. What is recorded as an output is what the
  effect said it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import loomfast as lf
from tests.soak.flows import ONCE, Plan

# What counts as an acknowledgement, and what else is said of an execution.
PROMISES = ("started", "existed", "committed", "answered", "result", "forked")
OTHERS = ("asked", "begin", "end", "released")


@dataclass
class Told:
    """What has been said of one execution, and what was seen of it."""

    plan: Plan | None = None
    exists: bool = False
    committed: dict[int, tuple[str, int]] = field(default_factory=dict)
    answered: dict[int, Any] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    begun: Counter[str] = field(default_factory=Counter)
    released: Counter[str] = field(default_factory=Counter)
    ended: set[tuple[str, str]] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    over: bool = False

    def hear(self, word: str, said: list[Any]) -> Iterator[str]:
        """Take in a line about this execution, and yield what it shows to be broken."""
        if word in ("started", "existed", "forked"):
            self.exists = True
        elif word == "asked":
            self.plan = said[0]
        elif word == "committed":
            self.committed[said[0]] = (said[1], said[2])
            if said[1] == "STEP_COMPLETED":
                self.settled.add(said[3]["key"])
        elif word == "begin":
            key = said[0]
            self.begun[key] += 1
            if key in self.settled:
                yield f"step {key!r} was executed again"
            if key.startswith(ONCE) and self.begun[key] > 1 + self.released[key]:
                yield f"step {key!r}, at most once, ran {self.begun[key]} times"
        elif word == "end":
            self.ended.add((said[0], said[1]))
        elif word == "released":
            self.released[said[0]] += 1
        elif word == "answered":
            gate, answer = said
            if self.answered.setdefault(gate, answer) != answer:
                yield f"two answers to gate {gate} were acknowledged: {self.answered[gate]} and {answer}"
        elif word == "result":
            self.results.append(said[0])


def promises(log: list[lf.Envelope], told: Told) -> Iterator[str]:
    """Yield what was acknowledged and does not hold of the log."""
    if told.plan is not None and log[0].payload["input"] != told.plan:
        yield f"was started with {log[0].payload['input']}, not with {told.plan}"
    for sequence, (kind, checksum) in told.committed.items():
        if sequence >= len(log):
            yield f"{kind} at {sequence} was acknowledged and is lost"
            continue
        event = log[sequence]
        assert isinstance(event.body, bytes)
        if (event.event_type, crc32(event.body)) != (kind, checksum):
            yield f"{kind} at {sequence} was acknowledged, and the log has {event.event_type} {event.body!r}"
    passed = {
        event.payload["gate"]: log[event.sequence - 1].payload
        for event in log
        if event.event_type == "EXECUTION_RESUMED"
    }
    for gate, answer in told.answered.items():
        if gate not in passed:
            yield f"the answer to gate {gate} was acknowledged and is lost"
        elif passed[gate] != answer:
            yield f"the answer {answer} to gate {gate} was acknowledged, and the log has {passed[gate]}"
    for result in told.results:
        if log[-1].event_type != "EXECUTION_COMPLETED" or log[-1].payload["output"] != result:
            yield f"gave the result {result}, and its log ends with {log[-1].event_type} {log[-1].payload}"


def effects(log: list[lf.Envelope], told: Told) -> Iterator[str]:
    """Yield where the log's steps are not what effects did; note in `told` which are settled."""
    started: set[str] = set()
    doubted: set[str] = set()
    for event in log:
        key = event.payload["key"] if event.event_type.startswith("STEP_") else None
        inherited = event.metadata is not None and "forkOf" in event.metadata
        if event.event_type == "EFFECT_INDOUBT":
            doubted.add(event.payload["key"])
        elif event.event_type == "STEP_STARTED" and not inherited:
            started.add(event.payload["key"])
        elif event.event_type == "STEP_COMPLETED":
            output = event.payload["output"]
            if inherited and told.begun[event.payload["key"]]:
                yield f"step {key!r}, which it inherits, was executed"
            elif not inherited and key not in doubted and (key, output) not in told.ended:
                yield f"step {key!r} is recorded with {output!r}, which no effect gave"
            told.settled.add(event.payload["key"])
    for key in told.begun:
        if key.startswith(ONCE) and key not in started:
            yield f"step {key!r}, at most once, ran before its start was durable"
