"""Tenants that share a store (F27): no verb sees, changes or reveals anything of another's.

That a tenant's view keeps the whole contract is the conformance kit's to check (`test_conformance.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import loomfast as lf
from loomfast._core.snapshots import Snapshot, snapshot_of, state_of
from loomfast._errors import (
    BadInputError,
    DuplicateSequenceError,
    LoomError,
    StoreClosedError,
    StoreReadError,
    UnknownBranchError,
    UnknownExecutionError,
)
from loomfast._kernels import fold_events
from loomfast.stores import (
    EventStore,
    MemoryEventStore,
    PositionedEvent,
    Recovery,
    ReplicaReadEventStore,
    ScheduleRow,
    TenantScopedEventStore,
    Wake,
)
from loomfast.testing.conformance.logs import parked
from tests.conftest import OpenStore
from tests.runtime.harness import runtime

from .logs import event, log

# Pairs (tenant, id) that a careless join with ":" would take for one another.
PAIRS = [
    ("a", "b:c"),
    ("a:b", "c"),
    ("", "a:b:c"),
    ("a:b:c", ":"),
    ("1:a", "b"),
    ("1", "a:b"),
    ("1:", "x"),
    ("", "1::x"),
    ("0::", "x"),
    ("a\x00", "b"),
    ("a", "\x00b"),
    ("\ud800", "é"),
]
LONG_S = 3600.0


def snapshot_at_start(execution_id: str) -> Snapshot:
    return snapshot_of(fold_events(None, [event(execution_id, 0)]))


async def life(store: EventStore, execution_id: str, mark: str) -> None:
    """Leave something of everything that a store keeps, recognisable by `mark`."""
    fork = f"{execution_id}/fork"
    events = log(execution_id, 6)
    events.append(event(execution_id, 6, "EXECUTION_SUSPENDED", {"gate": 0, "on": mark, "wakeAt": 5}))
    await store.append_batch(events)
    await store.snapshots.save(snapshot_of(fold_events(None, events)))
    await store.copy_prefix(execution_id, fork, 3, branch_name="try", fork_metadata={"mark": mark})
    assert await store.acquire_fence(execution_id) == 1
    assert await store.leases.acquire(f"{execution_id}/lease", mark, LONG_S) is not None
    await store.recoveries.put(Recovery(execution_id, 1, 2, False, mark))
    assert (
        await store.timers.put(
            ScheduleRow(f"{execution_id}/schedule", mark.encode("utf-8", "backslashreplace"), 7)
        )
        is not None
    )


async def sight(store: EventStore, execution_id: str) -> dict[str, Any]:
    """Everything that can be seen through a store, save what is its own: positions, tokens and versions."""
    fork = f"{execution_id}/fork"
    lease = await store.leases.get(f"{execution_id}/lease")
    snapshot = await store.snapshots.latest(execution_id)
    return {
        "logs": [await store.read(name) for name in (execution_id, fork)],
        "order": [placed.event for placed in await store.read_all()],
        "listing": [summary[:4] for summary in await store.list_executions()],
        "states": [await store.fold(name) for name in (execution_id, fork)],
        "snapshot": None if snapshot is None else (snapshot, state_of(snapshot)),
        "snapshots": await store.snapshots.list(execution_id),
        "faults": await store.snapshots.verify(),
        "branches": await store.branches.refs(execution_id),
        "tips": await store.branches.tips(execution_id),
        "lease": None if lease is None else (lease.key, lease.owner),
        "accounts": await store.recoveries.list(),
        "wakes": await store.timers.due_wakes(10),
        "schedules": [schedule[:3] for schedule in await store.timers.list()],
        "due": [schedule[:3] for schedule in await store.timers.due_schedules(10)],
    }


async def test_tenants_with_treacherous_names_have_unrelated_executions(open_store: OpenStore) -> None:
    """F27: tenants `a` and `a:b`, ids `b:c` and `c`; separators and empty names included."""
    async with open_store() as shared:
        for tenant, execution_id in PAIRS:
            await life(TenantScopedEventStore(shared, tenant), execution_id, f"{tenant!r}{execution_id!r}")
        for tenant in dict(PAIRS):
            own_ids = [execution_id for other, execution_id in PAIRS if other == tenant]
            alone = MemoryEventStore()
            for execution_id in own_ids:
                await life(alone, execution_id, f"{tenant!r}{execution_id!r}")
            for execution_id in own_ids:
                scoped = TenantScopedEventStore(shared, tenant)
                assert await sight(scoped, execution_id) == await sight(alone, execution_id)


async def test_a_tenant_sees_of_the_others_nothing_on_any_verb(open_store: OpenStore) -> None:
    """F27: a foreign id behaves as an unknown one."""
    async with open_store() as shared:
        mine, theirs = TenantScopedEventStore(shared, "a"), TenantScopedEventStore(shared, "a:b")
        await life(theirs, "x", "theirs")
        before = await sight(theirs, "x")
        nothing = await sight(MemoryEventStore(), "x")
        for name in ("x", "b:x", "3:a:b:x", ":b:x"):
            assert await sight(mine, name) == nothing
            refused: list[tuple[Any, type[LoomError]]] = [
                (mine.truncate_prefix(name, 2), UnknownExecutionError),
                (mine.copy_prefix(name, "y", 0), UnknownExecutionError),
                (mine.recoveries.put(Recovery(name, 1, 1, False, None)), UnknownExecutionError),
                (mine.recoveries.list(after=name), UnknownExecutionError),
                (mine.branches.promote(name, "try"), UnknownBranchError),
                (mine.branches.add("b", "y", parent_id=name, cut=0), UnknownExecutionError),
                (
                    mine.snapshots.save(snapshot_of(fold_events(None, [event(name, 0)]))),
                    UnknownExecutionError,
                ),
            ]
            for call, error in refused:
                with pytest.raises(error) as caught:
                    await call
                assert "3:a:b" not in str(caught.value).replace(f"1:a:{name}", "")
            assert await mine.recoveries.delete(name) is False
            assert await mine.snapshots.delete(name, 99) == 0
            assert await mine.timers.due_wakes(10, after=Wake(name, 5)) == []
        assert await mine.timers.delete("x/schedule") is False
        assert await mine.timers.get("x/schedule") is None
        taken = await mine.leases.acquire("x/lease", "mine", LONG_S)
        assert taken is not None
        foreign = await theirs.leases.get("x/lease")
        assert foreign is not None
        assert await mine.leases.renew([foreign], LONG_S) == []
        await mine.leases.release([foreign])
        assert await theirs.leases.get("x/lease") == foreign
        with pytest.raises(lf.LeaseLostError):
            await mine.acquire_fence("x", lease=foreign)
        assert await mine.acquire_fence("x", lease=taken) == 1  # of its own, which is yet to be
        await life(mine, "own", "mine")
        assert await sight(theirs, "x") == before
        await theirs.append(event("x", 7, fence=1))


async def test_errors_name_the_prefixed_id(open_store: OpenStore) -> None:
    """SPEC 7; the confirmation of a start reads through the same store and so does not care."""
    async with open_store() as shared:
        scoped = TenantScopedEventStore(shared, "a:b")
        await scoped.append(event("c", 0))
        with pytest.raises(DuplicateSequenceError) as caught:
            await scoped.append(event("c", 0))
        assert caught.value.execution_id == "3:a:b:c"
        bad = dataclasses.replace(snapshot_at_start("c"), body=b"{}")
        with pytest.raises(lf.BadSnapshotError) as bad_one:
            await scoped.snapshots.save(bad)
        assert bad_one.value.execution_id == "3:a:b:c"


async def test_what_a_tenant_wrote_stands_in_the_shared_store_under_its_prefix(open_store: OpenStore) -> None:
    async with open_store() as shared:
        scoped = TenantScopedEventStore(shared, "a")
        events = log("x", 3)
        await scoped.append_batch(events)
        await scoped.snapshots.save(snapshot_of(fold_events(None, events)))
        await scoped.copy_prefix("x", "y", 1)
        stored = await shared.read("1:a:x")
        assert [one.id for one in stored] == ["1:a:x-0", "1:a:x-1", "1:a:x-2"]
        assert (await shared.read("1:a:y"))[0].metadata["forkOf"]["executionId"] == "1:a:x"
        assert (await scoped.read("y"))[0].metadata["forkOf"]["executionId"] == "x"
        snapshot = await shared.snapshots.latest("1:a:x")
        assert snapshot is not None
        assert state_of(snapshot) == await shared.fold("1:a:x") == fold_events(None, stored)
        assert await shared.snapshots.verify() == []


async def test_a_fork_that_somebody_made_across_tenants_reveals_nothing(open_store: OpenStore) -> None:
    async with open_store() as shared:
        await TenantScopedEventStore(shared, "secret").append_batch(log("x", 3))
        await shared.copy_prefix(
            "6:secret:x", "1:a:copy", 2, branch_name="copy", fork_metadata={"why": "support"}
        )
        scoped = TenantScopedEventStore(shared, "a")
        assert [one.metadata for one in await scoped.read("copy")] == [{"why": "support"}] * 3
        assert await scoped.branches.branch_of("copy") is None
        assert await scoped.branches.refs("copy") == []
        secret = TenantScopedEventStore(shared, "secret")
        assert [branch.name for branch in await secret.branches.refs("x")] == ["origin"]
        assert [tip.name for tip in await secret.branches.tips("x")] == ["origin"]
        assert await secret.branches.children("x") == []
        assert await secret.branches.get("x", "copy") is None
        with pytest.raises(UnknownBranchError):
            await secret.branches.promote("x", "copy")


async def test_pages_are_filled_with_the_tenants_own_however_many_others_stand_between() -> None:
    shared = MemoryEventStore()
    mine, theirs = TenantScopedEventStore(shared, "a"), TenantScopedEventStore(shared, "b")
    for n in range(1_300):
        await theirs.append_batch(parked(f"x{n}", n))
        await theirs.recoveries.put(Recovery(f"x{n}", 1, 1, False, "why"))
        await theirs.timers.put(ScheduleRow(f"s{n}", b"", n))
        if n % 400 == 399:
            await mine.append_batch(parked(f"m{n}", n))
            await mine.recoveries.put(Recovery(f"m{n}", 1, 1, False, "why"))
            await mine.timers.put(ScheduleRow(f"s{n}", b"", n))
    names = ["m399", "m799", "m1199"]
    listed = await mine.list_executions(limit=2)
    assert [summary.execution_id for summary in listed] == names[:2]
    rest = await mine.list_executions(after=listed[-1].position, limit=2)
    assert [summary.execution_id for summary in rest] == names[2:]
    assert [p.event.id for p in await mine.read_all(limit=3)] == ["m399-0", "m399-1", "m799-0"]
    assert [wake.execution_id for wake in await mine.timers.due_wakes(1_000)] == names[:2]
    assert [
        wake.execution_id for wake in await mine.timers.due_wakes(2_000, after=Wake("m399", 399))
    ] == names[1:]
    assert [account.execution_id for account in await mine.recoveries.list(after="m399")] == names[1:]
    assert [schedule.schedule_id for schedule in await mine.timers.due_schedules(2_000)] == [
        "s399",
        "s799",
        "s1199",
    ]
    assert [schedule.schedule_id for schedule in await mine.timers.list(limit=2)] == ["s1199", "s399"]


async def test_a_reader_at_the_end_does_not_read_the_others_events_again_and_misses_none_of_its_own() -> None:
    reads: list[int] = []

    class Counted(MemoryEventStore):
        async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
            reads.append(after)
            return await super().read_all(after, limit=limit)

    shared = Counted()
    mine, theirs = TenantScopedEventStore(shared, "a"), TenantScopedEventStore(shared, "b")
    await mine.append(event("m", 0))
    await theirs.append_batch(log("x", 2_000))
    [first] = await mine.read_all()
    assert await mine.read_all(first.position) == []
    reads.clear()
    assert await mine.read_all(first.position) == []
    assert reads == [2_001]
    await theirs.append_batch(log("y", 10))
    await mine.append(event("m", 1))
    assert [p.event.id for p in await mine.read_all(first.position)] == ["m-1"]
    assert [p.event.id for p in await mine.read_all()] == ["m-0", "m-1"]
    assert [p.event.id for p in await mine.read_all(500)] == ["m-1"]


async def test_a_damaged_event_of_another_tenant_is_passed_over_and_ones_own_is_not() -> None:
    """F15, F27."""

    class Damaged(MemoryEventStore):
        async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
            page: list[PositionedEvent] = []
            for placed in await super().read_all(after, limit=limit):
                if placed.event.event_type == "damaged":
                    if page:
                        break
                    raise StoreReadError(placed.event.execution_id, "damaged", position=placed.position)
                page.append(placed)
            return page

    shared = Damaged()
    mine, theirs = TenantScopedEventStore(shared, "a"), TenantScopedEventStore(shared, "b")
    await mine.append(event("m", 0))
    await theirs.append_batch([event("x", 0), event("x", 1, "damaged"), event("x", 2, "damaged")])
    await mine.append_batch([event("m", 1), event("m", 2, "damaged"), event("m", 3)])
    page = await mine.read_all()
    assert [p.event.id for p in page] == ["m-0", "m-1"]
    with pytest.raises(StoreReadError) as caught:
        await mine.read_all(page[-1].position)
    assert caught.value.execution_id == "1:a:m"
    assert caught.value.position is not None
    assert [p.event.id for p in await mine.read_all(caught.value.position)] == ["m-3"]


async def test_a_view_closes_without_closing_what_it_is_a_view_of() -> None:
    shared = MemoryEventStore()
    one, other = TenantScopedEventStore(shared, "a"), TenantScopedEventStore(shared, "a")
    await one.append(event("x", 0))
    async with one:
        pass
    with pytest.raises(StoreClosedError):
        await one.read("x")
    await other.append(event("x", 1))


async def test_what_decides_goes_to_the_primary_in_the_tenants_own_ids() -> None:
    primary, replica = MemoryEventStore(), MemoryEventStore()
    scoped = TenantScopedEventStore(ReplicaReadEventStore(primary, replica), "a")
    await scoped.append(event("x", 0))
    assert await scoped.read("x") == []
    assert await scoped.primary.read("x") == [event("x", 0)]
    assert scoped.primary.primary is scoped.primary


@pytest.mark.parametrize("tenant", [None, 7, b"a"])
def test_a_tenant_is_a_text(tenant: Any) -> None:
    with pytest.raises(BadInputError, match="tenant"):
        TenantScopedEventStore(MemoryEventStore(), tenant)


async def test_two_tenants_run_flows_with_the_same_ids_side_by_side(open_store: OpenStore) -> None:
    """F27: one runtime for each, one store for both; chosen ids, gates, forks, recovery, snapshots."""
    done: list[str] = []

    @lf.step
    async def act(name: str) -> str:
        done.append(name)
        return name.upper()

    @lf.flow(id="tenants")
    async def flow(ctx: lf.WorkflowContext, name: str) -> list[str]:
        ctx.emit("note", name)
        first = await ctx.run(act, name)
        answer = await ctx.suspend("go")
        return [first, answer]

    async with open_store() as shared:
        for name in ("a", "a:b"):
            scoped = TenantScopedEventStore(shared, name)
            async with runtime(scoped, flow, snapshot_every=1, truncate=True) as rt:
                assert (
                    await (await rt.start(flow, name, execution_id="order-1")).rest()
                ).status == "suspended"
                minted = await rt.start(flow, name)  # the pipelined way
                await minted.rest()
                with pytest.raises(lf.ExecutionAlreadyExistsError) as caught:
                    await rt.start(flow, name, execution_id="order-1")
                assert caught.value.execution_id == "order-1"
                child = await rt.fork(minted.execution_id, 0, "again")
                await child.rest()
        for name in ("a", "a:b"):
            scoped = TenantScopedEventStore(shared, name)
            async with runtime(scoped, flow) as rt:
                assert await (await rt.resume("order-1", "go", name)).result() == [name.upper(), name]
            listed = await scoped.list_executions()
            assert [summary.status for summary in listed] == ["completed", "suspended", "suspended"]
        assert done == ["a", "a", "a", "a:b", "a:b", "a:b"]
