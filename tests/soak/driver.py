"""The driver of a soak: it plays rounds on one store, in each of which the worker is killed at a moment.

What lives here: `Soak`, which starts and kills the processes, writes down what they say, and asks the judge.
What must not: what the workers are to do (load), any knowledge of what a log should hold.

A round: the workers start, recover and work, the driver keeps them busy, repeats starts itself, which must be
refused, and kills them. With leases there are two workers: one is killed first, and the other takes over. On
PostgreSQL some rounds also kill the server, or end its connections. Then the judge looks. In the last round
nobody is killed, and everything has to come to its end.

Plans and moments are drawn from the seed; what happens between them is up to the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, choice
from typing import Any

import asyncpg

import loomfast as lf
from loomfast.stores import open_store
from loomfast.testing.postgres import PostgresServer
from tests.soak.load import Load
from tests.soak.testimony import lines

# How long a round lasts at most before the kill, and how long processes may take for what they must do.
ROUND_S = 0.8
PATIENCE_S = 90.0
# What else is cut off, round by round, if there is a server.
SERVER_ROUNDS = (None, "connections", None, "server")
LINE = 2**24


@dataclass
class Report:
    """What a soak has done and found. `counts` are the last judge's."""

    seed: int
    rounds: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    counts: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Soak:
    """One soak on the store at `db`, with its files in `folder`."""

    def __init__(
        self,
        db: str,
        folder: Path,
        *,
        seed: int,
        server: PostgresServer | None = None,
        lease_ttl_s: float | None = None,
        broken: str | None = None,
    ) -> None:
        self.report = Report(seed)
        self.testimony = folder / "testimony.jsonl"
        self._db = db
        self._errors = folder / "stderr.log"
        self._moments = Random(seed)
        self._server = server
        self._lease_ttl_s = lease_ttl_s
        self._broken = broken
        self._workers: list[asyncio.subprocess.Process] = []
        self._load = Load(seed, self._say)

    async def play(self, rounds: int) -> Report:
        """Play `rounds` rounds with kills and one without; stop at the first that broke something."""
        began = time.monotonic()
        self.testimony.touch()
        with open(self.testimony, "ab") as self._written, open(self._errors, "ab") as self._stderr:
            async with (
                await open_store(self._db) as store,
                lf.WorkflowRuntime(store, flows=[self._load.errand]) as runtime,
            ):
                self._runtime = runtime
                async with self._judge() as judged:
                    for number in range(rounds):
                        await self._round(number, last=False)
                        self.report.rounds += 1
                        if await judged("look"):
                            break
                if not self.report.broken:
                    await self._round(rounds, last=True)
                    async with self._judge() as judged:
                        await judged("last")
        self.report.seconds = time.monotonic() - began
        return self.report

    # --- a round ---------------------------------------------------------------------------------

    async def _round(self, number: int, *, last: bool) -> None:
        self._say("round", number)
        self._load.forget_commands()
        reading, writing = os.pipe()
        try:
            workers = 1 if self._lease_ttl_s is None else 2
            started = [
                await self._worker(f"{self.report.seed}/{number}/{n}", writing) for n in range(workers)
            ]
            self._workers = list(started)
        finally:
            os.close(writing)
        ready = asyncio.Event()
        hearing = asyncio.create_task(self._hear(reading, ready))
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
        nudging = asyncio.create_task(self._load.nudge(self._tell, self._runtime, last=last))
        try:
            await (self._finish(nudging) if last else self._kill())
        finally:
            nudging.cancel()
            for worker in started:
                if worker.returncode is None:  # asyncio's own `kill` also reaps, and loses the exit code
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)
                await worker.wait()
        await hearing
        with contextlib.suppress(asyncio.CancelledError):
            await nudging
        self._written.flush()

    async def _kill(self) -> None:
        cut_off = SERVER_ROUNDS[self.report.rounds % len(SERVER_ROUNDS)]
        moments = [self._moments.random() * ROUND_S for _ in range(3)]
        await asyncio.sleep(moments[0])
        if self._server is not None and cut_off is not None:
            self.report.kills[cut_off] += 1
            if cut_off == "server":
                await asyncio.to_thread(self._server.kill)
                await asyncio.to_thread(self._server.start)
            else:
                connection = await asyncpg.connect(self._server.dsn)
                await connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
                )
                await connection.close()
            await asyncio.sleep(moments[1])
        first, *rest = self._workers
        self._shoot(first)
        for worker in rest:
            await asyncio.sleep(2 * (self._lease_ttl_s or 0) + moments[2])
            self._shoot(worker)

    def _shoot(self, worker: asyncio.subprocess.Process) -> None:
        self._workers.remove(worker)
        if worker.returncode is not None:
            self._broke(f"worker {worker.pid} ended by itself with {worker.returncode}; see {self._errors}")
            return
        os.kill(worker.pid, signal.SIGKILL)
        self.report.kills["worker"] += 1
        self._say("killed", worker.pid)
        self._load.forget_commands()

    async def _finish(self, nudging: asyncio.Task[None]) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(nudging), PATIENCE_S)
        except TimeoutError:
            self._broke(f"these do not end: {list(self._load.open.values())}")
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
            code = await asyncio.wait_for(worker.wait(), PATIENCE_S)
            if code:
                self._broke(f"worker {worker.pid} was closed and ended with {code}; see {self._errors}")

    # --- listening -------------------------------------------------------------------------------

    async def _hear(self, pipe: int, ready: asyncio.Event) -> None:
        """Write down and take in what the workers say, until the last of them is dead."""
        said = asyncio.StreamReader(limit=LINE)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(said), os.fdopen(pipe, "rb")
        )
        while text := await said.readline():
            self._written.write(text)
            ((word, *rest),) = lines([text])
            if word == "ready":
                ready.set()
            self._load.hear(word, rest)
        ready.set()

    def _tell(self, *command: Any) -> None:
        if self._workers:
            pipe = choice(self._workers).stdin
            assert pipe is not None
            pipe.write(json.dumps(command).encode() + b"\n")

    def _say(self, *line: Any) -> None:
        self._written.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def _broke(self, sentence: str) -> None:
        self._say("broken", sentence)

    # --- processes -------------------------------------------------------------------------------

    async def _worker(self, seed: str, stdout: int) -> asyncio.subprocess.Process:
        options = [] if self._lease_ttl_s is None else ["--lease-ttl-s", str(self._lease_ttl_s)]
        options += [] if self._broken is None else ["--broken", self._broken]
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.soak.worker", self._db, seed, *options),
            stdin=asyncio.subprocess.PIPE,
            stdout=stdout,
            stderr=self._stderr,
        )

    @contextlib.asynccontextmanager
    async def _judge(self) -> AsyncIterator[Any]:
        judge = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.soak.judge", self._db, str(self.testimony)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._stderr,
            limit=LINE,
        )
        asking, answering = judge.stdin, judge.stdout
        assert asking is not None
        assert answering is not None

        async def judged(word: str) -> list[str]:
            self._written.flush()
            asking.write(word.encode() + b"\n")
            found = await answering.readline()
            if not found:
                raise RuntimeError(f"the judge ended; see {self._errors}")
            verdict = json.loads(found)
            self.report.counts = verdict["counts"]
            self.report.broken += verdict["broken"]
            return self.report.broken

        try:
            yield judged
        finally:
            asking.close()
            await judge.wait()
