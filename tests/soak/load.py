"""The load of a soak: the executions it wants, and what is to be done about each.

What lives here: `Load`. What must not: processes; whether what comes of it is right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import loomfast as lf
from tests.soak.expected import Expected
from tests.soak.flows import Plan, errand_in, plan_of

# How many executions the workers have before them, and how often they are told what to do.
WIDTH = 24
NUDGE_S = 0.02
# At how many of 20 such times the driver repeats a start, and has a fork made.
REPEATS_OF_20, FORKS_OF_20 = 4, 1


class Nobody:
    """The world of the driver's own runtime, which must never run anything."""

    def begin(self, fx: lf.EffectContext) -> float:
        raise AssertionError(f"{fx.execution_id}: a repeated start has run")

    def end(self, fx: lf.EffectContext, output: str) -> str:
        raise AssertionError(f"{fx.execution_id}: a repeated start has run")

    def choose(self) -> int:
        raise AssertionError("a repeated start has run")


class Load:
    """Keeps workers busy. `open` are the executions that have not ended; `say` writes to the testimony."""

    def __init__(self, seed: int, say: Callable[..., None]) -> None:
        self.open: dict[str, Expected] = {}
        self.errand = errand_in(Nobody())
        self._known: dict[str, Expected] = {}
        self._random = Random(seed)
        self._say = say

    def forget_commands(self) -> None:
        """Somebody who was told what to do is dead."""
        for expected in self.open.values():
            expected.forget_commands()

    def hear(self, word: str, said: list[Any]) -> None:
        """Take in a line of testimony."""
        expected = self._known.get(said[0]) if said else None
        if expected is not None:
            expected.hear(word, said[1:])
            if word == "forked":  # another worker may have looked before it was there
                self.open[expected.execution_id] = expected

    async def nudge(self, tell: Callable[..., None], runtime: lf.WorkflowRuntime, *, last: bool) -> None:
        """Tell workers what to do, and repeat starts on `runtime`; with `last`, until all has ended."""
        while not last or self.open:
            while not last and len(self.open) < WIDTH:
                self._expect(f"e-{len(self._known)}", plan_of(self._random))
            for expected in list(self.open.values()):
                command = expected.command()
                if command is not None:
                    tell(*command)
                if expected.ended:
                    del self.open[expected.execution_id]
            if not last and self._random.randrange(20) < FORKS_OF_20:
                self._fork(tell)
            if self._random.randrange(20) < REPEATS_OF_20:
                await self._repeat(runtime)
            await asyncio.sleep(NUDGE_S)

    def _expect(self, execution_id: str, plan: Plan | None) -> None:
        self._known[execution_id] = self.open[execution_id] = Expected(execution_id, plan)
        if plan is not None:
            self._say("asked", execution_id, plan)

    def _fork(self, tell: Callable[..., None]) -> None:
        able = [expected for expected in self.open.values() if expected.cuts and not expected.ended]
        if able:
            origin = self._random.choice(able)
            child = f"f-{len(self._known)}"
            self._expect(child, None)
            tell("fork", origin.execution_id, self._random.choice(origin.cuts), child)

    async def _repeat(self, runtime: lf.WorkflowRuntime) -> None:
        existing = [expected for expected in self.open.values() if expected.exists and expected.plan]
        if not existing:
            return
        again = self._random.choice(existing)
        try:
            await runtime.start(self.errand, again.plan, execution_id=again.execution_id)
        except lf.ExecutionAlreadyExistsError:
            self._say("repeated", again.execution_id)
        except lf.StorageError as error:
            self._say("unanswered", again.execution_id, repr(error))
        else:
            self._say(
                "broken", f"execution {again.execution_id!r} was acknowledged, and could be started again"
            )
