"""Benchmarks of whole calls of a context, and of long sessions: what a flow's author waits for.

What lives here: measuring single calls on a memory store, so that they are seen and not a disk, and the turns
of a session on SQLite, as a person waits for them. What must not: limits (cases). Each measurement checks
what the log holds before its time counts.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from time import perf_counter
from typing import Any

import loomfast as lf

# Calls timed together.
CALLS = 500


def live_emits(sizes: tuple[int, ...], rounds: int) -> dict[str, float]:
    """The full live `ctx.emit` (digest, rule, envelope, fold, queue), at so many stamped emits before it."""
    return asyncio.run(_live_emits(sizes, rounds))


async def _live_emits(sizes: tuple[int, ...], rounds: int) -> dict[str, float]:
    best = {f"k={size}": float("inf") for size in sizes}

    @lf.flow
    async def emitting(ctx: lf.WorkflowContext, input: Any) -> None:
        made = 0
        for size in sizes:
            while made < size:
                await ctx.emit("note", made)
                made += 1
            for _ in range(rounds):
                await ctx._journal.drain()
                begun = perf_counter()
                for n in range(made, made + CALLS):
                    ctx.emit("note", n)
                best[f"k={size}"] = min(best[f"k={size}"], (perf_counter() - begun) / CALLS)
                made += CALLS
        if len(ctx._journal.state.emits) != made:
            raise AssertionError("not every emit was stamped once")

    async with lf.WorkflowRuntime(lf.MemoryEventStore()) as runtime:
        await (await runtime.start(emitting)).result()
    return best


def served_calls(rounds: int) -> dict[str, float]:
    """One served `ctx.emit` and one served `ctx.run`, on the re-run of a flow of many."""
    return asyncio.run(_served_calls(rounds))


async def _served_calls(rounds: int) -> dict[str, float]:
    best = {"emit": float("inf"), "step": float("inf")}

    @lf.step
    async def echo(value: int) -> int:
        return value

    @lf.flow
    async def repeated(ctx: lf.WorkflowContext, input: Any) -> None:
        begun = perf_counter()
        for n in range(4 * CALLS):
            ctx.emit("note", n)
        emits = perf_counter() - begun
        begun = perf_counter()
        for n in range(CALLS):
            await ctx.run(echo, n)
        steps = perf_counter() - begun
        if ctx._journal.state.gates:
            best["emit"] = min(best["emit"], emits / (4 * CALLS))
            best["step"] = min(best["step"], steps / CALLS)
        for _ in range(rounds):
            await ctx.suspend("again")

    async with lf.WorkflowRuntime(lf.MemoryEventStore()) as runtime:
        handle = await runtime.start(repeated)
        for _ in range(rounds):
            await handle.rest()
            await runtime.resume(handle.execution_id, "again")
        await handle.result()
        state = await runtime.load_state(handle.execution_id)
        if state is None or (len(state.emits), len(state.steps)) != (4 * CALLS, CALLS):
            raise AssertionError("a served call was made again")
    return best


def session_turns(turns: int) -> dict[str, float]:
    """One turn of a long session, early and late: an answer, ten emits, the next gate durable.

    The served re-run in its middle is left out, and so is forgetting what it served, once the run is over.
    What it leaves in the turn are cold caches: some 0.2 ms after 10,000 served calls.
    """
    return asyncio.run(_session_turns(turns))


async def _session_turns(turns: int) -> dict[str, float]:
    marks: dict[str, float] = {}

    @lf.flow
    async def session(ctx: lf.WorkflowContext, input: Any) -> None:
        marks["begun"] = perf_counter()
        for turn in range(input):
            await ctx.suspend("say")
            marks["served"] = perf_counter()
            for n in range(10):
                ctx.emit("said", [turn, n])

    def mark(event: lf.Envelope) -> None:
        if event.event_type == "EXECUTION_SUSPENDED":
            marks["parked"] = perf_counter()

    taken: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        await _play(os.path.join(folder, "log.db"), session, mark, marks, taken, turns)
    return {"turn 10": min(taken[5:45]), f"turn {turns}": min(taken[-40:])}


async def _play(
    path: str, session: Any, mark: Any, marks: dict[str, float], taken: list[float], turns: int
) -> None:
    async with (
        await lf.SqliteEventStore.open(path) as store,
        lf.WorkflowRuntime(store, on_commit=mark) as runtime,
    ):
        handle = await runtime.start(session, turns + 1)
        await handle.rest()
        for turn in range(turns):
            begun = perf_counter()
            await runtime.resume(handle.execution_id, "say", turn)
            await handle.rest()
            taken.append(marks["begun"] - begun + marks["parked"] - marks["served"])
        state = await runtime.load_state(handle.execution_id)
        if state is None or len(state.emits) != 10 * turns:
            raise AssertionError("the session lost or repeated an emit")
