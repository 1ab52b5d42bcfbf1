"""What the tests of nodes share: virtual nodes over one store, and the effects they see."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import loomfast as lf
from loomfast.testing import VirtualClock, run_virtual, seeded_entropy
from loomfast.testing.time import START_MS
from tests.runtime.harness import runtime

MINUTE = 60.0
HOUR = 60 * MINUTE
DAY = 24 * HOUR


def memory_store() -> lf.MemoryEventStore:
    """A store whose leases go by virtual time."""
    return lf.MemoryEventStore(now_ms=lambda: VirtualClock().now_ms())


def node(store: lf.EventStore, seed: int, *flows: Any, **deps: Any) -> lf.WorkflowRuntime:
    return runtime(store, *flows, **{"clock": VirtualClock(), "entropy": seeded_entropy(seed)} | deps)


def virtually(
    main: Callable[[], Coroutine[Any, Any, None]], *, seed: int = 0, start_ms: int = START_MS
) -> None:
    run_virtual(main(), seed=seed, start_ms=start_ms)


def now_s() -> float:
    """Virtual seconds since the test began."""
    return (VirtualClock().now_ms() - START_MS) / 1000


class Lost(lf.MemoryEventStore):
    """A store that does not tell what is due while it is lost."""

    def __init__(self) -> None:
        super().__init__(now_ms=lambda: VirtualClock().now_ms())
        self.lost = False
        due = self.timers.due_wakes

        async def asked(*args: Any, **options: Any) -> list[lf.Wake]:
            if self.lost:
                raise lf.StoreLostError(None, "the line is cut")
            return await due(*args, **options)

        self.timers.due_wakes = asked  # type: ignore[method-assign]


class Tokens(lf.MemoryEventStore):
    """A store that counts the fences it gives out."""

    def __init__(self) -> None:
        super().__init__(now_ms=lambda: VirtualClock().now_ms())
        self.fences: list[int] = []

    async def acquire_fence(self, execution_id: str, *, lease: lf.Lease | None = None) -> int:
        token = await super().acquire_fence(execution_id, lease=lease)
        self.fences.append(token)
        return token
