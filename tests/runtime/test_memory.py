"""What an execution leaves behind in the process: nothing (F37)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import loomfast as lf
from tests.conftest import OpenStore
from tests.runtime.harness import runtime


class Large:
    """A local of a flow that somebody would miss the memory of."""

    def __init__(self) -> None:
        self.held = bytearray(10_000_000)


class Declined(Exception):
    pass


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@lf.step
async def fine(fx: lf.EffectContext) -> int:
    fx.emit("inside")
    return 1


@lf.step
async def fails() -> None:
    raise OSError("no")


@lf.step
def fails_in_a_thread() -> None:
    raise OSError("no")


@lf.step(timeout_s=1)
async def fails_in_time() -> None:
    raise OSError("no")


@lf.step(timeout_s=1)
async def never_ends() -> None:
    await asyncio.Event().wait()


@lf.step(failures=(Declined,))
async def declines() -> None:
    raise Declined("no")


@lf.step
async def endless() -> None:
    await asyncio.Event().wait()


def decider_that_raises() -> None:
    raise OSError("no")


async def nothing(ctx: lf.WorkflowContext) -> None:
    pass


async def every_verb(ctx: lf.WorkflowContext) -> None:
    await ctx.run(fine)
    await asyncio.gather(ctx.run(lambda: 1), ctx.run(lambda: 2))
    await ctx.decide("d", lambda: 1)
    ctx.emit("note")
    ctx.ui.set("path", 1)
    ctx.stream("channel", "chunk")
    ctx.now(), ctx.random(), ctx.uuid(), ctx.patched("p")


def catching(call: Any) -> Any:
    async def body(ctx: lf.WorkflowContext) -> None:
        with contextlib.suppress(Exception):
            await call(ctx)

    return body


async def gathered(ctx: lf.WorkflowContext) -> None:
    await asyncio.gather(ctx.run(fails), ctx.run(fine), return_exceptions=True)


async def timed_out(ctx: lf.WorkflowContext) -> None:
    async with asyncio.timeout(0.005):
        await ctx.run(endless)


BODIES: dict[str, Any] = {
    "nothing": nothing,
    "every verb": every_verb,
    "a step that fails": catching(lambda ctx: ctx.run(fails)),
    "a thread that fails": catching(lambda ctx: ctx.run(fails_in_a_thread)),
    "a step with a timeout that fails": catching(lambda ctx: ctx.run(fails_in_time)),
    "a step that times out": catching(lambda ctx: ctx.run(never_ends)),
    "a declared failure": catching(lambda ctx: ctx.run(declines)),
    "a decider that raises": catching(lambda ctx: ctx.decide("d", decider_that_raises)),
    "a refused call": catching(lambda ctx: ctx.sleep(-1)),
    "gathered steps": gathered,
    "a timeout of the flow": catching(timed_out),
}


@pytest.mark.parametrize("ending", ["finish", "fail", "fail in a step", "cancel", "suspend"])
@pytest.mark.parametrize("body", BODIES)
async def test_a_large_local_dies_when_its_execution_ends_or_parks_without_the_cycle_collector(
    open_store: OpenStore, body: str, ending: str
) -> None:
    alive: list[weakref.ref[Large]] = []
    reached = asyncio.Event()

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        large = Large()
        alive.append(weakref.ref(large))
        await BODIES[body](ctx)
        reached.set()
        if ending == "fail":
            raise ValueError("no")
        if ending == "fail in a step":
            await ctx.run(fails)
        if ending == "cancel":
            await ctx.run(endless)
        if ending == "suspend":
            await ctx.suspend("go")
        assert large.held

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        if ending == "cancel":
            await reached.wait()
            await rt.cancel(handle.execution_id)
        await handle.rest()
        await settled()
        assert [one() for one in alive] == [None]


async def settled() -> None:
    """Let tasks that are done leave the loop."""
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("wedge", ["write", "divergence"])
async def test_a_large_local_dies_when_its_run_cannot_go_on_although_its_handle_remembers_why(
    wedge: str,
) -> None:
    alive: list[weakref.ref[Large]] = []
    store = FailingStore()

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        large = Large()
        alive.append(weakref.ref(large))
        store.failing = wedge == "write"
        await ctx.run(lambda n=None: 1, len(alive) if wedge == "divergence" else None, key="k")
        ctx.emit("note")
        await ctx.suspend("go")
        assert large.held

    async with runtime(store, lf.flow(flow)) as rt:
        handle = await rt.start(flow, execution_id="x")
        if wedge == "divergence":
            await handle.rest()
            handle = await rt.resume("x", "go")
        with pytest.raises((lf.StorageWriteError, lf.DeterminismError)):
            await handle.rest()
        await settled()
        assert [one() for one in alive] == [None] * len(alive)


class FailingStore(lf.MemoryEventStore):
    failing = False

    async def append_batch(self, envelopes: Any) -> None:
        if self.failing:
            raise OSError("disk full")
        await super().append_batch(envelopes)


async def test_five_thousand_executions_leave_no_objects_and_no_memory_behind() -> None:
    """Half of them fail; the log itself is dropped, and the cycle collector does not run."""

    async def flow(ctx: lf.WorkflowContext, input: int) -> None:
        ctx.emit("note", input)
        await ctx.run(fine)
        if input % 2:
            await ctx.run(fails)

    class Forgetful(lf.MemoryEventStore):
        def forget(self) -> None:
            for kept in (self._shared.heads, self._logs, self._listing, self._order, self._places):
                kept.clear()

    store = Forgetful()

    async def batch(rt: lf.WorkflowRuntime, count: int) -> None:
        for first in range(0, count, 100):
            handles = [await rt.start(flow, n) for n in range(first, first + 100)]
            for handle in handles:
                await handle.rest()
            store.forget()
        handles.clear()
        await settled()

    async with runtime(store) as rt:
        await batch(rt, 500)
        tracemalloc.start()
        objects, (memory, _) = len(gc.get_objects()), tracemalloc.get_traced_memory()
        await batch(rt, 5_000)
        grown = tracemalloc.get_traced_memory()[0] - memory
        tracemalloc.stop()
        assert len(gc.get_objects()) - objects < 200
        assert grown < 100_000


async def test_background_tasks_survive_the_cycle_collector_at_any_moment(open_store: OpenStore) -> None:
    async def flow(ctx: lf.WorkflowContext, input: Any) -> int:
        for n in range(20):
            ctx.emit("note", n)
            await ctx.run(fine)
            gc.collect()
        await ctx.suspend("go")
        return 7

    async with open_store() as store, runtime(store, on_event=lambda _: gc.collect(0)) as rt:
        execution = (await rt.start(flow)).execution_id
        gc.collect()
        await rt.handle(execution).rest()
        await rt.resume(execution, "go")
        gc.collect()
        assert await rt.handle(execution).result() == 7
