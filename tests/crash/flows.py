"""Flows for the crash matrix. Between them they use every verb of a context, alone and together.

Each function makes a flow fresh, as a new process does; its effects report to the world that outlives it.
What a flow promises, and what its contract leaves open (`optional`, `unstamped`), stands in its `Scenario`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import loomfast as lf
from loomfast.testing import Scenario, World

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


def _resolve_declined(key: str, world: World) -> dict[str, Any]:
    return {"error": Declined(4, "no money")} if world.count(key) else {"release": True}


GO: dict[str | tuple[str, int], Any] = {"go": "answer"}

SCENARIOS = [
    Scenario("emits-around-a-step", emits_around_a_step, 1),
    Scenario("output-before-gates", output_before_gates, answers={("go", 0): 1, ("go", 1): {"z": 1, "a": 2}}),
    Scenario("surfaces", surfaces, answers=GO),
    Scenario("streams", streams, answers=GO),
    Scenario("identical-emits", identical_emits, answers=GO),
    Scenario("gates-in-a-loop", gates_in_a_loop, answers={"say": "hm", ("say", 1): "more", "detail": 1}),
    Scenario("sleeps", sleeps),
    Scenario("recorded-values", recorded_values, answers=GO),
    Scenario("decisions", decisions, {"kg": 900}, answers=GO, chosen_id=True),
    Scenario("a-decider-that-emits", a_decider_that_emits, answers=GO, unstamped=("thought",)),
    Scenario("a-decider-that-raises", a_decider_that_raises, answers=GO, unstamped=("anyway",)),
    Scenario("patches", patches, answers=GO),
    Scenario("sync-steps-that-emit", sync_steps_that_emit, answers=GO, unstamped=("progress",)),
    Scenario("effects-that-emit", effects_that_emit, answers=GO),
    Scenario("retries", retries, answers=GO),
    Scenario("typed-failures", typed_failures, answers=GO),
    Scenario("untyped-failures", untyped_failures, answers=GO, optional=("caught",)),
    Scenario("caught-failures", caught_failures, answers=GO, optional=("caught",)),
    Scenario("a-flow-that-fails", a_flow_that_fails, answers=GO),
    Scenario("timeouts", timeouts, answers=GO, optional=("late",)),
    Scenario("asyncio-timeouts", asyncio_timeouts, answers=GO),
    Scenario("gathers", gathers, answers=GO),
    Scenario("task-groups", task_groups, answers=GO),
    Scenario("at-most-once", at_most_once, 10, answers=GO, chosen_id=True),
    Scenario("at-most-once-declined", at_most_once_declined, answers=GO, in_doubt=_resolve_declined),
    Scenario("cancelled-in-a-step", cancelled_in_a_step, cancel_on="begun"),
    Scenario("cancelled-at-a-gate", cancelled_at_a_gate, cancel_on="EXECUTION_SUSPENDED", chosen_id=True),
    Scenario(
        "everything-at-once",
        everything_at_once,
        ["a", "b", "cc"],
        answers={("approve", 0): "no", "approve": "yes"},
        chosen_id=True,
    ),
    Scenario(
        "payloads-without-a-json-form",
        payloads_without_a_json_form,
        answers=GO,
        unstamped=("opaque",),
    ),
]
