"""Time as the runtime sees it. Everything that waits or reads a clock does it through a `Clock`."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol


class Clock(Protocol):
    """A source of time that can be waited on."""

    def now_ms(self) -> int:
        """Return the wall-clock time in whole milliseconds since the epoch."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait. Cancellation ends the wait."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def moment(at_ms: int) -> str | None:
    """Return milliseconds since the epoch as ISO 8601 in UTC; None for a time that has no such form."""
    try:
        at = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=at_ms)
    except OverflowError:
        return None
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def timer(clock: Clock, seconds: float) -> asyncio.Task[None]:
    """Return a task that is done after so many seconds. Whoever does not need it any more cancels it."""
    return asyncio.get_running_loop().create_task(_sleep(clock, seconds))


async def _sleep(clock: Clock, seconds: float) -> None:
    await clock.sleep(seconds)


async def done_within(clock: Clock, seconds: float, future: asyncio.Future[Any]) -> None:
    """Wait until a future is done, at most so many seconds. Raises nothing of it, and never cancels it."""
    pause = timer(clock, seconds)
    try:
        await asyncio.wait((future, pause), return_when=asyncio.FIRST_COMPLETED)
    finally:
        pause.cancel()
