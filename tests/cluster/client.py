"""A client of the cluster: it starts executions, answers what waits, and cancels some.

What lives here: the client, as a program (`python -m tests.cluster.client`). What must not: judgement, and
knowing what other processes do.

It is a runtime with leases, so it drives what it starts and answers, until it is closed or killed in the
middle, and workers take over. It looks at the store at every slot of the wall clock, as every other client
does, so that they answer the same gate at the same moment, each in its own way; some ids they also start
together. It says what was acknowledged to it. A line on its standard input lets it start and cancel nothing
more; the end of its standard input closes it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import loomfast as lf
from loomfast.stores import open_store
from tests.cluster.agreed import plan_for
from tests.cluster.app import errand, options, said
from tests.soak.flows import ANSWER, ONCE
from tests.soak.testimony import lines, say

SLOT_S = 0.4
# How many executions may be open for a client to start another.
WIDTH = 14
# Of how many slots all clients start the same id; of how many executions one is cancelled, and when.
SHARED_OF, CANCELLED_OF = 5, 12
CANCELLED_WITHIN_S = 1.5
PAGE = 1_000


class Client:
    """One client, by the name `name`."""

    def __init__(self, runtime: lf.WorkflowRuntime, testimony: Path, name: str, seed: int) -> None:
        self.settling = False
        self._runtime = runtime
        self._testimony = testimony
        self._name = name
        self._seed = seed
        self._random = Random(f"{seed}/{name}/{time.time_ns()}")
        self._busy: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Act at every slot, until cancelled."""
        while True:
            await asyncio.sleep(SLOT_S - time.time() % SLOT_S)
            slot = int(time.time() / SLOT_S + 0.5)
            try:
                parked = await self._listed("suspended")
                open_now = len(parked) + len(await self._listed("running"))
            except lf.StorageError as error:
                say(said, "failed", None, "look", repr(error))
                continue
            for execution_id in parked:
                self._take_up(execution_id, self._answer(execution_id))
            if not self.settling and open_now < WIDTH:
                execution_id = f"shared-{slot}" if slot % SHARED_OF == 0 else f"{self._name}-{slot}"
                self._take_up(execution_id, self._start(execution_id))

    async def _listed(self, status: str) -> list[str]:
        listed = await self._runtime.store.list_executions(status=status, limit=PAGE)
        return [each.execution_id for each in listed]

    def _take_up(self, execution_id: str, work: Any) -> None:
        if execution_id in self._busy:
            work.close()
            return
        task = self._busy[execution_id] = asyncio.create_task(self._guarded(execution_id, work))
        task.add_done_callback(lambda _: self._busy.pop(execution_id))

    async def _guarded(self, execution_id: str, work: Any) -> None:
        try:
            await work
        except (lf.StorageError, lf.ConflictError, lf.RuntimeClosedError) as error:
            say(said, "failed", execution_id, f"{type(error).__name__}: {error}"[:400])
        except Exception as error:
            say(said, "broken", f"client {self._name}, execution {execution_id!r}: {error!r}"[:400])

    async def _start(self, execution_id: str) -> None:
        plan = plan_for(self._seed, execution_id)
        say(said, "asked", execution_id, plan)
        try:
            handle = await self._runtime.start(errand, plan, execution_id=execution_id)
        except lf.ExecutionAlreadyExistsError:
            say(said, "existed", execution_id)
            return
        say(said, "started", execution_id)
        if self._random.randrange(CANCELLED_OF) == 0:
            await asyncio.sleep(self._random.random() * CANCELLED_WITHIN_S)
            await self._cancel(execution_id)
        else:
            await self._result(handle)

    async def _cancel(self, execution_id: str) -> None:
        if self.settling:
            return
        say(said, "cancelling", execution_id)
        try:
            await self._runtime.cancel(execution_id, f"{self._name} changed its mind")
        except lf.ExecutionEndedError:
            return
        say(said, "cancelled", execution_id)

    async def _answer(self, execution_id: str) -> None:
        state = await self._runtime.load_state(execution_id)
        assert state is not None
        gate = state.pending
        if gate is not None and gate.wake_at is None:
            answer = {"to": gate.ordinal, "by": self._name}
            handle = await self._runtime.resume(
                execution_id, ANSWER, answer, gate=gate.ordinal, resume_id=f"{self._name}-{gate.ordinal}"
            )
            say(said, "answered", execution_id, gate.ordinal, answer)
            await self._result(handle)
        for key in [str(key) for key, step in state.steps.items() if step.phase == "in-doubt"]:
            begun, output = self._witnessed(execution_id, key)
            if not begun:
                say(said, "released", execution_id, key)
            handle = await self._runtime.resolve_in_doubt(
                execution_id, key, (output or "unknown") if begun else None, release=not begun
            )
            await self._result(handle)

    def _witnessed(self, execution_id: str, key: str) -> tuple[bool, str | None]:
        """Whether the effect of a step in doubt has begun, and its output if it ended."""
        assert key.startswith(ONCE)
        begun, output = False, None
        with open(self._testimony, "rb") as testimony:
            for word, *rest in lines(testimony):
                if word in ("begin", "end") and rest[:2] == [execution_id, key]:
                    begun = True
                    output = rest[2] if word == "end" else output
        return begun, output

    async def _result(self, handle: lf.ExecutionHandle) -> None:
        state = await handle.rest()
        if state.status == "completed":
            say(said, "result", handle.execution_id, await handle.result())


async def main(db: str, testimony: Path, name: str, seed: int, lease_ttl_s: float) -> None:
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    async with (
        await open_store(db) as store,
        lf.WorkflowRuntime(store, flows=[errand], lease_ttl_s=lease_ttl_s, **options) as runtime,
    ):
        client = Client(runtime, testimony, name, seed)
        running = asyncio.create_task(client.run())
        print(f"ready, process {os.getpid()}", file=sys.stderr, flush=True)
        while await orders.readline():
            client.settling = True
        running.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("db")
    parser.add_argument("testimony", type=Path)
    parser.add_argument("name")
    parser.add_argument("seed", type=int)
    parser.add_argument("lease_ttl_s", type=float)
    arguments = parser.parse_args()
    asyncio.run(main(*vars(arguments).values()))
