"""Several nodes over one store, and the order in which they reach it: said step by step, or by a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import loomfast as lf
from loomfast.testing import CrashingStore, VirtualClock, running_loop, seeded_entropy
from tests.runtime.harness import StillClock, runtime


class Script:
    """Who comes next: `A.fence`, `A.look` (the first since) and `A.write` (the first since), in any order.

    Whoever is not at the head of it waits; what it does not name comes at any time.
    """

    def __init__(self, *steps: str) -> None:
        self.left = list(steps)
        self.gone: set[str] = set()

    @asynccontextmanager
    async def step(self, node: str, verb: str) -> AsyncIterator[None]:
        own = next((step for step in self.left if step.startswith(node)), None)
        if own != f"{node}.{verb}":
            yield
            return
        while self.left[0] != own:
            await asyncio.sleep(0)
        try:
            yield
        finally:
            self.left.remove(own)

    def done(self, node: str) -> None:
        """What it has not come to it never will."""
        self.gone.add(node)
        self.left = [step for step in self.left if not step.startswith(node)]


class ScriptClock(StillClock):
    """Its pauses are longer than the script."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script

    async def sleep(self, seconds: float) -> None:
        while self.script.left:
            await asyncio.sleep(0)


class Node(lf.EventStoreDecorator):
    """The store as one node reaches it."""

    def __init__(
        self, inner: lf.EventStore, name: str, script: Script, late_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        super().__init__(inner)
        self.name, self.script, self.late_s = name, script, late_s
        self.fences: list[int] = []

    @asynccontextmanager
    async def _reach(self, verb: str) -> AsyncIterator[None]:
        async with self.script.step(self.name, verb):
            if late_s := self.late_s():
                await asyncio.sleep(late_s)
            yield

    async def acquire_fence(self, execution_id: str, *, lease: lf.Lease | None = None) -> int:
        async with self._reach("fence"):
            self.fences.append(await self.inner.acquire_fence(execution_id, lease=lease))
        return self.fences[-1]

    async def fold(self, execution_id: str, state: lf.State | None = None) -> lf.State | None:
        async with self._reach("look"):
            return await self.inner.fold(execution_id, state)

    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[lf.Envelope]:
        async with self._reach("read"):
            return await self.inner.read_range(execution_id, first, last)

    async def append(self, envelope: lf.Envelope) -> None:
        async with self._reach("write"):
            await self.inner.append(envelope)

    async def append_batch(self, envelopes: Sequence[lf.Envelope]) -> None:
        async with self._reach("write"):
            await self.inner.append_batch(envelopes)


class Effects:
    """A flow of one step, which lasts as long as `lasts` takes, and how often it has run."""

    def __init__(self, lasts: Callable[[], Awaitable[object]]) -> None:
        self.runs = 0

        @lf.step(id="charge")
        async def charge(_: Any) -> str:
            self.runs += 1
            await lasts()
            return "charged"

        @lf.flow(id="order")
        async def order(ctx: lf.WorkflowContext, input: Any) -> str:
            return await ctx.run(charge, input)

        self.flow = order


def outcomes(dispatched: Sequence[lf.Dispatched]) -> list[str]:
    return sorted(one.outcome for one in dispatched)


async def check_whole(store: lf.EventStore, execution_id: str) -> None:
    """It has come to its end, and nothing of it is recorded twice."""
    log = await store.read(execution_id)
    assert [event.event_type for event in log].count("STEP_COMPLETED") == 1
    assert log[-1].event_type == "EXECUTION_COMPLETED"
    fences = [event.fence or 0 for event in log]
    assert fences == sorted(fences)


@asynccontextmanager
async def virtual_sqlite(path: Path) -> AsyncIterator[lf.EventStore]:
    """A SQLite store under virtual time."""
    async with running_loop().outside():
        store = await lf.SqliteEventStore.open(path, synchronous="NORMAL")
    try:
        yield CrashingStore(store)
    finally:
        async with running_loop().outside():
            await store.close()


def slowness(seed: int) -> Callable[[], float]:
    """How long each call takes: mostly nothing much, at times long."""
    draw = random.Random(seed)
    return lambda: draw.choice((0.0, 0.001, 0.002, 0.005, 0.02))


def virtual_node(store: lf.EventStore, seed: int, **deps: Any) -> lf.WorkflowRuntime:
    return runtime(store, clock=VirtualClock(), entropy=seeded_entropy(seed), **deps)
