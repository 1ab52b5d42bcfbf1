"""Guarantee 8, and closing: what a call does to the loop, to its caller, and after the end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

from loomfast._core.snapshots import snapshot_of
from loomfast._errors import LoomError, StoreClosedError
from loomfast._kernels import fold_events
from loomfast.stores import EventStore, Lease, Recovery, ScheduleRow
from loomfast.testing.conformance._suite import Conformance, guarantee
from loomfast.testing.conformance.logs import event, log

# How long, in seconds, a large call may keep other tasks of its loop waiting. A store that works on the loop
# takes a multiple of it; a busy machine, by itself, does not.
LONGEST_STALL_S = 0.5

EVERY_CALL: dict[str, Callable[[EventStore], Awaitable[Any]]] = {
    "append": lambda store: store.append(event("x", 1)),
    "append_batch": lambda store: store.append_batch([]),
    "read": lambda store: store.read("x"),
    "read_range": lambda store: store.read_range("x", 0, 0),
    "fold": lambda store: store.fold("x"),
    "last_sequence": lambda store: store.last_sequence("x"),
    "list_executions": lambda store: store.list_executions(),
    "acquire_fence": lambda store: store.acquire_fence("x"),
    "acquire_fence, lease": lambda store: store.acquire_fence("x", lease=Lease("x", "node", 1, 0)),
    "read_all": lambda store: store.read_all(),
    "truncate_prefix": lambda store: store.truncate_prefix("x", 1),
    "copy_prefix": lambda store: store.copy_prefix("x", "y", 0),
    "snapshots.save": lambda store: store.snapshots.save(snapshot_of(fold_events(None, [event("x", 0)]))),
    "snapshots.latest": lambda store: store.snapshots.latest("x"),
    "snapshots.list": lambda store: store.snapshots.list("x"),
    "snapshots.delete": lambda store: store.snapshots.delete("x", 1),
    "snapshots.verify": lambda store: store.snapshots.verify(),
    "branches.add": lambda store: store.branches.add("b", "y", parent_id="x", cut=0),
    "branches.get": lambda store: store.branches.get("x", "b"),
    "branches.refs": lambda store: store.branches.refs("x"),
    "branches.tips": lambda store: store.branches.tips("x"),
    "branches.children": lambda store: store.branches.children("x"),
    "branches.branch_of": lambda store: store.branches.branch_of("x"),
    "branches.promote": lambda store: store.branches.promote("x", "b"),
    "leases.acquire": lambda store: store.leases.acquire("x", "node", 1),
    "leases.renew": lambda store: store.leases.renew([], 1),
    "leases.release": lambda store: store.leases.release([]),
    "leases.get": lambda store: store.leases.get("x"),
    "leases.held": lambda store: store.leases.held([]),
    "recoveries.put": lambda store: store.recoveries.put(Recovery("x", 1, 0, False, None)),
    "recoveries.get": lambda store: store.recoveries.get("x"),
    "recoveries.delete": lambda store: store.recoveries.delete("x"),
    "recoveries.list": lambda store: store.recoveries.list(),
    "timers.due_wakes": lambda store: store.timers.due_wakes(0),
    "timers.due_schedules": lambda store: store.timers.due_schedules(0),
    "timers.put": lambda store: store.timers.put(ScheduleRow("s", b"{}", None)),
    "timers.get": lambda store: store.timers.get("s"),
    "timers.delete": lambda store: store.timers.delete("s"),
    "timers.list": lambda store: store.timers.list(),
}


class CallConformance(Conformance):
    """Cancelling, sharing the loop, closing."""

    @guarantee(8)
    async def test_a_cancelled_append_is_whole_or_absent_and_makes_no_noise(self) -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with self.open_store() as store:
            await store.append(event("taken", 0))
            tasks = []
            for n in range(60):
                batch = log(f"x{n}", 5) if n % 2 else [*log(f"x{n}", 4), event("taken", 0)]
                tasks.append(asyncio.create_task(store.append_batch(batch)))
            await asyncio.sleep(0)
            for task in tasks[:40]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            lengths = [len(await store.read(f"x{n}")) for n in range(60)]
        assert {lengths[n] for n in range(0, 60, 2)} == {0}
        assert {lengths[n] for n in range(1, 60, 2)} <= {0, 5}
        assert all(lengths[n] == 5 for n in range(1, 60, 2) if results[n] is None)
        del tasks, results
        gc.collect()
        await asyncio.sleep(0)
        assert complaints == []

    @guarantee(8)
    async def test_large_calls_leave_the_loop_to_others(self) -> None:
        """F21."""
        async with self.open_store() as store:
            stalls: list[float] = []
            watching = asyncio.create_task(_watch(stalls))
            events = log("x", 10_000)
            await asyncio.sleep(0.01)
            await store.append_batch(events)
            await store.fold("x")
            await store.copy_prefix("x", "y", 9_999)
            assert len(await store.read("y")) == 10_000
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        assert max(stalls) < LONGEST_STALL_S

    @guarantee(2)
    async def test_a_closed_store_refuses_every_call_and_closes_twice(self) -> None:
        async with self.open_store() as store:
            await store.append(event("x", 0))
            await store.close()
            await store.close()
            answered: list[tuple[str, type[LoomError] | None]] = []
            for asked in (store, store.primary):
                for name, call in EVERY_CALL.items():
                    try:
                        await call(asked)
                    except StoreClosedError:
                        continue
                    except LoomError as error:
                        answered.append((name, type(error)))
                    else:
                        answered.append((name, None))
            assert answered == []

    @guarantee(2)
    async def test_closing_finishes_what_was_queued_or_rejects_it(self) -> None:
        async with self.open_store() as store:
            tasks = [asyncio.create_task(store.append_batch(log(f"x{n}", 100))) for n in range(20)]
            await asyncio.sleep(0)
            await store.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, StoreClosedError)

    @guarantee(2, needs="restart")
    async def test_what_was_queued_at_closing_is_there_exactly_if_its_caller_was_told_so(self) -> None:
        """F22: closing flushes or rejects, and never forgets."""
        async with self.open_store() as store:
            tasks = [asyncio.create_task(store.append_batch(log(f"x{n}", 10))) for n in range(20)]
            await asyncio.sleep(0)
            await store.close()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        async with self.open_store() as store:
            for n, result in enumerate(results):
                assert len(await store.read(f"x{n}")) == (10 if result is None else 0)


async def _watch(stalls: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(0.005)
        stalls.append(loop.time() - before - 0.005)
