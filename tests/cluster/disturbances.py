"""What is done to the processes of a cluster, and to what lies between them and their store.

What lives here: `Disturbances`, which deals the kinds from a shuffled deck, so that each comes as often as
any other. What must not: load, judgement.

The kinds, their order, the pauses and how long each lasts are drawn from the seed. Whom it hits depends on
who is free: nobody is disturbed twice at a time, and one worker is always left alone. The testimony says so
before a disturbance begins, and once it is over and a lease's time has passed. Of an orderly end it says
nothing, since that excuses nothing.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from loomfast.testing.postgres import PostgresServer
from tests.cluster.members import Member
from tests.cluster.network import Network

WORKER_KINDS = ("kill", "stop", "close")
NETWORK_KINDS = ("cut", "freeze")
CLIENT_KINDS = ("kill-client", "stop-client", "close-client")
SERVER_KINDS = ("restart", "crash")
# Pauses between two disturbances, and how long nobody is there after an end.
PAUSE_S = (0.3, 1.4)
GONE_S = (0.0, 1.0)
LOOK_S = 0.05


class Disturbances:
    """Disturbs `members` until told to stop. `dealt` counts the kinds."""

    def __init__(
        self,
        members: Sequence[Member],
        say: Callable[..., None],
        *,
        seed: int,
        lease_ttl_s: float,
        network: Network | None,
        server: PostgresServer | None,
    ) -> None:
        self.dealt: Counter[str] = Counter()
        self._members = members
        self._say = say
        self._random = Random(seed)
        self._ttl_s = lease_ttl_s
        self._network = network
        self._server = server
        self._server_lock = asyncio.Lock()
        self._outages = 0  # how often the server has gone or come back
        self._under_way: set[asyncio.Task[None]] = set()

    async def play(self, seconds: float) -> None:
        """Disturb for so many seconds, and until each kind was dealt; return once all is over."""
        kinds = [*WORKER_KINDS, *CLIENT_KINDS]
        if self._network is not None:
            kinds += NETWORK_KINDS
        if self._server is not None:
            kinds += SERVER_KINDS
        until = time.monotonic() + seconds
        while not self.dealt or time.monotonic() < until:
            for kind in self._random.sample(kinds, len(kinds)):
                if self.dealt[kind] and time.monotonic() >= until:
                    break
                await asyncio.sleep(self._random.uniform(*PAUSE_S))
                await self._begin(kind, self._random.random())
        while self._under_way:
            done, _ = await asyncio.wait(self._under_way)
            for task in done:
                task.result()

    async def _begin(self, kind: str, chance: float) -> None:
        """Begin a disturbance, once there is somebody it may hit. `chance` draws whom, and how long."""
        self.dealt[kind] += 1
        if kind in SERVER_KINDS:
            work = self._serverless(kind)
        else:
            while not (free := self._free(is_worker=kind not in CLIENT_KINDS)):
                await asyncio.sleep(LOOK_S)
            member = free[int(chance * len(free))]
            member.free = False
            work = self._disturb(member, kind.removesuffix("-client"), chance)
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:  # what failed is for `play` to raise
            self._under_way.discard(task)

    def _free(self, *, is_worker: bool) -> list[Member]:
        able = [member for member in self._members if member.is_worker == is_worker]
        free = [member for member in able if member.free]
        return free if not is_worker or len(free) > 1 else []

    async def _disturb(self, member: Member, kind: str, chance: float) -> None:
        if kind == "close":
            await member.close()
        elif kind == "kill":
            self._say("disturbed", kind, member.pid)
            await member.kill()
        else:
            await self._interrupt(member, kind, chance)
            return
        await asyncio.sleep(GONE_S[0] + chance * (GONE_S[1] - GONE_S[0]))
        outages = self._outages
        await member.start(lambda: self._outages > outages or self._outages % 2 == 1)

    async def _interrupt(self, member: Member, kind: str, chance: float) -> None:
        # On SQLite one that is stopped may hold the file's lock, and so everybody up.
        pid = None if kind == "stop" and self._network is None else member.pid
        self._say("disturbed", kind, pid)
        lasts_s = self._ttl_s * (1.2 + chance)
        if kind == "stop":
            member.signal(signal.SIGSTOP)
            await asyncio.sleep(lasts_s)
            member.signal(signal.SIGCONT)
        else:
            assert self._network is not None
            assert member.link is not None
            self._network.do(member.link.cut if kind == "cut" else member.link.freeze)
            # Cut for a moment, or for longer than leases last.
            await asyncio.sleep(lasts_s if kind == "freeze" or chance > 0.5 else chance)
            self._network.do(member.link.heal)
        await asyncio.sleep(self._ttl_s)
        self._say("calm", kind, pid)
        member.free = True

    async def _serverless(self, kind: str) -> None:
        assert self._server is not None
        async with self._server_lock:
            await self._outage(kind, self._server)

    async def _outage(self, kind: str, server: PostgresServer) -> None:
        self._outages += 1
        self._say("disturbed", kind, None)
        if kind == "crash":
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        else:
            await asyncio.to_thread(server.restart)
        await asyncio.sleep(self._ttl_s)
        self._say("calm", kind, None)
        self._outages += 1
