"""Runs on decorated stores: ADR 0103's residuals about group commit and replicas, F22, and D2 anywhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import loomfast as lf
from tests.conftest import OpenStore
from tests.runtime.harness import ScriptedStore, StillClock, kinds, runtime, turns
from tests.stores.logs import event
from tests.stores.stacks import STACKS

STACKED = pytest.mark.parametrize("stacked", STACKS.values(), ids=STACKS)
ISOLATE = pytest.mark.parametrize("isolate", [True, False], ids=["isolate", "reject all"])
Stacked = Callable[[lf.EventStore], lf.EventStore]

effects: Counter[str] = Counter()


@lf.step
async def paid(name: str) -> str:
    effects[name] += 1
    return f"receipt for {name}"


@lf.flow(id="paid-flow")
async def paid_flow(ctx: lf.WorkflowContext, name: str) -> str:
    ctx.emit("note", name)
    return await ctx.run(paid, name)


@lf.flow(id="long-flow")
async def long_flow(ctx: lf.WorkflowContext, name: str) -> list[str]:
    receipts = []
    for n in range(4):
        ctx.emit("before", n)
        receipts.append(await ctx.run(paid, f"{name}.{n}"))
        ctx.emit("after", n)
    return receipts


@pytest.fixture(autouse=True)
def no_effects() -> None:
    effects.clear()


# --- D2 behind every stack -----------------------------------------------------------------------


@STACKED
async def test_two_services_that_start_one_occurrence_pay_for_it_once(
    open_store: OpenStore, stacked: Stacked
) -> None:
    """The record's own race: two nodes that both checked before either wrote."""
    async with open_store() as inner:
        store = stacked(inner)
        async with runtime(store) as one, runtime(store) as two:
            looked = [await rt.load_state("daily@1") for rt in (one, two)]
            assert looked == [None, None]
            outcomes = await asyncio.gather(
                *(rt.start(paid_flow, "daily", execution_id="daily@1") for rt in (one, two)),
                return_exceptions=True,
            )
            started = [outcome for outcome in outcomes if isinstance(outcome, lf.ExecutionHandle)]
            refused = [outcome for outcome in outcomes if isinstance(outcome, lf.ExecutionAlreadyExistsError)]
            assert (len(started), len(refused)) == (1, 1)
            assert refused[0].execution_id == "daily@1"
            assert await started[0].result() == "receipt for daily"
        assert effects == {"daily": 1}


@STACKED
async def test_a_repeat_is_refused_whatever_fences_it(open_store: OpenStore, stacked: Stacked) -> None:
    """D2, L12: a duplicate of an execution that has since been fenced is refused on the fence."""
    async with open_store() as inner:
        store = stacked(inner)
        events: list[str] = []
        async with runtime(store) as one, runtime(store, on_event=lambda e: events.append(e.id)) as two:
            await (await one.start(paid_flow, "x", execution_id="x")).result()
            for _ in range(2):
                with pytest.raises(lf.ExecutionAlreadyExistsError) as caught:
                    await two.start(paid_flow, "x", execution_id="x")
                assert caught.value.execution_id == "x"
                await store.acquire_fence("x")
        assert (effects, events) == ({"x": 1}, [])


@STACKED
async def test_a_fenced_id_nobody_wrote_may_be_started_again(open_store: OpenStore, stacked: Stacked) -> None:
    async with open_store() as inner:
        store = stacked(inner)
        async with runtime(store) as rt:
            token = await store.acquire_fence("x")
            with pytest.raises(lf.StartFencedOutError) as caught:
                await rt.start(paid_flow, "x", execution_id="x", fence=token - 1)
            assert caught.value.execution_id == "x"
            assert not effects
            handle = await rt.start(paid_flow, "x", execution_id="x", fence=token)
            assert await handle.result() == "receipt for x"


@STACKED
async def test_a_minted_id_a_gate_a_fork_and_a_recovery_pass(open_store: OpenStore, stacked: Stacked) -> None:
    @lf.flow(id="gated")
    async def gated(ctx: lf.WorkflowContext, name: str) -> Any:
        receipt = await ctx.run(paid, name)
        return [receipt, await ctx.suspend("go")]

    async with open_store() as inner:
        store = stacked(inner)
        async with runtime(store, gated) as rt:
            handle = await rt.start(gated, "x")
            assert (await handle.rest()).status == "suspended"
            child = await rt.fork(handle.execution_id, 2, fork_id="child")
            await child.rest()
            for execution_id in (handle.execution_id, "child"):
                done = await rt.resume(execution_id, "go", 7)
                assert await done.result() == ["receipt for x", 7]
            started = {"flowId": "gated", "flowVersion": "1", "input": "y"}
            await store.append(event("left", 0, "EXECUTION_STARTED", started))
            left = await rt.recover("left")
            assert (await left.rest()).status == "suspended"
        assert effects == {"x": 1, "y": 1}


@ISOLATE
@pytest.mark.parametrize("name", ["DuplicateSequenceError", "DuplicateEnvelopeIdError", "StaleFenceError"])
async def test_a_conflict_of_a_second_copy_of_loomfast_is_known_by_name(isolate: bool, name: str) -> None:
    foreign = type(name, (Exception,), {})("from a second copy")
    inner = ScriptedStore({0: foreign, 1: foreign, 2: foreign} if isolate else {0: foreign})
    store = lf.CoalescingEventStore(inner, isolate=isolate)
    async with runtime(store) as rt:
        outcomes = await asyncio.gather(
            *(rt.start(paid_flow, name, execution_id=name) for name in ("x", "y")), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [lf.ExecutionHandle] * 2
        for outcome in outcomes:
            assert isinstance(outcome, lf.ExecutionHandle)
            await outcome.result()
    assert effects == {"x": 1, "y": 1}


# --- group commit: the residuals of the record ---------------------------------------------------


@ISOLATE
async def test_a_fresh_start_that_shares_a_failed_batch_still_starts(*, isolate: bool) -> None:
    inner = ScriptedStore()
    store = lf.CoalescingEventStore(inner, isolate=isolate)
    async with runtime(store) as rt:
        await (await rt.start(paid_flow, "old", execution_id="old")).result()
        inner.appends.clear()
        fresh, repeat = await asyncio.gather(
            rt.start(paid_flow, "fresh", execution_id="fresh"),
            rt.start(paid_flow, "old", execution_id="old"),
            return_exceptions=True,
        )
        assert inner.appends[0] == ("append_batch", ["fresh-0", "old-0"])  # they did share it
        assert isinstance(repeat, lf.ExecutionAlreadyExistsError)
        assert repeat.execution_id == "old"
        assert isinstance(fresh, lf.ExecutionHandle)
        assert await fresh.result() == "receipt for fresh"
        if not isolate:
            assert inner.appends[1] == ("append_batch", ["fresh-0"])  # the single retry, alone
    assert effects == {"old": 1, "fresh": 1}


@ISOLATE
async def test_two_starts_of_one_id_that_failed_together_do_not_fail_together_again(isolate: bool) -> None:
    """L12 review: the retry is a one-envelope batch, and so flushed alone."""
    inner = ScriptedStore()
    store = lf.CoalescingEventStore(inner, isolate=isolate)
    async with runtime(store) as one, runtime(store) as two:
        outcomes = await asyncio.gather(
            *(rt.start(paid_flow, "x", execution_id="x") for rt in (one, two)), return_exceptions=True
        )
        assert inner.appends[0] == ("append_batch", ["x-0", "x-0"])
        if not isolate:
            assert inner.appends[1:3] == [("append_batch", ["x-0"])] * 2
        assert sorted(type(outcome).__name__ for outcome in outcomes) == [
            "ExecutionAlreadyExistsError",
            "ExecutionHandle",
        ]
        for outcome in outcomes:
            if isinstance(outcome, lf.ExecutionHandle):
                await outcome.result()
    assert effects == {"x": 1}


async def test_innocent_writers_of_a_failed_batch_abort_and_recovery_finishes_them() -> None:
    """F22, and the record's residual: no completed step is repeated, no proven emit doubled."""
    inner = lf.MemoryEventStore()
    store = lf.CoalescingEventStore(inner, isolate=False)
    names = [f"x{n}" for n in range(20)]
    reported: list[lf.StorageWriteError] = []
    await inner.append(event("taken", 0))
    poisoning = True

    async def poison() -> None:
        while poisoning:
            with pytest.raises(lf.DuplicateSequenceError):
                await store.append(event("taken", 0))
            await turns(7)

    async with runtime(store, on_storage_error=reported.append, batch_events=1) as rt:
        handles = await asyncio.gather(*(rt.start(long_flow, name, execution_id=name) for name in names))
        poisoner = asyncio.ensure_future(poison())
        rests = await asyncio.gather(*(handle.rest() for handle in handles), return_exceptions=True)
        poisoning = False
        await poisoner
    failed = dict(zip(names, rests, strict=True))
    aborted = [name for name in names if isinstance(failed[name], lf.StorageWriteError)]
    assert len(aborted) >= 10
    for name, rest in zip(names, rests, strict=True):
        if isinstance(rest, lf.StorageWriteError):
            assert (rest.execution_id, type(rest.__cause__)) == (name, lf.DuplicateSequenceError)
            assert rest.sequence == (await inner.last_sequence(name) or 0) + 1
    assert sorted(error.execution_id or "" for error in reported) == sorted(aborted)

    durable: dict[str, lf.State] = {}
    for name in aborted:
        state = await inner.fold(name)
        assert state is not None
        durable[name] = state
    before = effects.copy()
    async with runtime(store, long_flow) as rt:
        for name in names:
            handle = await rt.recover(name)
            assert await handle.result() == [f"receipt for {name}.{n}" for n in range(4)]
    for name in names:
        log = await inner.read(name)
        notes = [(e.event_type, e.payload) for e in log if e.event_type in ("before", "after")]
        assert sorted(notes) == sorted((kind, n) for kind in ("before", "after") for n in range(4))
        completed = [e.payload["key"] for e in log if e.event_type == "STEP_COMPLETED"]
        assert sorted(completed) == ["paid", "paid#1", "paid#2", "paid#3"]
        for n, key in enumerate(("paid", "paid#1", "paid#2", "paid#3")):
            step = durable[name].steps.get(key) if name in durable else None
            if name not in durable or (step is not None and step.served):
                assert effects[f"{name}.{n}"] == before[f"{name}.{n}"]  # not run again


async def test_with_isolation_innocent_writers_do_not_even_notice() -> None:
    """F22, beyond the contract."""
    inner = lf.MemoryEventStore()
    store = lf.CoalescingEventStore(inner)
    await inner.append(event("taken", 0))
    running = True

    async def poison() -> int:
        refused = 0
        while running:
            with pytest.raises(lf.DuplicateSequenceError):
                await store.append(event("taken", 0))
            refused += 1
            await turns(1)
        return refused

    async with runtime(store) as rt:
        poisoner = asyncio.ensure_future(poison())
        handles = [await rt.start(long_flow, f"x{n}", execution_id=f"x{n}") for n in range(20)]
        await asyncio.gather(*(handle.result() for handle in handles))
        running = False
        assert await poisoner > 5
    assert set(effects.values()) == {1}


async def test_a_zombie_is_refused_at_the_flush_and_its_successor_is_not() -> None:
    """ADR 0074, L1: what a fenced-out writer has in the buffer is refused when it is flushed."""
    inner = lf.MemoryEventStore()
    store = lf.CoalescingEventStore(inner, max_linger_ms=5)

    @lf.flow(id="zombie")
    async def flow(ctx: lf.WorkflowContext, name: str) -> str:
        for n in range(3):
            await ctx.run(paid, f"{name}.{n}")
        return "done"

    async with runtime(store, flow) as zombie, runtime(store, flow) as heir:
        first = await zombie.start(flow, "x", execution_id="x")
        while (await inner.last_sequence("x") or 0) < 2:
            await asyncio.sleep(0.001)
        second = await heir.recover("x")
        assert await second.result() == "done"
        assert (await first.rest()).status == "completed"  # what became of it is for the store to say
    log = await inner.read("x")
    assert [e.sequence for e in log] == list(range(len(log)))
    assert kinds(log).count("EXECUTION_COMPLETED") == 1


class Failing(lf.MemoryEventStore):
    """A store whose appends fail as `fails` says, if it says so."""

    fails: Callable[[str, int], Exception] | None = None

    async def append_batch(self, envelopes: Sequence[lf.Envelope]) -> None:
        if self.fails is not None:
            raise self.fails(envelopes[0].execution_id, envelopes[0].sequence)
        await super().append_batch(envelopes)


@STACKED
@pytest.mark.parametrize("kind", [lf.StoreFullError, lf.StoreBusyError, lf.StoreReadOnlyError])
async def test_a_failing_store_is_reported_as_what_it_is_to_everybody_it_fails(
    kind: type[lf.StorageWriteError], stacked: Stacked
) -> None:
    """SPEC 9: as itself, with the execution named, though a decorator names another one."""
    inner = Failing()
    failures: list[lf.StorageWriteError] = []
    async with runtime(stacked(inner), on_storage_error=failures.append) as rt:
        inner.fails = lambda execution_id, sequence: kind(execution_id, sequence, "no room")
        calls = [rt.start(paid_flow, name, execution_id=name) for name in "xyz"]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert type(error) is kind
        with pytest.raises(kind):
            await (await rt.start(paid_flow, "minted")).rest()
    assert {str(error) for error in failures} == {
        f"execution {name!r}, sequence 0: no room" for name in ("x", "y", "z", failures[-1].execution_id)
    }
    assert set(effects) <= {"minted"}  # which waits for nothing


@STACKED
async def test_a_write_that_may_have_happened_is_doubtful_behind_any_stack(stacked: Stacked) -> None:
    def lost(execution_id: str, sequence: int) -> lf.StorageWriteError:
        error = lf.StorageWriteError(execution_id, sequence, "the server was lost")
        error.doubtful = True
        return error

    inner = Failing()
    async with runtime(stacked(inner)) as rt:
        inner.fails = lost
        calls = [rt.start(paid_flow, name, execution_id=name) for name in "xyz"]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, lf.StorageWriteError)
            assert error.doubtful


# --- reads from a replica ------------------------------------------------------------------------


class Lagging(lf.MemoryEventStore):
    """A replica that has not heard of anything yet."""


def lagging(primary: lf.EventStore) -> lf.EventStore:
    return lf.ReplicaReadEventStore(primary, Lagging())


async def test_behind_a_lagging_replica_a_real_duplicate_is_a_storage_error_after_one_retry() -> None:
    """The record's residual: less specific, but loud, and nothing ran."""
    primary = ScriptedStore()
    store = lagging(primary)
    reported: list[lf.StorageWriteError] = []
    async with runtime(store, on_storage_error=reported.append) as rt:
        await (await rt.start(paid_flow, "x", execution_id="x")).result()
        appends = len(primary.appends)
        with pytest.raises(lf.StorageWriteError) as caught:
            await rt.start(paid_flow, "x", execution_id="x")
        assert type(caught.value) is lf.StorageWriteError
        assert isinstance(caught.value.__cause__, lf.DuplicateSequenceError)
        assert primary.appends[appends:] == [("append", ["x-0"]), ("append_batch", ["x-0"])]
        assert reported == [caught.value]
    assert effects == {"x": 1}


@pytest.mark.parametrize(
    "stacked",
    [
        lagging,
        lambda primary: lf.CoalescingEventStore(lagging(primary)),
        lambda primary: lf.TenantScopedEventStore(lagging(primary), "a"),
        lambda primary: lf.CoalescingEventStore(lf.TenantScopedEventStore(lagging(primary), "a")),
        lambda primary: lf.TenantScopedEventStore(lf.CoalescingEventStore(lagging(primary)), "a"),
    ],
    ids=["alone", "coalescing", "tenant", "coalescing over tenant", "tenant over coalescing"],
)
async def test_whatever_decides_is_asked_of_the_primary(
    stacked: Stacked,
) -> None:
    """SPEC 7: folds for resume, fire, recovery, fork and cancel; gates, fences, branches, snapshots."""

    @lf.flow(id="gated")
    async def gated(ctx: lf.WorkflowContext, name: str) -> Any:
        receipt = await ctx.run(paid, name)
        await ctx.sleep(0)
        return [receipt, await ctx.suspend("go"), await ctx.suspend("go")]

    store, clock = stacked(lf.MemoryEventStore()), StillClock()
    async with runtime(store, gated, clock=clock) as rt:
        await (await rt.start(gated, "x", execution_id="x")).rest()
    async with runtime(store, gated, clock=clock) as rt:
        await (await rt.fire("x")).rest()
        await (await rt.resume("x", "go", 1)).rest()
        assert await rt.snapshot("x") == (await store.primary.last_sequence("x"))
        await rt.truncate_prefix("x")
        state = await rt.load_state("x")
        assert state is not None
        child = await rt.fork("x", 0, "branch", fork_id="child")
        await child.rest()
        assert [branch.name for branch in await store.branches.refs("x")] == ["origin", "branch"]
        assert await (await rt.resume("x", "go", 2)).result() == ["receipt for x", 1, 2]
        assert (await rt.cancel("child")).status == "cancelled"
        started = {"flowId": "gated", "flowVersion": "1", "input": "y"}
        await store.append(event("left", 0, "EXECUTION_STARTED", started))
        assert (await (await rt.recover("left")).rest()).status == "suspended"
    assert await store.list_executions() == []  # the replica still knows nothing
    assert await store.read("x") == []
    assert effects == {"x": 2, "y": 1}  # of x once for the fork, which was cut before its step
