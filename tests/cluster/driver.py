"""The driver of a cluster: workers and clients on one store, disturbed, then left to settle, then judged.

What lives here: `Cluster`. What must not: what is done to whom (disturbances), what must hold (judge).

When the disturbances are over, nothing is started any more and every worker is well, everything has to come
to its end by itself: the clients only answer. Nothing is timed; what is not reached within `PATIENCE_S` is
left to the judge to name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import loomfast as lf
from loomfast.stores import EventStore, open_store
from loomfast.testing.postgres import PostgresServer
from tests.cluster.agreed import SCHEDULES, TESTIMONY
from tests.cluster.disturbances import Disturbances
from tests.cluster.judge import Verdict, history_of, judged
from tests.cluster.members import Member
from tests.cluster.network import Link, Network
from tests.soak.testimony import lines, say

LEASE_TTL_S = 2.0
POLL_S = 0.2
CLIENTS = 2
PATIENCE_S = 60.0
LOOK_S = 0.1
PAGE = 1_000


class Cluster:
    """One cluster of `workers` workers on a server, or on a SQLite file in `folder` if it is None.

    With `restarts` the server is disturbed too.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        workers: int,
        server: PostgresServer | None = None,
        restarts: bool = False,
    ) -> None:
        self.seconds = 0.0
        self.testimony = folder / "testimony.jsonl"
        self.testimony.touch()
        self._db = str(folder / "cluster.db") if server is None else server.dsn
        self._errors = folder / "stderr.log"
        self._seed = seed
        self._workers = workers
        self._server = server
        self._restarts = restarts

    async def play(self, seconds: float) -> Verdict:
        """Disturb for so many seconds, let everything settle, and judge what is left."""
        began = time.monotonic()
        said = os.open(self.testimony, os.O_WRONLY | os.O_APPEND)
        try:
            with Network() if self._server is not None else contextlib.nullcontext() as network:
                async with await open_store(self._db) as store:
                    await self._play(store, network, partial(say, said), seconds)
                    with open(self.testimony, "rb") as testimony:
                        history = await history_of(store, list(lines(testimony)))
        finally:
            os.close(said)
        verdict = await judged(history)
        self.seconds = time.monotonic() - began
        return verdict

    async def _play(
        self, store: EventStore, network: Network | None, say: Callable[..., None], seconds: float
    ) -> None:
        workers = [self._worker(f"worker-{n}", network, say) for n in range(self._workers)]
        clients = [self._client(f"client-{n}", say) for n in range(CLIENTS)]
        members = [*workers, *clients]
        disturbances = Disturbances(
            members,
            say,
            seed=self._seed,
            lease_ttl_s=LEASE_TTL_S,
            network=network,
            server=self._server if self._restarts else None,
        )
        try:
            await asyncio.gather(*(member.start() for member in members))
            await disturbances.play(seconds)
            await _until(lambda: _all_well(workers))
            await self._settle(store, clients)
            for member in (*clients, *workers):
                await member.close()
        finally:
            for member in members:
                await member.kill()

    async def _settle(self, store: EventStore, clients: Sequence[Member]) -> None:
        """Start nothing more, and wait until all has ended and nobody holds a lease."""
        healed_ms = time.time_ns() // 1_000_000
        async with lf.WorkflowRuntime(store) as runtime:
            schedules = lf.Schedules(runtime)

            async def caught_up() -> bool:
                marks = [schedule.next_ms for schedule in await schedules.list()]
                return len(marks) == len(SCHEDULES) and all(mark and mark > healed_ms for mark in marks)

            await _until(caught_up)
            for schedule in SCHEDULES:
                await schedules.pause(schedule.schedule_id)
        for client in clients:
            client.tell("settle")
        known: list[str] = []

        async def at_rest() -> bool:
            known[:] = []
            after, open_now = 0, 0
            while page := await store.list_executions(after=after, limit=PAGE):
                known.extend(each.execution_id for each in page)
                open_now += sum(each.status in ("running", "suspended") for each in page)
                after = page[-1].position
            return not open_now

        await _until(at_rest)

        async def given_back() -> bool:
            return not await store.leases.held(known)

        await _until(given_back)

    # --- processes -------------------------------------------------------------------------------

    def _worker(self, name: str, network: Network | None, say: Callable[..., None]) -> Member:
        link, db = None, self._db
        if network is not None:
            assert self._server is not None
            link = network.link(str(self._server.folder / ".s.PGSQL.5432"))
            db = f"postgresql://loomfast@127.0.0.1:{link.port}/postgres"
        command = ["-m", "loomfast", "worker", "tests.cluster.app:app", "--db", db, "--health", "127.0.0.1:0"]
        command += ["--lease-ttl", str(LEASE_TTL_S), "--poll", str(POLL_S)]
        return self._member(name, command, say, link=link, is_worker=True)

    def _client(self, name: str, say: Callable[..., None]) -> Member:
        given = (self._db, self.testimony, name, self._seed, LEASE_TTL_S)
        return self._member(name, ["-m", "tests.cluster.client", *map(str, given)], say, is_worker=False)

    def _member(
        self,
        name: str,
        command: list[str],
        say: Callable[..., None],
        *,
        is_worker: bool,
        link: Link | None = None,
    ) -> Member:
        environment = {**os.environ, TESTIMONY: str(self.testimony)}
        return Member(
            name, [sys.executable, *command], environment, self._errors, say, is_worker=is_worker, link=link
        )


async def _until(reached: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it is reached, for as long as that may take."""
    deadline = time.monotonic() + PATIENCE_S
    while not await reached() and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)


async def _all_well(workers: Sequence[Member]) -> bool:
    return all([await _well(worker) for worker in workers])


async def _well(worker: Member) -> bool:
    assert worker.health is not None
    reader, writer = await asyncio.open_connection(*worker.health)
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: worker\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.startswith(b"HTTP/1.1 200")
