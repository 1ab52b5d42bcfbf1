"""When what journals have queued up is written: in one of the loop's next turns, with what comes until then.

What lives here: `Flushes`, one look per turn at all the journals that have something to write. What must not:
how a journal writes.

A flow that has just begun a step, or gone on behind one, commits more within a turn or two: the step's task
begins in the next turn, and the flow hears of it in the one after that. So a journal is first looked at in
the next turn, and flushed once a turn has passed in which it took in nothing, or after `GATHER_TURNS`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

# How many turns of the loop what is queued waits for what follows it, while something does in each of them.
# An effect that needs no waiting takes two.
GATHER_TURNS = 3


class Flushable(Protocol):
    """What waits to be flushed."""

    def flush_due(self) -> bool:
        """Flush, unless it is worth waiting another turn; tell whether it has been done."""
        ...


class Flushes:
    """Those that wait to be flushed, looked at together: one call of the loop per turn, not one for each."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that will call `_look`
        self._waiting: list[Flushable] = []

    def add(self, flushable: Flushable) -> None:
        """Have it flushed in one of the running loop's next turns."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._waiting = loop, []  # what waited on a loop that is gone will never be flushed
            loop.call_soon(self._look)
        self._waiting.append(flushable)

    def _look(self) -> None:
        waiting, self._waiting = self._waiting, []
        looked = 0
        try:
            for flushable in waiting:
                looked += 1
                if not flushable.flush_due():
                    self._waiting.append(flushable)
        finally:  # a hook may raise what is meant for the program
            self._waiting += waiting[looked:]
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._look)
            else:
                self._loop = None
