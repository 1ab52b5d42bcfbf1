"""How often whoever waits looks for what nobody may tell of: what another process has written.

What lives here: `Polling`. What must not: what is looked for.
"""

from __future__ import annotations

import asyncio

from loomfast._runtime.clock import Clock, done_within

# The first pauses, in seconds; then a part of the time waited so far, up to the longest. A thousand that have
# waited for long cost five hundred looks a second.
POLL_S = 0.25
PART = 0.05
LONGEST_S = 2.0


class Polling:
    """The pauses of one who waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waited_s = 0.0

    def found(self) -> None:
        """There was something: the next pauses are short again."""
        self._waited_s = 0.0

    async def pause(self, told: asyncio.Future[None]) -> None:
        """Wait until it is time to look again, or until told."""
        pause_s = max(POLL_S, min(PART * self._waited_s, LONGEST_S))
        await done_within(self._clock, pause_s, told)
        self._waited_s = 0.0 if told.done() else self._waited_s + pause_s
