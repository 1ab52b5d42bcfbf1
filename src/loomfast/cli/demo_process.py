"""The two processes of `loomfast demo`. Run by it: `python -m loomfast.cli.demo_process start|resume …`.

Each one drives the flow on the log file and notes, in another file, what only this process can know: which
effects it began and which events it saw become durable. A note is one unbuffered write, so it outlives a
SIGKILL.
What must not be here: any judgement of whether the demo holds; that is for `demo_proof`, from the outside.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable

import loomfast
from loomfast.examples import migration_guard as guard

GATE = "approval"
# How long the first process waits at the gate for its end.
LIFE_S = 120.0
ANSWER = {"approved": True, "by": "loomfast demo"}


class EffectNotes(logging.Handler):
    """Notes which step's effect began: each of the example's steps logs one line when it does."""

    def __init__(self, note: Callable[[dict[str, object]], None]) -> None:
        super().__init__(logging.INFO)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note({"effect": record.funcName})


async def run(role: str, log: str, execution_id: str, shop: str, notes: str) -> None:
    """Start the execution and stay at its gate, or answer the gate and see the execution to its end."""
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(fact: dict[str, object]) -> None:
        os.write(file, loomfast.encode({"pid": os.getpid(), **fact}) + b"\n")

    guard.logger.addHandler(EffectNotes(note))
    guard.logger.setLevel(logging.INFO)
    async with (
        await loomfast.SqliteEventStore.open(log) as store,
        loomfast.WorkflowRuntime(
            store,
            flows=[guard.migration_guard],
            on_commit=lambda event: note({"durable": event.sequence}),
        ) as runtime,
    ):
        if role == "start":
            change = {"database": shop, "table": "customers", "action": "drop", "column": "fax"}
            handle = await runtime.start(guard.migration_guard, change, execution_id=execution_id)
            state = await handle.rest()
            print(state.status, flush=True)
            # Nobody answers: this process waits until it is killed, or ends itself if its parent is gone.
            await asyncio.wait_for(handle.result(), LIFE_S)
        else:
            handle = await runtime.resume(execution_id, GATE, ANSWER)
            await handle.result()
            print("completed", flush=True)


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
