"""The process that is killed: it runs errands on a store, does as it is told, and says what is durable.

What lives here: the worker, as a program (`python -m tests.soak.worker`). What must not: what to do (the
driver tells it on its standard input), and any judgement.

Started, it recovers what was abandoned, and goes on looking for more: the storage may have failed a run, or,
with leases, another worker may have died. It says only what the runtime has told it is durable.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from typing import Any

import pytest

import loomfast as lf
from loomfast.stores import open_store
from tests import breakages
from tests.soak.flows import Plan, errand_in
from tests.soak.outside import Outside, committed
from tests.soak.testimony import lines, say

STDOUT = 1
# How long an effect takes at most, and how long to wait between two looks for what was abandoned.
LONGEST_EFFECT_S = 0.03
LOOK_S = 0.1
# So that recoveries begin at snapshots too.
SNAPSHOT_EVERY = 8
# An errand may be killed in every round: being set aside is another test's.
MAX_CRASHES = 1_000_000


class Worker:
    """Obeys commands, each in a task of its own."""

    def __init__(self, runtime: lf.WorkflowRuntime, errand: lf.FlowDefinition) -> None:
        self._runtime = runtime
        self._errand = errand
        self._tasks: set[asyncio.Task[None]] = set()

    async def obey(self, commands: asyncio.StreamReader) -> None:
        """Obey until the driver says no more."""
        recovering = asyncio.create_task(self._recover())
        while text := await commands.readline():
            (command,) = lines([text])
            task = asyncio.create_task(self._guarded(*command))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        recovering.cancel()

    async def _recover(self) -> None:
        while True:
            try:
                for report in await self._runtime.recover_abandoned(max_crashes=MAX_CRASHES):
                    if report.outcome != "failed":
                        say(STDOUT, report.outcome, report.execution_id)
                    elif not isinstance(report.error, lf.StorageError | lf.ConflictError):
                        say(STDOUT, "broken", f"{report.execution_id} is not recovered: {report.error!r}")
            except lf.StorageError as error:
                say(STDOUT, "failed", None, repr(error))
            await asyncio.sleep(LOOK_S)

    async def _guarded(self, verb: str, execution_id: str, *rest: Any) -> None:
        try:
            await getattr(self, verb)(execution_id, *rest)
        except (lf.StorageError, lf.ConflictError) as error:
            say(STDOUT, "failed", execution_id, verb, f"{type(error).__name__}: {error}")
        except Exception as error:
            say(STDOUT, "broken", f"{verb} {execution_id}: {error!r}")

    async def start(self, execution_id: str, plan: Plan) -> None:
        try:
            handle = await self._runtime.start(self._errand, plan, execution_id=execution_id)
        except lf.ExecutionAlreadyExistsError:
            say(STDOUT, "existed", execution_id)
        else:
            say(STDOUT, "started", execution_id)
            await self._result(handle)

    async def answer(self, execution_id: str, event_type: str, gate: int, payload: Any) -> None:
        handle = await self._runtime.resume(
            execution_id, event_type, payload, gate=gate, resume_id=f"answer-{gate}"
        )
        say(STDOUT, "answered", execution_id, gate, payload)
        await self._result(handle)

    async def fire(self, execution_id: str) -> None:
        await self._result(await self._runtime.fire(execution_id))

    async def resolve(self, execution_id: str, key: str, output: str | None) -> None:
        handle = await self._runtime.resolve_in_doubt(execution_id, key, output, release=output is None)
        await self._result(handle)

    async def fork(self, execution_id: str, at: int, child: str) -> None:
        handle = await self._runtime.fork(execution_id, at, fork_id=child)
        say(STDOUT, "forked", child, execution_id, at)
        await self.look(child)
        await self._result(handle)

    async def look(self, execution_id: str) -> None:
        """Say where an execution is."""
        state = await self._runtime.load_state(execution_id)
        if state is None:
            say(STDOUT, "absent", execution_id)
            return
        pending = state.pending
        gate = None if pending is None else [pending.ordinal, pending.on, pending.wake_at]
        doubted = [key for key, step in state.steps.items() if step.phase == "in-doubt"]
        say(STDOUT, "state", execution_id, state.status, gate, doubted)

    async def _result(self, handle: lf.ExecutionHandle) -> None:
        state = await handle.rest()
        if state.ended is not None:
            say(STDOUT, "result", handle.execution_id, await handle.result())


async def main(db: str, seed: str, lease_ttl_s: float | None) -> None:
    commands = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    errand = errand_in(Outside(STDOUT, seed, LONGEST_EFFECT_S))
    async with (
        await open_store(db) as store,
        lf.WorkflowRuntime(
            store,
            flows=[errand],
            on_commit=partial(committed, STDOUT),
            snapshot_every=SNAPSHOT_EVERY,
            lease_ttl_s=lease_ttl_s,
        ) as runtime,
    ):
        say(STDOUT, "ready")
        await Worker(runtime, errand).obey(commands)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("db")
    parser.add_argument("seed")
    parser.add_argument("--lease-ttl-s", type=float)
    parser.add_argument("--broken", choices=breakages.BY_NAME, help="break the runtime in one place first")
    arguments = parser.parse_args()
    if arguments.broken is not None:
        breakages.BY_NAME[arguments.broken](pytest.MonkeyPatch())
    asyncio.run(main(arguments.db, arguments.seed, arguments.lease_ttl_s))
