"""A re-run that asks the log a different question than it answers: F05."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import loomfast as lf
from tests.conftest import OpenStore
from tests.runtime.harness import deployed, kinds, runtime


@lf.step
async def echo(value: Any) -> Any:
    return value


async def parks(ctx: lf.WorkflowContext) -> Any:
    first = await ctx.run(echo, 1)
    ctx.emit("first", first)
    return await ctx.suspend("go")


async def other_input(ctx: lf.WorkflowContext) -> Any:
    with contextlib.suppress(lf.DeterminismError):
        await ctx.run(echo, 2)
    ctx.emit("past the difference")


async def other_gate(ctx: lf.WorkflowContext) -> Any:
    await ctx.run(echo, 1)
    await ctx.suspend("another")


@pytest.mark.parametrize(
    ("changed", "key", "recorded"), [(other_input, "echo", "input"), (other_gate, "gate 0", "a gate on 'go'")]
)
async def test_a_difference_stops_the_run_and_nothing_is_appended_past_it(
    open_store: OpenStore, changed: Any, key: str, recorded: str
) -> None:
    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(deployed(parks, changed))
        await handle.rest()
        resumed = await rt.resume(handle.execution_id, "go")
        with pytest.raises(lf.DeterminismError) as caught:
            await resumed.rest()
        assert caught.value.key == key
        assert caught.value.recorded.startswith(recorded)
        assert kinds(await store.read(handle.execution_id))[-1] == "EXECUTION_RESUMED"
        state = await rt.cancel(handle.execution_id, "wedged")
        assert (state.status, state.reason) == ("cancelled", "wedged")


async def test_steps_that_are_added_removed_or_reordered_do_no_harm(open_store: OpenStore) -> None:
    calls: list[str] = []

    def named(name: str) -> lf.StepDefinition:
        def effect() -> str:
            calls.append(name)
            return name

        return lf.step(id=name)(effect)

    a, b, c = named("a"), named("b"), named("c")

    async def v1(ctx: lf.WorkflowContext) -> Any:
        await ctx.run(a)
        await ctx.run(b)
        await ctx.suspend("go")

    async def v2(ctx: lf.WorkflowContext) -> Any:
        outputs = [await ctx.run(b), await ctx.run(c)]
        await ctx.suspend("go")
        return outputs

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(deployed(v1, v2))
        await handle.rest()
        await rt.resume(handle.execution_id, "go")
        assert await handle.result() == ["b", "c"]
    assert calls == ["a", "b", "c"]


@pytest.mark.parametrize(("policy", "warnings"), [("warn", 1), ("ignore", 0)])
async def test_the_other_policies_go_on_with_what_is_recorded(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, policy: Any, warnings: int
) -> None:
    async def changed(ctx: lf.WorkflowContext) -> Any:
        served = [await ctx.run(echo, 2, key="k"), await ctx.suspend("go")]
        return served[0]

    async def before(ctx: lf.WorkflowContext) -> Any:
        await ctx.run(echo, 1, key="k")
        await ctx.suspend("go")

    async with open_store() as store, runtime(store, determinism=policy) as rt:
        handle = await rt.start(deployed(before, changed))
        await handle.rest()
        await rt.resume(handle.execution_id, "go")
        assert await handle.result() == 1
    assert caplog.text.count("recorded input") == warnings


async def test_patched_keeps_executions_in_flight_on_their_path(open_store: OpenStore) -> None:
    async def old(ctx: lf.WorkflowContext) -> Any:
        await ctx.run(echo, "old")
        await ctx.suspend("go")
        await ctx.suspend("go")

    async def new(ctx: lf.WorkflowContext) -> Any:
        taken = ctx.patched("greeting")
        await ctx.run(echo, "new" if taken else "old")
        await ctx.suspend("go")
        again = ctx.patched("greeting")
        late = ctx.patched("farewell")
        await ctx.suspend("go")
        return [taken, again, late]

    async with open_store() as store, runtime(store) as rt:
        in_flight = await rt.start(deployed(old, new, new))
        await in_flight.rest()
        for _ in range(2):
            await rt.resume(in_flight.execution_id, "go")
            await in_flight.rest()
        assert await in_flight.result() == [False, False, True]

        fresh = await rt.start(lf.flow(id="fresh")(deployed(new, new, new).function))
        await fresh.rest()
        for _ in range(2):
            await rt.resume(fresh.execution_id, "go")
            await fresh.rest()
        assert await fresh.result() == [True, True, True]


async def test_a_recorded_decision_keeps_an_execution_on_its_branch(open_store: OpenStore) -> None:
    default = True

    async def flow_body(ctx: lf.WorkflowContext) -> Any:
        use_v2 = await ctx.decide("use-v2", lambda: default)
        await ctx.suspend("go")
        return use_v2

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(deployed(flow_body, flow_body))
        await handle.rest()
        default = False
        await rt.resume(handle.execution_id, "go")
        assert await handle.result() is True


async def test_shifted_calls_of_one_step_are_noticed_by_their_input(open_store: OpenStore) -> None:
    async def before(ctx: lf.WorkflowContext) -> None:
        await ctx.run(echo, "first")
        await ctx.run(echo, "second")
        await ctx.suspend("go")

    async def after(ctx: lf.WorkflowContext) -> None:
        await ctx.run(echo, "second")

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(deployed(before, after))
        await handle.rest()
        with pytest.raises(lf.DeterminismError) as caught:
            await (await rt.resume(handle.execution_id, "go")).rest()
        digests = [lf.format_digest(lf.fnv1a64(f'"{text}"'.encode())) for text in ("first", "second")]
        assert (caught.value.recorded, caught.value.requested) == tuple(f"input {one}" for one in digests)
        assert (caught.value.key, caught.value.sequence) == ("echo", 2)


async def test_a_diverged_execution_goes_on_once_the_code_fits_again(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(deployed(parks, other_input, parks), execution_id="x")
        await handle.rest()
        with pytest.raises(lf.DeterminismError):
            await (await rt.resume("x", "go", "answer")).rest()
        assert await (await rt.recover("x")).result() == "answer"
