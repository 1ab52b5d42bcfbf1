"""Checking recorded logs against today's code, without touching anything."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import loomfast as lf
from loomfast._runtime.replay import Divergence, check_log
from tests.runtime.harness import runtime

calls: list[str] = []


@lf.step
async def echo(value: Any) -> Any:
    calls.append("effect")
    return value


@lf.flow
async def v1(ctx: lf.WorkflowContext, input: Any) -> Any:
    ctx.emit("begun", input)
    first = await ctx.run(echo, 1)
    way = await ctx.decide("way", lambda: calls.append("decider") or "left")
    answer = await ctx.suspend("go")
    await ctx.run(echo, 2)
    return [first, way, answer]


async def recorded(until: str) -> list[lf.Envelope]:
    store = lf.MemoryEventStore()
    async with runtime(store) as rt:
        handle = await rt.start(v1, "in")
        await handle.rest()
        if until == "end":
            await rt.resume(handle.execution_id, "go", "yes")
            await handle.result()
        calls.clear()
        return await store.read(handle.execution_id)


def changed(body: Any) -> lf.FlowDefinition:
    return lf.flow(id="v1")(body)


@pytest.mark.parametrize("until", ["gate", "end"])
async def test_the_code_that_wrote_a_log_keeps_to_it_and_nothing_is_executed(until: str) -> None:
    events = await recorded(until)
    assert await check_log(v1, events) is None
    assert calls == []


async def test_every_prefix_of_a_log_is_kept_to_as_well() -> None:
    events = await recorded("end")
    for cut in range(1, len(events)):
        if events[cut].event_type != "EXECUTION_RESUMED":  # an answer and its resumption are one append
            assert await check_log(v1, events[:cut]) is None


async def other_input(ctx: lf.WorkflowContext, input: Any) -> Any:
    await ctx.run(echo, 99)


async def other_gate(ctx: lf.WorkflowContext, input: Any) -> Any:
    await ctx.run(echo, 1)
    await ctx.decide("way", lambda: "left")
    await ctx.suspend("stop")


async def step_before_the_gate(ctx: lf.WorkflowContext, input: Any) -> Any:
    await ctx.run(echo, 1)
    await ctx.run(lf.step(id="added")(lambda: None))


async def other_output(ctx: lf.WorkflowContext, input: Any) -> Any:
    await v1.function(ctx, input)
    return "something else"


async def fails(ctx: lf.WorkflowContext, input: Any) -> Any:
    await v1.function(ctx, input)
    raise ValueError("no")


async def stops_early(ctx: lf.WorkflowContext, input: Any) -> Any:
    return [await ctx.run(echo, 1)]


async def goes_on(ctx: lf.WorkflowContext, input: Any) -> Any:
    await v1.function(ctx, input)
    await ctx.suspend("more")


@pytest.mark.parametrize(
    ("body", "sequence", "recorded_part", "requested"),
    [
        (other_input, 3, "input ", "asks for input "),
        (other_gate, 6, "a gate on 'go'", "asks for one on 'stop'"),
        (step_before_the_gate, 4, "decision 'way'", "goes on with step 'added'"),
        (other_output, 10, "the output ", "ends with 'something else'"),
        (fails, 10, "an end: completed", "fails"),
        (stops_early, 4, "decision 'way'", "ends with an output"),
        (goes_on, 10, "an end: completed", "goes on with EXECUTION_SUSPENDED"),
    ],
)
async def test_the_first_divergence_is_reported(
    body: Any, sequence: int, recorded_part: str, requested: str
) -> None:
    found = await check_log(changed(body), await recorded("end"))
    assert isinstance(found, Divergence)
    assert (found.sequence, calls) == (sequence, [])
    assert found.recorded.startswith(recorded_part)
    assert found.requested.startswith(requested)


async def test_changed_emits_are_no_divergence() -> None:
    async def chatty(ctx: lf.WorkflowContext, input: Any) -> Any:
        ctx.emit("new content")
        return await v1.function(ctx, input)

    assert await check_log(changed(chatty), await recorded("end")) is None


@lf.flow
async def branches(ctx: lf.WorkflowContext, input: Any) -> Any:
    async def chain(name: str, count: int) -> None:
        for n in range(count):
            await asyncio.sleep(0)
            await ctx.run(echo, n, key=f"{name}-{n}")

    async with asyncio.TaskGroup() as group:
        for name, count in (("a", 1), ("b", 3), ("c", 2)):
            group.create_task(chain(name, count))
    async with asyncio.TaskGroup() as group:
        group.create_task(ctx.run(echo, "beside"))
        group.create_task(ctx.suspend("go"))


async def test_concurrent_branches_and_task_groups_keep_to_every_prefix_of_their_log() -> None:
    store = lf.MemoryEventStore()
    async with runtime(store) as rt:
        handle = await rt.start(branches)
        await handle.rest()
    events = await store.read(handle.execution_id)
    for cut in range(1, len(events) + 1):
        assert await check_log(branches, events[:cut]) is None


async def test_behind_an_outcome_that_is_not_served_nothing_is_claimed() -> None:
    @lf.step
    async def flaky() -> None:
        raise OSError("once")

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        with contextlib.suppress(OSError):
            await ctx.run(flaky)
        await ctx.run(echo, 1)
        await ctx.suspend("go")

    store = lf.MemoryEventStore()
    async with runtime(store) as rt:
        handle = await rt.start(flow)
        await handle.rest()
    assert await check_log(flow, await store.read(handle.execution_id)) is None
