"""The judge of a soak: what was said, held against what the store has, from a process of its own.

What lives here: `Judge`, and the program that runs one (`python -m tests.soak.judge`), which is told on its
standard input when to look and answers with one line of JSON. What must not: anything that writes to a store.

It reads the testimony from where it stopped, and then every log that was spoken of since, or has not ended:

- Nothing acknowledged is lost and no completed step is repeated: see `told`.
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
from itertools import pairwise
from pathlib import Path

import loomfast as lf
from loomfast.stores import EventStore, open_store
from loomfast.testing import log_faults
from tests.soak.flows import ANSWER
from tests.soak.testimony import lines
from tests.soak.told import OTHERS, PROMISES, Told, effects, promises
from tests.soak.undisturbed import answer_to, differences, undisturbed


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
                elif word in PROMISES or word in OTHERS:
                    execution_id, *rest = said
                    found = self._told.setdefault(execution_id, Told()).hear(word, rest)
                    broken += (f"execution {execution_id!r}: {fault}" for fault in found)
                    yield execution_id
            self._read = testimony.tell()

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
        for fault in (*promises(log, told), *effects(log, told), *_answers(log)):
            yield fault
        if told.over:
            plan = log[0].payload["input"]
            clean = await undisturbed(plan, log)
            self.counts["compared"] += 1
            for fault in differences(plan, log, clean):
                yield fault


def _answers(log: list[lf.Envelope]) -> Iterator[str]:
    for before, event in pairwise(log):
        if event.event_type == "EXECUTION_RESUMED" and event.payload["on"] == ANSWER:
            gate = event.payload["gate"]
            if before.payload != answer_to(gate):
                yield f"gate {gate} was answered with {before.payload}"


async def main(db: str, testimony: Path) -> None:
    judge = Judge(testimony)
    for word in sys.stdin:
        async with await open_store(db, create=False) as store:
            broken = await judge.look(store, last=word.strip() == "last")
        print(json.dumps({"broken": broken, "counts": judge.counts}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
