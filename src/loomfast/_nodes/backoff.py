"""What failed, and when to try it again: longer after each failure in a row.

What lives here: `BackOff`. What must not: what is tried, or a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

FIRST_MS: Final = 1_000
LONGEST_MS: Final = 60_000
# How many failures are remembered. Beyond that, those that are longest ago are tried again early.
REMEMBERED: Final = 10_000


class BackOff:
    """Failures by key. Times are in ms of one clock."""

    def __init__(self) -> None:
        # When to try again, and how long that pause is.
        self._failed: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()

    def failed(self, key: Hashable, now_ms: int) -> bool:
        """It has failed: leave it alone for twice as long as after the last time.

        Tells whether this is the first time in a row.
        """
        first = key not in self._failed
        _, pause_ms = self._failed.pop(key, (0, FIRST_MS // 2))
        pause_ms = min(2 * pause_ms, LONGEST_MS)
        self._failed[key] = now_ms + pause_ms, pause_ms
        if len(self._failed) > REMEMBERED:
            self._failed.popitem(last=False)
        return first

    def succeeded(self, key: Hashable) -> None:
        """Forget its failures."""
        self._failed.pop(key, None)

    def __contains__(self, key: Hashable) -> bool:
        """Whether it failed when it was last tried."""
        return key in self._failed

    def waits(self, key: Hashable, now_ms: int) -> bool:
        """Whether it is too early to try it again.

        A clock that was set back makes nothing wait for longer than the longest pause.
        """
        try_at, pause_ms = self._failed.get(key, (now_ms, 0))
        return now_ms < try_at <= now_ms + pause_ms

    def count(self, now_ms: int) -> int:
        """Return how many have failed. One that has long not failed again is somebody else's now, or gone."""
        while self._failed:
            key, (try_at, _) = next(iter(self._failed.items()))
            if now_ms <= try_at + LONGEST_MS:
                break
            del self._failed[key]
        return len(self._failed)
