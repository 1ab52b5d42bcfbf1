"""Steps that run at most once: durable before they begin, in doubt when nobody knows how they ended."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import loomfast as lf
from tests.conftest import OpenStore
from tests.runtime.harness import (
    DyingStore,
    kinds,
    run_through,
    runtime,
)


class Coded(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


async def test_the_start_of_an_at_most_once_step_is_durable_before_its_effect(open_store: OpenStore) -> None:
    seen: list[str] = []

    async with open_store() as store:

        @lf.step(at_most_once=True)
        async def pay() -> None:
            seen.extend(kinds(await store.read("x")))

        async def flow(ctx: lf.WorkflowContext) -> None:
            ctx.emit("note")
            await ctx.run(pay)

        await run_through(store, flow)
    assert seen == ["EXECUTION_STARTED", "note*", "STEP_STARTED"]


async def test_over_a_crash_after_any_write_an_at_most_once_effect_never_runs_twice() -> None:
    fates: list[str] = []
    for writes in range(7):
        paid: list[int] = []

        @lf.step(at_most_once=True)
        async def pay(paid: list[int] = paid) -> str:
            paid.append(1)
            return "paid"

        async def flow(ctx: lf.WorkflowContext, input: Any, pay: Any = pay) -> Any:
            ctx.emit("note")
            return await ctx.run(pay)

        store = DyingStore(writes)
        async with runtime(store, batch_events=1) as rt:
            with contextlib.suppress(lf.StorageWriteError):
                await (await rt.start(flow, execution_id="x")).result()
        store.left = 1_000
        if await store.last_sequence("x") is None:
            continue
        async with runtime(store, lf.flow(flow)) as rt:
            state = await (await rt.recover("x")).rest()
        fates.append(f"{writes}: {state.status}")
        assert len(paid) <= 1
        if state.status == "completed":
            assert paid == [1]
    assert fates == [
        "1: completed",  # only the start is durable
        "2: completed",
        "3: suspended",  # STEP_STARTED is durable: the effect may have run
        "4: completed",
        "5: completed",
        "6: completed",
    ]


@pytest.mark.parametrize("ending", ["crash", "failure"])
@pytest.mark.parametrize("verdict", ["output", "error", "release"])
async def test_a_step_in_doubt_parks_until_somebody_says_what_became_of_it(ending: str, verdict: str) -> None:
    calls: list[int] = []
    seen: list[str] = []

    @lf.step(at_most_once=True, failures=(Coded,))
    async def pay() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("line dropped")
        return "paid at last"

    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        try:
            seen.append(await ctx.run(pay))
        except OSError:
            return await ctx.suspend("go")
        except Coded as error:
            seen.append(f"{type(error).__name__} {error.code}")
        await ctx.suspend("go")

    store = DyingStore(2 if ending == "crash" else 100)
    async with runtime(store, lf.flow(flow)) as rt:
        handle = await rt.start(flow, execution_id="x")
        if ending == "crash":
            with pytest.raises(lf.StorageWriteError):
                await handle.rest()
            store.left = 100
            await rt.recover("x")
        else:
            await handle.rest()
            await rt.resume("x", "go")
        state = await rt.handle("x").rest()
        assert (state.status, state.steps.get("pay").phase, state.pending) == ("suspended", "in-doubt", None)
        assert (await (await rt.recover("x")).rest()).sequence == state.sequence
        with pytest.raises(lf.GateRefusedError):
            await rt.resume("x", "go")
        with pytest.raises(lf.StepRefusedError, match="not in doubt"):
            await rt.resolve_in_doubt("x", "another", "y")
        with pytest.raises(lf.JsonFormError):
            await rt.resolve_in_doubt("x", "pay", object())
        said = {
            "output": {"output": "it was paid"},
            "error": {"error": Coded(4, "refused")},
            "release": {"release": True},
        }[verdict]
        await (await rt.resolve_in_doubt("x", "pay", **said)).rest()
        with pytest.raises(lf.StepRefusedError, match="not in doubt"):
            await rt.resolve_in_doubt("x", "pay", "again")
    assert seen == [{"output": "it was paid", "error": "Coded 4", "release": "paid at last"}[verdict]]
    assert len(calls) == (2 if verdict == "release" else 1)


async def test_a_step_that_was_released_and_crashes_again_is_in_doubt_again() -> None:
    calls: list[int] = []

    @lf.step(at_most_once=True)
    async def pay() -> None:
        calls.append(1)
        raise OSError("line dropped")

    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        await ctx.run(pay)

    store = DyingStore(2)
    async with runtime(store, lf.flow(flow)) as rt:
        with pytest.raises(lf.StorageWriteError):
            await (await rt.start(flow, execution_id="x")).rest()
        for turn in range(1, 4):
            store.left = 100
            await (await rt.recover("x")).rest()
            assert (await rt.handle("x").rest()).steps.get("pay").phase == "in-doubt"
            store.left = 2  # the release and the next STEP_STARTED, and no outcome
            handle = await rt.resolve_in_doubt("x", "pay", release=True)
            with pytest.raises(lf.StorageWriteError):
                await handle.rest()
            assert len(calls) == turn + 1


def test_an_at_most_once_step_cannot_be_retried() -> None:
    with pytest.raises(lf.BadInputError, match="cannot be retried"):
        lf.step(at_most_once=True, retry=lf.RetryPolicy())(lambda: None)
