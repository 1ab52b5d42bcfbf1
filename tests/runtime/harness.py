"""What the runtime's tests share: a clock that stands still, ids that count, and a log that reads at a
glance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import loomfast as lf
from loomfast.testing import counted_ids


class StillClock:
    """Shows a time that grows by one at each look, and sleeps only as long as it takes others to go on."""

    def __init__(self) -> None:
        self.time = 1_790_000_000_000

    def now_ms(self) -> int:
        self.time += 1
        return self.time

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


def runtime(store: lf.EventStore, *flows: Any, **deps: Any) -> lf.WorkflowRuntime:
    deps.setdefault("clock", StillClock())
    deps.setdefault("id_factory", counted_ids())
    deps.setdefault("close_grace_s", 0)
    return lf.WorkflowRuntime(store, flows=flows, **deps)


def kinds(events: Iterable[lf.Envelope]) -> list[str]:
    """The event types of a log, stamped ones with a trailing `*`."""
    return [event.event_type + ("*" if event.stamp is not None else "") for event in events]


def deployed(*versions: Any) -> lf.FlowDefinition:
    """A flow whose n-th run is the n-th of these functions: what a deploy does to an execution in flight."""
    code: Iterator[Any] = iter(versions)

    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        return await next(code)(ctx)

    return lf.flow(flow)


def parking(version: Any) -> Any:
    """`version`, and then one gate after the other without end."""

    async def function(ctx: lf.WorkflowContext) -> Any:
        await version(ctx)
        while True:
            await ctx.suspend("go")

    return function


async def run_through(store: lf.EventStore, *versions: Any, **deps: Any) -> list[list[lf.Envelope]]:
    """Run these functions one after the other as the runs of execution `x`, each time answering its gate with
    null, and return the log after each run.
    """
    logs = []
    async with runtime(store, **deps) as rt:
        handle = await rt.start(deployed(*map(parking, versions)), execution_id="x")
        for run in range(len(versions)):
            if run > 0:
                handle = await rt.resume("x", "go")
            assert (await handle.rest()).status == "suspended"
            logs.append(await store.read("x"))
    return logs


def of(events: Iterable[lf.Envelope], *event_types: str) -> list[str]:
    """`kinds`, of these event types only."""
    return [kind for kind in kinds(events) if kind.rstrip("*") in event_types]


STEP_KINDS = ("STEP_STARTED", "STEP_COMPLETED", "STEP_FAILED", "STEP_CANCELLED", "EFFECT_INDOUBT")


def steps_of(log: list[lf.Envelope]) -> list[str]:
    """What became of the steps, without the prefix `STEP_`."""
    return [kind.removeprefix("STEP_") for kind in of(log, *STEP_KINDS)]


async def turns(count: int) -> None:
    """Let others go on: a step's effect begins some turns of the loop after the call."""
    for _ in range(count):
        await asyncio.sleep(0)


class ScriptedStore(lf.MemoryEventStore):
    """A memory store whose appends can be told to fail: `script` maps the n-th append to what it does.

    An entry is an exception to raise, or a function called with the envelopes before the append; whatever the
    function raises is raised. `appends` records what each append was asked to write, and how.
    """

    def __init__(
        self, script: dict[int, Exception | Callable[[Sequence[lf.Envelope]], Any]] | None = None
    ) -> None:
        super().__init__()
        self.script = script or {}
        self.appends: list[tuple[str, list[str]]] = []

    async def append(self, envelope: lf.Envelope) -> None:
        await self._play("append", (envelope,))
        await super().append_batch((envelope,))

    async def append_batch(self, envelopes: Sequence[lf.Envelope]) -> None:
        await self._play("append_batch", envelopes)
        await super().append_batch(envelopes)

    async def _play(self, verb: str, envelopes: Sequence[lf.Envelope]) -> None:
        act = self.script.get(len(self.appends))
        self.appends.append((verb, [envelope.id for envelope in envelopes]))
        if isinstance(act, Exception):
            raise act
        if act is not None:
            done = act(envelopes)
            if asyncio.iscoroutine(done):
                await done


class DyingStore(lf.MemoryEventStore):
    """Writes so many events, and then dies: nothing is written any more, and what is there can be read."""

    def __init__(self, events: int) -> None:
        super().__init__()
        self.left = events

    async def append_batch(self, envelopes: Any) -> None:
        if len(envelopes) > self.left:
            self.left = 0
            raise OSError("the machine is gone")
        await super().append_batch(envelopes)
        self.left -= len(envelopes)
