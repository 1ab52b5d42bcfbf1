"""Flows for the crash matrix that emit, wait, decide and record: everything but the fates of a step.

Each function makes a flow fresh, as a new process does; its effects report to the world that outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import loomfast as lf
from loomfast.testing import World

Ctx = lf.WorkflowContext
Fx = lf.EffectContext


def emits_around_a_step(world: World) -> Any:
    """F02: `emit(A); emit(B); run(s); emit(C)`."""

    @lf.step
    async def s(fx: Fx, n: int) -> int:
        world.call(fx)
        await asyncio.sleep(1)
        return n + 1

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        ctx.emit("A")
        ctx.emit("B", {"n": input})
        output = await ctx.run(s, input)
        ctx.emit("C", output)
        return output

    return flow


def output_before_gates(world: World) -> Any:
    """F01: everything above a gate is run through again on every resume."""

    @lf.step
    async def s(fx: Fx) -> str:
        world.call(fx)
        return "done"

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        ctx.emit("A")
        await ctx.run(s)
        first = await ctx.suspend("go")
        ctx.emit("B")
        second = await ctx.suspend("go")
        ctx.emit("C")
        return [first, second]

    return flow


def surfaces(world: World) -> Any:
    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        ctx.ui.set("title", "one")
        ctx.ui.merge("head", {"a": 1})
        ctx.ui.append("timeline", "x")
        await ctx.suspend("go")
        ctx.ui.append("timeline", "x")
        ctx.ui.increment("count")
        ctx.ui.increment("count")
        ctx.ui.remove("title")
        ctx.ui.set("title", "two", surface="side")
        await ctx.suspend("go")
        ctx.ui.increment("count", 5)

    return flow


def streams(world: World) -> Any:
    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        for word in ("to", "be", "or", "not", "to", "be"):
            await ctx.stream("answer", word)
        await ctx.suspend("go")
        ctx.stream("answer", "to")

    return flow


def identical_emits(world: World) -> Any:
    """The same content, three times in one segment and twice in the next, with a step in the middle."""

    @lf.step
    def s(fx: Fx) -> int:
        return world.call(fx) * 0

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        ctx.emit("note", "same")
        ctx.emit("note", "same")
        await ctx.run(s)
        ctx.emit("note", "same")
        await ctx.suspend("go")
        ctx.emit("note", "same")
        await ctx.run(s)
        ctx.emit("note", "same")

    return flow


def gates_in_a_loop(world: World) -> Any:
    """A session: each turn asks, works and says something, as often the same as not."""

    @lf.step
    async def work(fx: Fx, word: str) -> str:
        world.call(fx)
        return word.upper()

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        said = []
        for _ in range(4):
            word = await ctx.suspend("say", correlation_key="me")
            said.append(await ctx.run(work, word))
            ctx.emit("turn", "over")
            ctx.ui.increment("turns")
            for _ in range(2 if word == "more" else 0):
                ctx.emit("more", await ctx.suspend("detail"))
        return said

    return flow


def sleeps(world: World) -> Any:
    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        began = ctx.now()
        ctx.emit("asleep")
        await ctx.sleep(3600)
        ctx.emit("awake")
        await ctx.sleep(0.5)
        answer = await ctx.suspend("late", wake_at=int(ctx.now().timestamp() * 1000) + 60_000)
        return [answer, (ctx.now() - began).total_seconds() >= 3660]

    return flow


def recorded_values(world: World) -> Any:
    """What `now`, `random` and `uuid` said in one process is what they say in the next."""

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        values = [ctx.now().isoformat(), ctx.random(), str(ctx.uuid()), ctx.random()]
        known = await ctx.decide("values", lambda: values)
        ctx.emit("alike", known == values)
        await ctx.suspend("go")
        again = [ctx.now().isoformat(), ctx.random(), str(ctx.uuid())]
        ctx.emit("alike", [known == values, len(again)])
        return known == values

    return flow


def decisions(world: World) -> Any:
    @lf.step
    async def go(fx: Fx, way: str) -> str:
        world.call(fx)
        return way

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        async def choose(context: Any) -> str:
            await asyncio.sleep(2)
            return "rail" if context["kg"] > 500 else "road"

        policy = {"id": "p", "version": "1", "propensity": 0.5}
        way = await ctx.decide("way", choose, context=input, alternatives=["rail", "road"], policy=policy)
        ctx.emit("chosen", way)
        again = await ctx.decide("way", lambda: "second of its id")
        await ctx.run(go, way)
        await ctx.suspend("go")
        ctx.emit("chosen", again)
        return [way, again]

    return flow


def a_decider_that_emits(world: World) -> Any:
    """In-flight window: identical content from inside a decider and after it."""

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        async def choose() -> str:
            ctx.emit("thought", 1)
            await asyncio.sleep(1)
            ctx.emit("thought", 1)
            return "x"

        choice = await ctx.decide("d", choose)
        ctx.emit("after", choice)
        await ctx.suspend("go")
        ctx.emit("after", choice)
        return choice

    return flow


def a_decider_that_raises(world: World) -> Any:
    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        def refuse() -> str:
            raise LookupError("no choice")

        with contextlib.suppress(LookupError):
            await ctx.decide("d", refuse)
        ctx.emit("anyway", 1)
        await ctx.suspend("go")
        ctx.emit("anyway", 2)
        return "done"

    return flow


def patches(world: World) -> Any:
    @lf.step
    async def greet(fx: Fx, how: str) -> str:
        world.call(fx)
        return how

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        new = ctx.patched("greeting")
        said = await ctx.run(greet, "new" if new else "old")
        ctx.emit("greeted", said)
        await ctx.suspend("go")
        return [said, ctx.patched("greeting"), ctx.patched("farewell")]

    return flow


def sync_steps_that_emit(world: World) -> Any:
    """From a thread: an emit of the effect, and one of the flow's context."""

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        @lf.step
        def s(fx: Fx, n: int) -> int:
            world.call(fx)
            fx.emit("inside", fx.attempt * 0)
            ctx.emit("progress", n)
            return n * 2

        outputs = [await ctx.run(s, 1), await ctx.run(s, 2, key="mine")]
        ctx.emit("between", outputs)
        await ctx.suspend("go")
        outputs.append(await ctx.run(s, 3))
        return outputs

    return flow


def effects_that_emit(world: World) -> Any:
    """F03: two attempts, each with its own emit, and a later one of equal content."""

    @lf.step(retry=lf.RetryPolicy(max_attempts=9, initial_s=1))
    async def s(fx: Fx) -> str:
        world.call(fx)
        fx.emit("x", 0)
        if fx.attempt < 2:
            raise OSError("once")
        return "fine"

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        outcome = await ctx.run(s)
        ctx.emit("y", outcome)
        await ctx.suspend("go")
        ctx.emit("x", 0)
        return outcome

    return flow


class NoForm:
    """Has no JSON form, but compares."""

    def __repr__(self) -> str:
        return "NoForm()"


def payloads_without_a_json_form(world: World) -> Any:
    """Appended unstamped on every run (memory store), refused at the call where JSON is persisted."""

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        for _ in range(2):
            try:
                ctx.emit("opaque", NoForm())
            except lf.JsonFormError:
                ctx.emit("refused")
            await ctx.suspend("go")
        return "done"

    return flow
