"""The judge of a soak: what was said, held against what the store has, from a process of its own.

What lives here: `Judge`, and the program that runs one (`python -m tests.soak.judge`), which is told on its
standard input when to look and answers with one line of JSON. What must not: anything that writes to a store.

It reads the testimony from where it stopped, and then every log that was spoken of since, or has not ended:

- *Nothing acknowledged is lost.* Each event said to be durable is in the log, checksum for checksum; a
  started execution has its sequence 0, with the plan that was asked for; an accepted answer has passed its
  gate; a result is what the log ends with.
- *No completed step is repeated.* Once a step's outcome has been said to be durable, or was seen in the
  store, or was inherited by a fork, no effect of it begins. An at-most-once effect begins once, behind a
  durable STEP_STARTED. What is recorded as an output is what the effect said it did.
- *No proven emit is doubled, none is lost*: see `undisturbed`.
- The log is well-formed (`log_faults`), and the store's fold is the fold of the log.

At the end a new judge reads all of it again; then every execution must have ended, and the whole store is
verified.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import loomfast as lf
from loomfast.stores import EventStore, open_store
from loomfast.testing import log_faults
from tests.soak.flows import ANSWER, ONCE, Plan
from tests.soak.testimony import lines
from tests.soak.undisturbed import answer_to, differences, undisturbed

# What counts as an acknowledgement.
PROMISES = ("started", "existed", "committed", "answered", "result", "forked")


@dataclass
class Told:
    """What has been said of one execution, and what was seen of it."""

    plan: Plan | None = None
    exists: bool = False
    committed: dict[int, tuple[str, int]] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    results: list[Any] = field(default_factory=list)
    begun: Counter[str] = field(default_factory=Counter)
    ended: set[tuple[str, str]] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    over: bool = False


class Judge:
    """Judges one soak. `counts` says how much has been looked at."""

    def __init__(self, testimony: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._testimony = testimony
        self._read = 0
        self._told: dict[str, Told] = {}

    async def look(self, store: EventStore, *, last: bool = False) -> list[str]:
        """Return what is broken, a sentence each."""
        broken: list[str] = []
        spoken_of = set(self._listen(broken))
        for execution_id, told in self._told.items():
            if execution_id in spoken_of or not told.over:
                faults = [fault async for fault in self._execution(store, execution_id, told)]
                broken += (f"execution {execution_id!r}: {fault}" for fault in faults)
                if last and not told.over:
                    broken.append(f"execution {execution_id!r} has not ended")
        if last:
            verified = await lf.verify_store(store, lambda fault: broken.append(f"verify: {fault}"))
            self.counts["events"] = verified.events
            self.counts["executions"] = verified.executions
        return broken

    def _listen(self, broken: list[str]) -> Iterator[str]:
        with open(self._testimony, "rb") as testimony:
            testimony.seek(self._read)
            for word, *said in lines(testimony):
                self.counts[word] += 1
                if word == "broken":
                    broken.append(said[0])
                elif word in PROMISES or word in ("asked", "begin", "end"):
                    self._hear(word, self._told.setdefault(said[0], Told()), said, broken)
                    yield said[0]
            self._read = testimony.tell()

    def _hear(self, word: str, told: Told, said: list[Any], broken: list[str]) -> None:
        if word == "asked":
            told.plan = said[1]
        elif word == "committed":
            told.committed[said[1]] = (said[2], said[3])
            if said[2] == "STEP_COMPLETED":
                told.settled.add(said[4]["key"])
        elif word == "begin":
            key = said[1]
            told.begun[key] += 1
            if key in told.settled:
                broken.append(f"execution {said[0]!r}: step {key!r} was executed again")
            if key.startswith(ONCE) and told.begun[key] > 1:
                broken.append(
                    f"execution {said[0]!r}: step {key!r}, at most once, ran {told.begun[key]} times"
                )
        elif word == "end":
            told.ended.add((said[1], said[2]))
        elif word == "answered":
            told.answered.add(said[1])
        elif word == "result":
            told.results.append(said[1])
        if word in ("started", "existed", "forked"):
            told.exists = True

    # --- one execution ---------------------------------------------------------------------------

    async def _execution(self, store: EventStore, execution_id: str, told: Told) -> AsyncIterator[str]:
        log = await store.read(execution_id)
        if not log:
            if told.exists or told.committed:
                yield "was acknowledged and is lost"
            return
        state = lf.fold_events(None, log)
        told.over = state.ended is not None
        for fault in log_faults(log, ended=told.over):
            yield fault
        if await store.fold(execution_id) != state:
            yield "the store's fold is not the fold of its log"
        for fault in (*_promises(log, told), *_effects(log, told)):
            yield fault
        if told.over:
            plan = log[0].payload["input"]
            clean = await undisturbed(plan, log)
            self.counts["compared"] += 1
            for fault in differences(plan, log, clean):
                yield fault


def _promises(log: list[lf.Envelope], told: Told) -> Iterator[str]:
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
    passed = {event.payload["gate"] for event in log if event.event_type == "EXECUTION_RESUMED"}
    for gate in told.answered - passed:
        yield f"the answer to gate {gate} was acknowledged and is lost"
    for before, event in pairwise(log):
        if event.event_type == "EXECUTION_RESUMED" and event.payload["on"] == ANSWER:
            gate = event.payload["gate"]
            if before.payload != answer_to(gate):
                yield f"gate {gate} was answered with {before.payload}"
    for result in told.results:
        if log[-1].event_type != "EXECUTION_COMPLETED" or log[-1].payload["output"] != result:
            yield f"gave the result {result}, and its log ends with {log[-1].event_type} {log[-1].payload}"


def _effects(log: list[lf.Envelope], told: Told) -> Iterator[str]:
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


async def main(db: str, testimony: Path) -> None:
    judge = Judge(testimony)
    for word in sys.stdin:
        async with await open_store(db, create=False) as store:
            broken = await judge.look(store, last=word.strip() == "last")
        print(json.dumps({"broken": broken, "counts": judge.counts}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
