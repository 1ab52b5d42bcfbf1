"""The processes of a cluster: started, watched, ended and started again.

What lives here: `Member`, one worker or client. What must not: when what is done to it (disturbances).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster.network import Link

# How long a process may take to be ready, and to end in order.
PATIENCE_S = 60.0
AGAIN_S = 0.3
LINE = 2**20
# Where the app is found by its name.
ROOT = Path(__file__).parents[2]

_READY = re.compile(rb"ready, process \d+")
_HEALTH = re.compile(rb"health at http://([0-9.]+):(\d+)/")


class Member:
    """One process of the name `name`. `free`: nothing is being done to it.

    It says on its standard error that it is ready. A worker ends in order at SIGTERM, a client with its
    standard input. One that ends though nobody has ended it broke something.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: dict[str, str],
        errors: Path,
        say: Callable[..., None],
        *,
        is_worker: bool,
        link: Link | None = None,
    ) -> None:
        self.name = name
        self.link = link
        self.is_worker = is_worker
        self.free = False
        self.health: tuple[str, int] | None = None
        self._command = command
        self._environment = environment
        self._errors = errors
        self._say = say
        self._ending = False
        self._ready = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process it is now."""
        assert self._process is not None
        return self._process.pid

    async def start(self, excused: Callable[[], bool] = lambda: False) -> None:
        """Start it and wait until it is ready; one that ends before is started again if that is `excused`."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self._ending = False
                self._ready.clear()
                process = self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    cwd=ROOT,
                    env=self._environment,
                    stdin=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    limit=LINE,
                )
                self._say("process", process.pid, self.name)
                hearing = asyncio.create_task(self._hear(process))
                ready = asyncio.create_task(self._ready.wait())
                await asyncio.wait((hearing, ready), return_when=asyncio.FIRST_COMPLETED)
                if self._ready.is_set():
                    break
                ready.cancel()
                code = await process.wait()
                if not excused():
                    self._say("broken", f"{self.name} could not start: {code}; see {self._errors}")
                    raise RuntimeError(f"{self.name} could not start: {code}; see {self._errors}")
                await asyncio.sleep(AGAIN_S)
        self._watching = asyncio.create_task(self._watch(process, hearing))
        self.free = True

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    async def kill(self) -> None:
        """End it by SIGKILL, if it runs."""
        if self._watching is None:
            return
        await self._ended(lambda: self.signal(signal.SIGKILL))

    async def close(self) -> None:
        """End it in order."""
        assert self._process is not None
        stdin = self._process.stdin
        assert stdin is not None
        async with asyncio.timeout(PATIENCE_S):
            await self._ended(lambda: self.signal(signal.SIGTERM) if self.is_worker else stdin.close())
        self._say("closed", self.pid)
        if self._process.returncode:
            self._say("broken", f"{self.name} was closed and ended with {self._process.returncode}")

    def tell(self, order: str) -> None:
        """Write a line to its standard input."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(order.encode() + b"\n")

    async def _ended(self, end: Callable[[], None]) -> None:
        assert self._watching is not None
        self._ending, self.free = True, False
        if not self._watching.done():
            end()
        await self._watching

    async def _watch(self, process: asyncio.subprocess.Process, hearing: asyncio.Task[None]) -> None:
        code = await process.wait()
        await hearing
        if not self._ending:
            self._say("broken", f"{self.name}, process {process.pid}, ended by itself with {code}")

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        with open(self._errors, "ab") as errors:
            async for text in process.stderr:
                errors.write(b"%d %s" % (process.pid, text))
                errors.flush()
                if found := _HEALTH.search(text):
                    self.health = found[1].decode(), int(found[2])
                if _READY.search(text):
                    self._ready.set()
