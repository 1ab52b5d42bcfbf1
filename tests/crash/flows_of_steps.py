"""Flows for the crash matrix about the fates of a step: retried, failed, timed out, in doubt, cancelled.

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


def retries(world: World) -> Any:
    @lf.step(retry=lf.RetryPolicy(max_attempts=9, initial_s=30))
    async def flaky(fx: Fx) -> str:
        if world.call(fx) < 3:
            raise ConnectionError("again")
        return "through"

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        ctx.emit("before")
        outcome = await ctx.run(flaky)
        ctx.emit("after", outcome)
        await ctx.suspend("go")
        ctx.emit("after", outcome)
        return outcome

    return flow


class Declined(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


def typed_failures(world: World) -> Any:
    """F33: served like an output, so the emits behind them converge."""

    @lf.step(failures=(Declined,))
    async def charge(fx: Fx, code: int) -> str:
        world.call(fx)
        raise Declined(code, "no")

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        seen = []
        for code in (7, 8):
            try:
                await ctx.run(charge, code)
            except Declined as error:
                seen.append([error.code, str(error)])
                ctx.ui.increment("declined")
                ctx.emit("declined", error.code)
        await ctx.suspend("go")
        ctx.emit("declined", 7)
        return seen

    return flow


def untyped_failures(world: World) -> Any:
    """The record's P2: what was emitted behind an outcome that is not served must absorb nothing."""

    @lf.step
    async def flaky(fx: Fx) -> str:
        if world.call(fx) == 1:
            raise OSError("once")
        return "fine"

    @lf.step
    async def solid(fx: Fx) -> None:
        world.call(fx)

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        try:
            await ctx.run(flaky)
        except OSError:
            ctx.emit("caught")
            ctx.ui.increment("tries")
        else:
            await ctx.run(solid)
            ctx.ui.increment("tries")
        await ctx.suspend("go")
        await ctx.suspend("go")
        return "done"

    return flow


def caught_failures(world: World) -> Any:
    """A session that catches an untyped failure early appends every later emit again: bounded, never lost."""

    @lf.step
    async def flaky(fx: Fx) -> str:
        if world.call(fx) == 1:
            raise OSError("once")
        return "fine"

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        try:
            await ctx.run(flaky)
        except OSError:
            ctx.emit("caught")
        ctx.ui.increment("tries")
        await ctx.suspend("go")
        ctx.ui.increment("tries")
        return "done"

    return flow


def a_flow_that_fails(world: World) -> Any:
    @lf.step
    async def s(fx: Fx) -> None:
        world.call(fx)

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        ctx.emit("before")
        await ctx.run(s)
        await ctx.suspend("go")
        raise ValueError("no good")

    return flow


def timeouts(world: World) -> Any:
    """F35: an effect that ignores its cancellation and emits late."""

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        @lf.step(timeout_s=2, retry=lf.RetryPolicy(max_attempts=9, initial_s=1))
        async def slow(fx: Fx) -> str:
            if world.call(fx) == 1:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)
                await asyncio.sleep(3)
                ctx.emit("late", 1)
            return "in time"

        ctx.emit("before")
        outcome = await ctx.run(slow)
        ctx.emit("after", outcome)
        await ctx.suspend("go")
        ctx.emit("after", outcome)
        return outcome

    return flow


def asyncio_timeouts(world: World) -> Any:
    """A step that its flow gives up on, and a faster one that takes its place."""

    @lf.step
    async def slow(fx: Fx) -> str:
        world.call(fx)
        await asyncio.sleep(3600)
        return "slow"

    @lf.step
    async def fast(fx: Fx) -> str:
        world.call(fx)
        return "fast"

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        ctx.emit("before")
        try:
            async with asyncio.timeout(10):
                outcome = await ctx.run(slow)
        except TimeoutError:
            outcome = await ctx.run(fast)
        ctx.emit("after", outcome)
        await ctx.suspend("go")
        return outcome

    return flow


def gathers(world: World) -> Any:
    """The reviewer's counterexample to ordinals: emits that overlap steps which execute again."""

    @lf.step
    async def work(fx: Fx, seconds: float) -> float:
        world.call(fx)
        await asyncio.sleep(seconds)
        return seconds

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        async def branch(name: str, seconds: float) -> float:
            ctx.emit("branch", name)
            output: float = await ctx.run(work, seconds, key=name)
            ctx.emit("branch", "done")
            return output

        outputs = await asyncio.gather(branch("a", 3), branch("b", 1), branch("c", 1))
        ctx.emit("all", outputs)
        await ctx.suspend("go")
        ctx.emit("branch", "done")
        return outputs

    return flow


def task_groups(world: World) -> Any:
    """A gate in one branch, steps in the others: the flow parks as a whole."""

    @lf.step
    async def work(fx: Fx, n: int) -> int:
        world.call(fx)
        await asyncio.sleep(n)
        return n

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ctx.run(work, n, key=f"w{n}")) for n in (1, 2)]
            gate = group.create_task(ctx.suspend("go"))
        ctx.emit("joined", [task.result() for task in tasks])
        return [gate.result(), *(task.result() for task in tasks)]

    return flow


def at_most_once(world: World) -> Any:
    """Whatever happens to the process, the money moves once."""

    @lf.step(at_most_once=True)
    async def pay(fx: Fx, amount: int) -> str:
        receipt = f"receipt {world.once(fx)}"
        world.facts[fx.key] = "receipt 1"
        await asyncio.sleep(1)
        return receipt

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        ctx.emit("paying", input)
        receipt = await ctx.run(pay, input)
        ctx.emit("paid", receipt)
        await ctx.suspend("go")
        second = await ctx.run(pay, input + 1)
        return [receipt, second]

    return flow


def at_most_once_declined(world: World) -> Any:
    """In doubt, resolved as a declared failure: the same end as if it had been heard."""

    @lf.step(at_most_once=True, failures=(Declined,))
    def pay(fx: Fx) -> str:
        world.once(fx)
        raise Declined(4, "no money")

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        try:
            await ctx.run(pay)
        except Declined as error:
            ctx.emit("declined", error.code)
        await ctx.suspend("go")
        return "done"

    return flow


def cancelled_in_a_step(world: World) -> Any:
    """F34: the effect catches its cancellation, and no further effect starts."""

    @lf.step
    async def long(fx: Fx) -> str:
        world.call(fx)
        fx.emit("begun")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        return "done"

    @lf.step
    async def other(fx: Fx) -> None:
        world.call(fx)
        world.violations.append("an effect started after a cancel")

    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        ctx.emit("before")
        try:
            return await ctx.run(long)
        finally:
            with contextlib.suppress(BaseException):
                await ctx.run(other)

    return flow


def cancelled_at_a_gate(world: World) -> Any:
    @lf.flow
    async def flow(ctx: Ctx, input: Any) -> Any:
        ctx.emit("asked")
        await ctx.sleep(10**6)

    return flow


def everything_at_once(world: World) -> Any:
    """A chosen id, and one of everything: what the others test alone must hold together."""

    @lf.step(retry=lf.RetryPolicy(max_attempts=9, initial_s=2), timeout_s=60)
    async def fetch(fx: Fx, name: str) -> str:
        fx.emit("fetching", name)
        if world.call(fx) == 1 and name == "b":
            raise ConnectionError("again")
        await asyncio.sleep(len(name))
        return name * 2

    @lf.step(failures=(Declined,))
    def check(fx: Fx, name: str) -> bool:
        world.call(fx)
        if name == "bb":
            raise Declined(1, name)
        return True

    @lf.flow(id="everything")
    async def flow(ctx: Ctx, input: Any) -> Any:
        ctx.ui.set("state", "fetching")
        names = await asyncio.gather(*(ctx.run(fetch, name, key=f"fetch-{name}") for name in input))
        good = []
        for name in names:
            try:
                await ctx.run(check, name)
                good.append(name)
            except Declined:
                ctx.ui.append("declined", name)
        way = await ctx.decide("way", lambda: good[0])
        while (answer := await ctx.suspend("approve", correlation_key=way)) != "yes":
            ctx.stream("talk", answer)
        await ctx.sleep(60)
        ctx.stream("talk", "done")
        return [names, good, way, answer]

    return flow
