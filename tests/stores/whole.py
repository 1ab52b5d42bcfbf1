"""A store with a bit of everything in it, and what `verify_store` says of one."""

from __future__ import annotations

from typing import Any

from loomfast import Envelope, Fault, Verified, verify_store
from loomfast._core.snapshots import snapshot_of
from loomfast._kernels import fold_events
from loomfast.stores import EventStore

from .logs import GATED, event, log


def gate(execution_id: str, sequence: int, **more: Any) -> Envelope:
    return event(execution_id, sequence, "EXECUTION_SUSPENDED", {"gate": 0, "on": "timer", **more})


async def fill(store: EventStore) -> None:
    """Write a bit of everything: 8 executions."""
    await store.append_batch([*log("first", 3), gate("first", 3, wakeAt=1_000)])
    await store.append_batch([*log("x", 12), *GATED])
    await store.append_batch([*log("second", 3), gate("second", 3, wakeAt=1_000)])
    await store.append_batch([*log("third", 3), gate("third", 3, wakeAt=500)])
    await store.append_batch(log("cut", 12))
    for through in (4, 8, 11):
        await store.snapshots.save(snapshot_of(fold_events(None, log("cut", through + 1))))
        await store.snapshots.save(snapshot_of(fold_events(None, log("x", through + 1))))
    assert await store.truncate_prefix("cut", 7) == 6
    await store.copy_prefix("x", "fork", 5, branch_name="what-if")
    await store.copy_prefix("fork", "fork-2", 3, branch_name="deeper")
    await store.acquire_fence("unborn")


async def verify(store: EventStore) -> tuple[list[str], Verified]:
    faults: list[Fault] = []
    counts = await verify_store(store, faults.append)
    assert counts.faults == len(faults)
    return [str(fault) for fault in faults], counts
