"""`loomfast worker` as real processes: SIGTERM, kill, crash loops, bad arguments (F16, F19)."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import loomfast as lf
from loomfast.testing.postgres import PostgresServer
from tests.cli.conftest import Ended
from tests.cluster.network import Network
from tests.runtime.harness import kinds, of

APP = """
import asyncio, atexit, os, pathlib, time
from contextlib import asynccontextmanager
import loomfast as lf

here = pathlib.Path(__file__).parent

def seen(what):
    with open(here / "seen", "a") as world:
        world.write(what + "\\n")

@lf.step
async def takes(seconds):
    seen(f"began {seconds}")
    await asyncio.sleep(abs(seconds))
    if seconds < 0:
        raise lf.FlowError("it did not work")
    seen(f"ended {seconds}")
    return seconds

@lf.flow
async def works(ctx, seconds):
    return await ctx.run(takes, seconds)

@lf.step
def blocks(seconds):
    seen("blocked")
    time.sleep(seconds)

@lf.flow
async def sync(ctx, seconds):
    await ctx.run(blocks, seconds)

@lf.step
async def blocks_elsewhere(seconds):
    seen("blocked")
    await asyncio.to_thread(time.sleep, seconds)

@lf.flow
async def elsewhere(ctx, seconds):
    await ctx.run(blocks_elsewhere, seconds)

@lf.flow
async def kills(ctx, input):
    def dies():
        seen("died")
        os._exit(1)
    await ctx.run(dies, key="s")

@asynccontextmanager
async def lifespan(worker):
    await worker.schedules.put("every", works, 0, trigger=lf.Every(1))
    yield
    seen("left")

atexit.register(seen, "exited")
flows = [works, kills, sync, elsewhere]
app = lf.App(flows, options={"max_crashes": 3})
scheduled = lf.App(flows, lifespan)
"""
ELSEWHERE = ("shop:app", "--db", "postgresql://nowhere")
READY = re.compile(r"ready, process (\d+)")


class Process:
    """One `loomfast worker`."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        store = () if "--db" in options else ("--db", "events.db")
        command = [sys.executable, "-m", "loomfast", "worker", name, *store, *options]
        self.log = folder / f"log-{time.monotonic_ns()}"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def said(self) -> str:
        return self.log.read_text()

    def ready(self) -> Process:
        until(lambda: READY.search(self.said()) or self.process.poll() is not None)
        assert READY.search(self.said()), self.said()
        return self

    def end(self, number: int = signal.SIGTERM, *, within_s: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(within_s)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def until(condition: Callable[[], Any], limit_s: float = 60) -> None:
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up, "it never came to that"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    (tmp_path / "shop.py").write_text(APP)
    processes: list[Process] = []

    def started(name: str = "shop:app", *options: str) -> Process:
        process = Process(tmp_path, name, "--poll", "0.1", "--lease-ttl", "1.5", *options)
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.close()


def seen(folder: Path) -> list[str]:
    path = folder / "seen"
    return path.read_text().splitlines() if path.exists() else []


def leave_behind(folder: Path, flow_id: str, **inputs: Any) -> None:
    async def main() -> None:
        async with await lf.open_store(str(folder / "events.db")) as store:
            for execution_id, input in inputs.items():
                payload = {"flowId": flow_id, "flowVersion": "1", "input": input}
                await store.append(lf.Envelope.make(execution_id, 0, "EXECUTION_STARTED", payload, 0))

    asyncio.run(main())


def read(folder: Path, execution_id: str) -> list[lf.Envelope]:
    async def main() -> list[lf.Envelope]:
        async with await lf.open_store(str(folder / "events.db")) as store:
            return await store.read(execution_id)

    return asyncio.run(main())


def test_sigterm_lets_steps_finish_within_the_grace_and_another_worker_takes_over_at_once(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    """F19: three steps (0.5 s; raises at 0.5 s; 60 s), grace 2 s → completed, failed, recoverable."""
    leave_behind(tmp_path, "works", good=0.5, bad=-0.5, long=60.0)
    first = start("shop:app", "--grace", "2").ready()
    until(lambda: len(seen(tmp_path)) >= 3)
    assert first.end(within_s=30) == 0
    assert "stopped" in first.said()
    outcomes = ("STEP_COMPLETED", "STEP_FAILED", "STEP_CANCELLED", "EXECUTION_FAILED", "EXECUTION_CANCELLED")
    assert of(read(tmp_path, "good"), *outcomes) == ["STEP_COMPLETED"]
    assert of(read(tmp_path, "bad"), *outcomes)[0] == "STEP_FAILED"
    assert of(read(tmp_path, "long"), *outcomes) == []
    begun = seen(tmp_path).count("began 60.0")
    start().ready()
    until(lambda: seen(tmp_path).count("began 60.0") == begun + 1, 30)
    assert seen(tmp_path).count("began 0.5") == 1


def test_a_killed_workers_executions_go_on_in_another_once_its_leases_run_out(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    leave_behind(tmp_path, "works", x=2.0)
    first = start().ready()
    until(lambda: seen(tmp_path) == ["began 2.0"])
    first.end(signal.SIGKILL)
    second = start().ready()
    until(lambda: kinds(read(tmp_path, "x"))[-1] == "EXECUTION_COMPLETED")
    assert seen(tmp_path) == ["began 2.0", "began 2.0", "ended 2.0"]
    assert "'x' is driven by nobody: taking it up" in second.said()


def test_what_kills_its_worker_is_set_aside_after_so_many_crashes_and_released_by_hand(
    start: Callable[..., Process], spawn: Callable[..., Ended], tmp_path: Path
) -> None:
    """F16: `os._exit(1)` in a step, cap 3 → 3 crashes, then set aside; the rest goes on."""
    leave_behind(tmp_path, "kills", poison=None)  # the first crash: nobody drives it
    for crash in range(1, 3):
        assert start().process.wait(60) == 1
        assert seen(tmp_path) == ["died"] * crash
    last = start().ready()
    leave_behind(tmp_path, "works", healthy=0.01)
    until(lambda: kinds(read(tmp_path, "healthy"))[-1] == "EXECUTION_COMPLETED")
    db = tmp_path / "events.db"
    until(lambda: spawn("set-aside", db).out)  # once the lease of the last crash has run out
    listed = spawn("set-aside", db)
    assert (listed.code, listed.err) == (0, "")
    assert re.fullmatch(r"poison  3 crashes  3 runs in a row crashed without progress\n", listed.out.decode())
    assert last.process.poll() is None
    assert seen(tmp_path).count("died") == 2
    released = spawn("release", db, "poison")
    assert (released.code, released.out) == (0, b"released poison\n")
    assert last.process.wait(90) == 1
    assert seen(tmp_path).count("died") == 3
    again = spawn("release", db, "healthy")
    assert (again.code, again.err) == (1, "")
    assert again.out == b"healthy is not set aside\n"


def test_a_second_signal_ends_a_worker_at_once(start: Callable[..., Process], tmp_path: Path) -> None:
    leave_behind(tmp_path, "works", x=60.0)
    worker = start("shop:app", "--grace", "60").ready()
    until(lambda: seen(tmp_path) == ["began 60.0"])
    worker.process.send_signal(signal.SIGTERM)
    until(lambda: "SIGTERM: stopping" in worker.said())
    assert worker.end(within_s=10) == -signal.SIGTERM


@pytest.mark.parametrize("flow_id", ["sync", "elsewhere"])
def test_a_thread_that_cannot_be_stopped_does_not_keep_the_process_from_ending(
    start: Callable[..., Process], tmp_path: Path, flow_id: str
) -> None:
    """F19: a sync step of 20 minutes, a grace of no time."""
    leave_behind(tmp_path, flow_id, x=1200)
    process = start("shop:app", "--grace", "0").ready()
    until(lambda: "blocked" in seen(tmp_path))
    assert process.end() == 0
    assert seen(tmp_path) == ["blocked", "exited"], "exit functions run all the same"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait_for_a_thread_either(
    start: Callable[..., Process], tmp_path: Path, second: int
) -> None:
    leave_behind(tmp_path, "sync", x=1200)
    process = start("shop:app", "--grace", "600").ready()
    until(lambda: "blocked" in seen(tmp_path))
    process.process.send_signal(signal.SIGINT)
    until(lambda: "stopping" in process.said())
    assert process.end(second) == -second


def test_an_app_with_a_lifespan_puts_its_schedules_and_its_health_is_served(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    worker = start("shop:scheduled", "--health", "127.0.0.1:0").ready()
    address = re.search(r"health at (\S+)", worker.said())
    assert address is not None
    until(lambda: "ended 0" in seen(tmp_path))
    with urllib.request.urlopen(address[1]) as answer:
        assert answer.status == 200
        assert lf.decode(answer.read())["phase"] == "running"
    assert worker.end(signal.SIGINT) == 0
    assert seen(tmp_path)[-2:] == ["left", "exited"]


def test_a_connection_that_goes_silent_is_given_up_after_the_time_of_a_statement(
    start: Callable[..., Process], tmp_path: Path, postgres_server: PostgresServer
) -> None:
    """All that the worker has is silent for ever, and new ones are not. It would wait for 60 s."""

    async def left() -> None:
        async with await lf.open_store(postgres_server.dsn) as store:
            payload = {"flowId": "works", "flowVersion": "1", "input": 0}
            await store.append(lf.Envelope.make("silent", 0, "EXECUTION_STARTED", payload, 0))

    with Network() as network:
        link = network.link(str(postgres_server.folder / ".s.PGSQL.5432"))
        dsn = f"postgresql://loomfast@127.0.0.1:{link.port}/postgres"
        worker = start("shop:app", "--db", dsn, "--statement-timeout", "0.5").ready()
        network.do(link.lose)
        asyncio.run(left())
        until(lambda: "ended 0" in seen(tmp_path), 30)
        assert worker.end() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["shop"], "MODULE:APP shop: must be MODULE:NAME"),
        (["nowhere:app"], "MODULE:APP nowhere:app: No module named 'nowhere'"),
        (["shop:other"], "shop has no other"),
        (["shop:here"], "must be a loomfast.App, or a list of flows"),
        (["shop:app", "--per-flow", "x=y"], "--per-flow x=y: must be N, or FLOW=N"),
        (["shop:app", "--per-flow", "0"], "per_flow=0"),
        (["shop:app", "--per-flow", "1", "--per-flow", "a=1"], "--per-flow: say one number"),
        (["shop:app", "--health", "here"], "--health here: must be HOST:PORT"),
        (["shop:app", "--health", "a..b:80"], "--health a..b:80: must be HOST:PORT"),
        (["shop:app", "--health", "a:" + "9" * 5000], "must be HOST:PORT"),
        (["shop:app", "--per-flow", "9" * 5000], "must be N, or FLOW=N"),
        (["shop:app", "--lease-ttl", "0"], "ttl_s=0"),
        (["shop:app", "--poll", "nan"], "poll_s=nan"),
        (["shop:app", "--statement-timeout", "5"], "--statement-timeout: only a store at postgresql://"),
        ([*ELSEWHERE, "--statement-timeout", "0"], "--statement-timeout 0.0: must be a number of seconds"),
        ([*ELSEWHERE, "--statement-timeout", "nan"], "--statement-timeout nan: must be a number of seconds"),
        ([*ELSEWHERE, "--statement-timeout", "inf"], "--statement-timeout inf: must be a number of seconds"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "shop.py").write_text(APP)
    command = [sys.executable, "-m", "loomfast", "worker", "--db", "events.db", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.startswith("loomfast: ")
    assert done.stderr.count("\n") == 1
