"""Calls from outside that meet: each is whole, and none of them leaves an execution without a driver."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import loomfast as lf
from tests.conftest import OpenStore
from tests.runtime.harness import kinds, runtime


@lf.flow
async def gated(ctx: lf.WorkflowContext, input: Any) -> Any:
    answer = await ctx.suspend("go")
    await ctx.run(lf.step(id="after")(lambda: None))
    return answer


async def fenced_at_its_gate(store: lf.EventStore, execution_id: str) -> None:
    async with runtime(store) as rt:
        await (await rt.start(gated, execution_id=execution_id)).rest()
    await store.acquire_fence(execution_id)


async def test_of_two_answers_to_a_fenced_execution_one_counts_and_is_driven_to_the_end(
    open_store: OpenStore,
) -> None:
    async with open_store() as store, runtime(store, gated) as one, runtime(store, gated) as two:
        for n in range(20):
            execution = f"x-{n}"
            await fenced_at_its_gate(store, execution)
            answers = await asyncio.gather(
                one.resume(execution, "go", 1), two.resume(execution, "go", 2), return_exceptions=True
            )
            assert sorted(type(answer).__name__ for answer in answers) in (
                ["ExecutionHandle", "GateRefusedError"],
                ["GateRefusedError", "GateRefusedError"],  # fenced out in between: the refused one drives on
            )
            async with asyncio.timeout(10):
                assert await one.handle(execution).result() in (1, 2)
            assert kinds(await store.read(execution)).count("go") == 1


async def test_who_attached_to_an_execution_waits_on_when_it_is_fenced_out_here(
    open_store: OpenStore,
) -> None:
    async with open_store() as store, runtime(store, gated) as one, runtime(store, gated) as two:
        began = asyncio.Event()
        gates = [asyncio.Event(), asyncio.Event()]
        runs = iter(gates)

        @lf.flow
        async def slow(ctx: lf.WorkflowContext, input: Any) -> str:
            began.set()
            await next(runs).wait()
            ctx.emit("note")
            return "done"

        two.register(slow)
        starter = await one.start(slow, execution_id="x")
        await began.wait()
        attached = asyncio.create_task(one.handle("x").result())
        starting = asyncio.create_task(starter.result())
        await asyncio.sleep(0)
        await two.recover("x")
        gates[0].set()
        with pytest.raises(lf.StorageWriteError) as caught:  # the run that its handle began could not go on
            await starting
        assert "another process drives" in caught.value.hint.lower()
        assert "lease_ttl_s" in caught.value.hint
        gates[1].set()
        async with asyncio.timeout(10):
            assert await attached == "done"


async def test_a_cancel_whose_caller_is_cancelled_is_made_whole(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store, gated) as rt:
        for hops in range(8):
            execution = f"x-{hops}"
            await fenced_at_its_gate(store, execution)
            cancel = asyncio.ensure_future(rt.cancel(execution))
            for _ in range(hops):
                await asyncio.sleep(0)
            cancel.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await cancel
            if hops:  # before its first turn it has not been called
                async with asyncio.timeout(10):
                    while (await rt.load_state(execution)).status != "cancelled":
                        await asyncio.sleep(0.001)


async def test_loading_keeps_up_with_a_log_that_is_cut_again_and_again(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store) as driver, runtime(store, gated) as reader:

        @lf.flow
        async def session(ctx: lf.WorkflowContext, input: Any) -> None:
            for turn in range(30):
                ctx.emit("turn", turn)
                await ctx.suspend("say")

        handle = await driver.start(session, execution_id="x")
        await handle.rest()
        seen = []

        async def look() -> None:
            while len(seen) < 60:
                reader._driven.states.forget("x")
                seen.append((await reader.load_state("x")).sequence)
                await asyncio.sleep(0)

        looking = asyncio.ensure_future(look())
        for _ in range(29):
            await driver.truncate_prefix("x")
            await (await driver.resume("x", "say")).rest()
        await looking
        assert seen == sorted(seen)


async def test_what_an_outside_call_cannot_mean_is_refused_at_the_call(open_store: OpenStore) -> None:
    refused: list[str] = []

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        for call in (
            lambda: ctx.suspend("go", wake_at=1.5),
            lambda: ctx.suspend("go", correlation_key=5),
            lambda: ctx.decide("a#1", lambda: 1),
        ):
            with pytest.raises(lf.BadInputError):
                await call()
            refused.append("call")
        for bad in (None, 5, ""):
            with pytest.raises(lf.BadInputError):
                ctx.patched(bad)
            refused.append("patched")
        with pytest.raises(lf.BadInputError):
            ctx.ui.set("a" + ".a" * 1_500, 1)
        assert ctx.patched("v2")
        assert await ctx.decide("patched.v2", lambda: "asked") == "asked"

    async with open_store() as store, runtime(store) as rt:
        await (await rt.start(flow)).result()
    assert len(refused) == 6


async def test_an_emit_whose_wait_for_room_is_cancelled_leaves_the_run_unsettled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loomfast._runtime.journal.QUEUE_EVENTS", 4)

    class Slow(lf.MemoryEventStore):
        async def append_batch(self, envelopes: Any) -> None:
            await asyncio.sleep(0.05)
            await super().append_batch(envelopes)

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                for n in range(1_000):
                    await ctx.emit("chunk", n)
        ctx.emit("note", "gave up")

    store = Slow()
    async with runtime(store) as rt:
        handle = await rt.start(flow)
        await handle.result()
        assert kinds(await store.read(handle.execution_id))[-2:] == ["note", "EXECUTION_COMPLETED"]
