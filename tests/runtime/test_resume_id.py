"""An answer with a name: its repeat returns the first outcome and writes nothing (F09)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import loomfast as lf
from tests.conftest import OpenStore
from tests.runtime.harness import ScriptedStore, kinds, runtime


@lf.flow
async def asks(ctx: lf.WorkflowContext, times: int) -> list[Any]:
    return [await ctx.suspend("say") for _ in range(times)]


async def test_a_repeat_returns_a_handle_and_writes_nothing_whatever_has_happened_since(
    open_store: OpenStore,
) -> None:
    async with open_store() as store:
        async with runtime(store) as rt:
            await (await rt.start(asks, 3, execution_id="x")).rest()
            first = await rt.resume("x", "say", {"a": 1, "b": 2.0}, resume_id="r-1")
            await first.rest()
            log = await store.read("x")
            assert log[2].metadata == {"resumeId": "r-1"}
            # Another gate of the same type is open by now.
            again = await rt.resume("x", "say", {"b": 2, "a": 1}, resume_id="r-1")
            assert (await again.rest()).pending.ordinal == 1  # type: ignore[union-attr]
            assert await store.read("x") == log
        async with runtime(store, asks) as rt:  # after a restart
            await rt.resume("x", "say", {"a": 1, "b": 2}, resume_id="r-1")
            assert await store.read("x") == log
            for n in (2, 3):
                handle = await rt.resume("x", "say", n, resume_id=f"r-{n}")
                await handle.rest()
            for n in (2, 3):  # after the end
                assert await (await rt.resume("x", "say", n, resume_id=f"r-{n}")).result() == [
                    {"a": 1, "b": 2},
                    2,
                    3,
                ]
            with pytest.raises(lf.GateRefusedError, match="it has completed"):
                await rt.resume("x", "say", 3, resume_id="r-4")


async def test_a_name_that_stands_for_another_answer_is_refused(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store) as rt:
        await (await rt.start(asks, 2, execution_id="x")).rest()
        await (await rt.resume("x", "say", 1, resume_id="r")).rest()
        log = await store.read("x")
        for event_type, payload in (("say", 2), ("tell", 1)):
            with pytest.raises(lf.ResumeIdReusedError) as caught:
                await rt.resume("x", event_type, payload, resume_id="r")
            assert (caught.value.resume_id, caught.value.sequence) == ("r", 2)
        with pytest.raises(lf.BadInputError):
            await rt.resume("x", "say", 1, resume_id="")
        assert await store.read("x") == log


async def test_a_repeat_that_meets_its_first_on_the_way_gets_its_outcome(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store, asks) as one, runtime(store, asks) as two:
        for n in range(10):
            execution = f"x{n}"
            await (await one.start(asks, 2, execution_id=execution)).rest()
            handles = await asyncio.gather(
                *(rt.resume(execution, "say", n, resume_id="r") for rt in (one, two) for _ in range(5))
            )
            assert all(isinstance(handle, lf.ExecutionHandle) for handle in handles)
            async with asyncio.timeout(10):
                await one.handle(execution).rest()
            log = kinds(await store.read(execution))
            assert (log.count("say"), log.count("EXECUTION_RESUMED")) == (1, 1)


async def test_a_repeat_after_a_write_that_failed_is_the_first_answer() -> None:
    store = ScriptedStore()
    async with runtime(store) as rt:
        await (await rt.start(asks, 1, execution_id="x")).rest()
        store.script = {len(store.appends): OSError("line cut")}
        with pytest.raises(lf.StorageWriteError, match="line cut"):
            await rt.resume("x", "say", 1, resume_id="r")
        assert await (await rt.resume("x", "say", 1, resume_id="r")).result() == [1]


async def test_an_answer_is_found_among_many_and_one_that_was_truncated_is_not(
    open_store: OpenStore,
) -> None:
    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(asks, 72, execution_id="x")
        for n in range(70):
            await handle.rest()
            handle = await rt.resume("x", "say", n, resume_id=f"r-{n}")
        await handle.rest()
        log = await store.read("x")
        for n in (0, 37, 38, 69):
            await rt.resume("x", "say", n, resume_id=f"r-{n}")
        assert await store.read("x") == log
        await rt.truncate_prefix("x")
        with pytest.raises(lf.GateRefusedError, match="the open gate is 70, not 3"):
            await rt.resume("x", "say", 3, resume_id="r-3", gate=3)
        state = await (await rt.resume("x", "say", 3, resume_id="r-3")).rest()
        assert state.gates.get(70).payload == 3
