"""Executions and real processes on one SQLite file: killed, stopped, racing (F09, F13, F16, F17, F18)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

import loomfast as lf
from tests.runtime.harness import kinds, of, steps_of
from tests.stores.programs import foreign, start_program

FLOWS = """
    import asyncio, os, sys, time
    import loomfast as lf

    path = sys.argv[1]

    def effect(name):  # what the outside world has seen
        with open(path + ".effects", "a") as world:
            world.write(name + "\\n")

    @lf.flow
    async def ask(ctx, input):
        answer = await ctx.suspend("ok")
        await ctx.run(lambda: effect(f"driven {answer}"), key="s")
        return answer

    @lf.flow
    async def pay(ctx, input):
        await ctx.run(lambda: effect("paid"), key="s")
        return input

    @lf.flow
    async def kills(ctx, input):
        def dies():
            effect("died")
            os._exit(1)
        await ctx.run(dies, key="s")

    @lf.step(at_most_once=True)
    async def wire():
        raise ConnectionError("no confirmation")

    @lf.flow
    async def mixed(ctx, way):
        if way == "sleep":
            await ctx.sleep(10**6)
        if way == "gate":
            await ctx.suspend("ok")
        if way == "doubt":
            try:
                await ctx.run(wire)
            except ConnectionError:
                await ctx.suspend("again")
        if way == "step":
            effect("step")
            await ctx.run(lambda: asyncio.sleep(0 if os.path.exists(path + ".second") else 600), key="s")
        return way

    @lf.flow
    async def slow(ctx, input):
        async def works():
            effect("began " + input)
            await asyncio.sleep(0 if os.path.exists(path + ".second") else 600)
            effect("ended " + input)
            return "worked"
        return await ctx.run(works, key="s")

    async def opened(**deps):
        store = await lf.SqliteEventStore.open(path, busy_timeout_ms=60_000)
        return store, lf.WorkflowRuntime(store, flows=[ask, pay, kills, mixed, slow], **deps)

    def race():  # wait until everybody is there
        print("ready", flush=True)
        sys.stdin.readline()
"""

RESUMES = (
    FLOWS
    + """
    async def main():
        store, rt = await opened()
        race()
        answers = (rt.resume("x", "ok", f"{sys.argv[2]}-{n}") for n in range(25))
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        for outcome in outcomes:
            print(type(outcome).__name__)
        for outcome in outcomes:
            if isinstance(outcome, lf.ExecutionHandle):
                await outcome.result()
        await rt.close(); await store.close()

    asyncio.run(main())
"""
)

STARTS = (
    FLOWS
    + """
    async def main():
        store, rt = await opened()
        race()
        starts = (rt.start(pay, f"{sys.argv[2]}-{n}", execution_id="o-1") for n in range(100))
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for outcome in outcomes:
            print(type(outcome).__name__)
        await rt.handle("o-1").result()
        await rt.close(); await store.close()

    asyncio.run(main())
"""
)

CRASHES = (
    FLOWS
    + """
    async def main():
        store, rt = await opened(max_crashes=3)
        if await rt.load_state("x") is None:
            await (await rt.start(kills, execution_id="x")).result()
        for report in await rt.recover_abandoned():
            print(report.outcome, flush=True)
        await rt.close(); await store.close()

    asyncio.run(main())
"""
)

LEAVES = (
    FLOWS
    + """
    async def main():
        store, rt = await opened()
        for way in ("sleep", "gate", "doubt"):
            await (await rt.start(mixed, way, execution_id=way)).rest()
        await (await rt.resume("doubt", "again")).rest()
        start = {"flowId": "mixed", "flowVersion": "1", "input": "bootstrap"}
        await store.append(lf.Envelope.make("bootstrap", 0, "EXECUTION_STARTED", start, 0))
        await rt.start(mixed, "step", execution_id="step")
        while await store.last_sequence("step") != 1:
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""
)

RECOVERS = (
    FLOWS
    + """
    async def main():
        store, rt = await opened()
        for report in await rt.recover_abandoned():
            print(report.execution_id, report.outcome)
        await rt.close(); await store.close()

    asyncio.run(main())
"""
)

LEASED = (
    FLOWS
    + """
    async def main():
        store, rt = await opened(lease_ttl_s=2.0)
        handle = await rt.start(slow, "here", execution_id="x")
        print("ready", flush=True)
        print((await handle.rest()).status)
        await rt.close(); await store.close()

    asyncio.run(main())
"""
)

TAKES_OVER = (
    FLOWS
    + """
    async def main():
        store, rt = await opened(lease_ttl_s=2.0)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            reports = await rt.recover_abandoned()
            if [report.outcome for report in reports] == ["recovered"]:
                break
            await asyncio.sleep(0.1)
        async with asyncio.timeout(20):
            print(await rt.handle("x").result())
        await rt.close(); await store.close()

    asyncio.run(main())
"""
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


def effects(path: Path) -> list[str]:
    world = Path(f"{path}.effects")
    return world.read_text().split("\n")[:-1] if world.exists() else []


async def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


async def finish(process: subprocess.Popen[str], code: int = 0) -> list[str]:
    try:
        printed, complaints = await asyncio.to_thread(process.communicate, None, 60)
    finally:
        process.kill()
    assert process.returncode == code, complaints
    return printed.split()


async def together(source: str, path: Path) -> list[str]:
    """Run the program in two processes that begin at once, and return what both printed."""
    processes = [start_program(source, path, name, stdin=True) for name in ("a", "b")]
    for process in processes:
        assert await line(process) == "ready"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [word for process in processes for word in await finish(process)]


async def test_of_fifty_answers_from_two_processes_one_counts(path: Path) -> None:
    """F09."""
    async with await lf.SqliteEventStore.open(path) as store:

        @lf.flow
        async def ask(ctx: lf.WorkflowContext, input: object) -> object:
            return await ctx.suspend("ok")

        async with lf.WorkflowRuntime(store) as rt:
            await (await rt.start(ask, execution_id="x")).rest()
        outcomes = await together(RESUMES, path)
        assert (outcomes.count("ExecutionHandle"), outcomes.count("GateRefusedError")) == (1, 49)
        log = await store.read("x")
        assert of(log, "ok", "EXECUTION_RESUMED") == ["ok", "EXECUTION_RESUMED"]
        assert kinds(log)[-1] == "EXECUTION_COMPLETED"
    assert len(effects(path)) == 1


async def test_of_two_hundred_starts_of_one_id_from_two_processes_one_runs(path: Path) -> None:
    """F13."""
    async with await lf.SqliteEventStore.open(path):
        outcomes = await together(STARTS, path)
    names = ("ExecutionHandle", "ExecutionAlreadyExistsError")
    assert tuple(outcomes.count(name) for name in names) == (1, 199)
    assert effects(path) == ["paid"]


async def test_an_execution_that_kills_its_process_is_set_aside_after_three_crashes(path: Path) -> None:
    """F16."""
    for _ in range(3):
        await finish(start_program(CRASHES, path), code=1)
    assert await finish(start_program(CRASHES, path)) == ["set-aside"]
    assert await finish(start_program(CRASHES, path)) == ["set-aside"]
    assert effects(path) == ["died"] * 3
    async with await lf.SqliteEventStore.open(path) as store, lf.WorkflowRuntime(store) as rt:
        assert [account.crashes for account in await rt.set_aside()] == [3]


async def test_after_a_kill_only_what_was_interrupted_is_picked_up(path: Path) -> None:
    """F17: asleep, at a gate and in doubt are left alone; mid-step is re-run; a bootstrap is driven."""
    victim = start_program(LEAVES, path)
    assert await line(victim) == "ready"
    victim.kill()
    await asyncio.to_thread(victim.communicate)
    Path(f"{path}.second").touch()
    async with await lf.SqliteEventStore.open(path) as store:
        untouched = {way: await store.read(way) for way in ("sleep", "gate", "doubt")}
        assert await finish(start_program(RECOVERS, path)) == [
            *("bootstrap", "recovered", "step", "recovered"),
        ]
        for way, log in untouched.items():
            assert await store.read(way) == log
        statuses = {e.execution_id: e.status for e in await store.list_executions()}
        assert statuses == {
            "sleep": "suspended",
            "gate": "suspended",
            "doubt": "suspended",
            "bootstrap": "completed",
            "step": "completed",
        }
        assert steps_of(await store.read("step")) == ["STARTED", "STARTED", "COMPLETED"]
    assert effects(path) == ["step", "step"]


async def test_a_process_that_was_stopped_past_its_lease_is_refused_when_it_goes_on(path: Path) -> None:
    """F18: SIGSTOP, takeover, SIGCONT."""
    stopped = start_program(LEASED, path)
    assert await line(stopped) == "ready"
    async with await lf.SqliteEventStore.open(path) as store:
        while not effects(path):
            await asyncio.sleep(0.01)
        with contextlib.closing(foreign(path)) as lock:
            lock.execute("BEGIN IMMEDIATE")  # it must not be stopped where it holds the write lock itself
            os.kill(stopped.pid, signal.SIGSTOP)
            lock.execute("ROLLBACK")
        Path(f"{path}.second").touch()
        try:
            assert await finish(start_program(TAKES_OVER, path)) == ["worked"]
            before = await store.read("x")
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        assert await finish(stopped) == ["completed"]  # by the other one, as the store says
        assert await store.read("x") == before
        assert steps_of(before) == ["STARTED", "STARTED", "COMPLETED"]
        assert [event.fence for event in before[-2:]] == [1, 1]
    assert effects(path) == ["began here", "began here", "ended here"]
