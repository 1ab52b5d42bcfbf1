"""Time as the runtime sees it. Everything that waits or reads a clock does it through a `Clock`."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


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
