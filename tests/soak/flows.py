"""The flow that a soak plays: it does what its plan says, and a plan is its input.

What lives here: `errand_in`, which makes the flow for a world, and `plan_of`, which draws a plan. What must
not: processes and stores.

An *exact* plan does one thing after another. Whatever kills the process, the rule of ADR 0102 then proves
every emit: the log must come out as that of an undisturbed run, attempts aside. A plan that is not exact
emits beside or inside effects, where a duplicate may remain; there the judge looks for less.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from random import Random
from typing import Any, Protocol, TypeAlias

import loomfast as lf

# What to do, one after another: an act and what it is about.
Plan: TypeAlias = list[tuple[str, Any]]

# The acts of a plan, and how often each is drawn.
ACTS = {
    "note": 5,
    "show": 2,
    "work": 3,
    "thread": 1,
    "once": 2,
    "declines": 1,
    "retries": 1,
    "choose": 2,
    "gate": 2,
    "sleep": 1,
}
INEXACT_ACTS = ("both", "chat")
# Few, so that contents repeat.
WORDS = ("ask", "look", "tell")
ONCE = "once"
ANSWER = "answer"


class World(Protocol):
    """What lies outside the log."""

    def begin(self, fx: lf.EffectContext) -> float:
        """An effect begins; return how long it takes, in seconds."""

    def end(self, fx: lf.EffectContext, output: str) -> str:
        """It has acted; return its output."""

    def choose(self) -> int:
        """Make a choice that no other run would make."""


class Declined(Exception):
    """A failure that is part of a step's result."""


def plan_of(random: Random, acts_of: Mapping[str, int] = ACTS, *, sleep_ms: int = 80) -> Plan:
    """Draw a plan of some acts, by their weights; a sleep is shorter than `sleep_ms`."""
    acts = random.choices(tuple(acts_of), weights=tuple(acts_of.values()), k=random.randint(4, 12))
    if random.random() < 0.25:
        acts.insert(random.randrange(len(acts)), random.choice(INEXACT_ACTS))
    about = {"sleep": lambda: random.randrange(sleep_ms) / 1000}
    return [(act, about.get(act, lambda: random.choice(WORDS))()) for act in acts]


def is_exact(plan: Plan) -> bool:
    """Whether every emit of this plan can be proven."""
    return not any(act in INEXACT_ACTS for act, _ in plan)


def errand_in(world: World) -> lf.FlowDefinition:
    """Return the flow `errand`, whose effects touch `world`."""

    @lf.step
    async def work(fx: lf.EffectContext, word: str) -> str:
        await asyncio.sleep(world.begin(fx))
        return world.end(fx, f"{word} done")

    @lf.step
    def thread(fx: lf.EffectContext, word: str) -> str:
        time.sleep(world.begin(fx))
        return world.end(fx, f"{word} done in a thread")

    @lf.step(id=ONCE, at_most_once=True)
    async def once(fx: lf.EffectContext, word: str) -> str:
        await asyncio.sleep(world.begin(fx))
        return world.end(fx, f"{word} done once")

    @lf.step(failures=(Declined,))
    async def declines(fx: lf.EffectContext, word: str) -> str:
        await asyncio.sleep(world.begin(fx))
        raise Declined(world.end(fx, word))

    @lf.step(retry=lf.RetryPolicy(max_attempts=3, initial_s=0.01, on=(OSError,)))
    async def retries(fx: lf.EffectContext, word: str) -> str:
        await asyncio.sleep(world.begin(fx))
        if fx.attempt == 1:
            raise OSError("the first attempt fails")
        return world.end(fx, f"{word} done at last")

    @lf.step
    async def chat(fx: lf.EffectContext, word: str) -> str:
        delay_s = world.begin(fx)
        fx.emit("chat", word)
        await asyncio.sleep(delay_s)
        fx.emit("chat", word)
        return world.end(fx, f"{word} said")

    async def branch(ctx: lf.WorkflowContext, place: int, side: str, word: str) -> str:
        ctx.emit(side, word)
        said: str = await ctx.run(work, word, key=f"{side}-{place}")
        ctx.emit(side, word)
        return said

    steps = {step.id: step for step in (work, thread, once, retries, chat)}

    @lf.flow
    async def errand(ctx: lf.WorkflowContext, plan: Plan) -> list[Any]:
        outcomes: list[Any] = []
        for place, (act, about) in enumerate(plan):
            if act == "note":
                ctx.emit("note", {"word": about})
            elif act == "show":
                ctx.ui.append("words", about)
            elif act == "stream":
                ctx.stream("words", about)
            elif act == "choose":
                outcomes.append(await ctx.decide("choice", world.choose))
                ctx.emit("chosen", outcomes[-1])
            elif act == "gate":
                outcomes.append(await ctx.suspend(ANSWER))
            elif act == "sleep":
                await ctx.sleep(about)
            elif act == "both":
                sides = (branch(ctx, place, side, about) for side in ("left", "right"))
                outcomes.extend(await asyncio.gather(*sides))
            elif act == "declines":
                try:
                    await ctx.run(declines, about)
                except Declined as error:
                    outcomes.append(str(error))
            else:
                outcomes.append(await ctx.run(steps[act], about))
        return outcomes

    return errand
