"""Recovering what was left behind: each on its own, bounded, counted, reported (F14 to F17)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

import loomfast as lf
from tests.conftest import OpenStore
from tests.runtime.harness import ScriptedStore, kinds, runtime, turns

START = {"flowId": "works", "flowVersion": "1", "input": None}


@lf.flow(id="works")
async def works(ctx: lf.WorkflowContext, input: Any) -> str:
    return await ctx.run(lambda: "done", key="s")


async def leave_behind(store: lf.EventStore, *ids: str, flow_id: str = "works") -> None:
    """As if their process had been killed when they had just started."""
    for execution_id in ids:
        payload = START | {"flowId": flow_id}
        await store.append(lf.Envelope.make(execution_id, 0, "EXECUTION_STARTED", payload, 0))


class Unreadable(lf.MemoryEventStore):
    """One of its logs cannot be read."""

    broken = "x500"

    async def fold(self, execution_id: str, state: lf.State | None = None) -> lf.State | None:
        if execution_id == self.broken:
            raise lf.StoreReadError(execution_id, f"{execution_id}: not as it was written")
        return await super().fold(execution_id, state)


async def test_of_a_thousand_abandoned_999_are_done_one_is_reported_and_eight_run_at_a_time() -> None:
    """F15."""
    at_once, most, served = 0, 0, list[Any]()

    @lf.flow(id="works")
    async def counted(ctx: lf.WorkflowContext, input: Any) -> str:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await turns(3)
        at_once -= 1
        return "done"

    @lf.flow
    async def fresh(ctx: lf.WorkflowContext, input: Any) -> str:
        return "served"

    store = Unreadable()
    await leave_behind(store, *(f"x{n}" for n in range(1, 1_001)))
    async with runtime(store, counted) as rt:
        sweep = asyncio.create_task(rt.recover_abandoned(concurrency=8))
        for _ in range(20):
            await turns(5)
            served.append(await (await rt.start(fresh)).result())
        assert not sweep.done()
        reports = await sweep
        assert [r.execution_id for r in reports if r.execution_id[0] == "x"] == [
            f"x{n}" for n in range(1, 1_001)
        ]
        bad = [report for report in reports if report.outcome == "failed"]
        assert [(r.execution_id, type(r.error)) for r in bad] == [("x500", lf.StoreReadError)]
        assert sum(report.outcome == "recovered" for report in reports) == 999
        assert (most, served) == (8, ["served"] * 20)
        assert [e.execution_id for e in await store.list_executions(status="running")] == ["x500"]


async def test_an_unknown_flow_or_a_bad_snapshot_concerns_that_execution_only() -> None:
    """F15."""
    store = lf.MemoryEventStore()
    await leave_behind(store, "a", "c")
    await leave_behind(store, "b", flow_id="nobody-knows")
    for n in (1, 2):
        await store.append(lf.Envelope.make("c", n, "note", n, 0))
    async with runtime(store) as rt:
        await rt.truncate_prefix("c")
    snapshot = await store.snapshots.latest("c")
    assert snapshot is not None
    damaged = dataclasses.replace(snapshot, body=snapshot.body[:-1] + b" ")
    store._snapshots._kept["c"][snapshot.sequence] = damaged
    async with runtime(store, works) as rt:
        reports = {report.execution_id: report for report in await rt.recover_abandoned()}
    assert [(name, reports[name].outcome) for name in "abc"] == [
        ("a", "recovered"),
        ("b", "failed"),
        ("c", "failed"),
    ]
    assert isinstance(reports["b"].error, lf.UnknownFlowError)
    assert isinstance(reports["c"].error, lf.BadSnapshotError)


async def test_what_is_driven_here_or_rests_is_left_alone(open_store: OpenStore) -> None:
    """F17."""
    release, runs = asyncio.Event(), list[str]()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, way: str) -> None:
        runs.append(way)
        if way == "gate":
            await ctx.suspend("go")
        if way == "sleep":
            await ctx.sleep(10**6)
        await release.wait()

    async with open_store() as store, runtime(store, flow) as rt:
        for way in ("gate", "sleep"):
            await (await rt.start(flow, way, execution_id=way)).rest()
        handle = await rt.start(flow, "busy", execution_id="busy")
        await turns(3)
        assert await rt.recover_abandoned() == [lf.Recovered("busy", "skipped", "it is driven here")]
        release.set()
        await handle.result()
        assert runs == ["gate", "sleep", "busy"]


async def crashed(store: lf.EventStore, flow: Any, execution_id: str) -> None:
    """Run an execution until it says so, and leave it as a killed process would."""
    rt = runtime(store, flow)
    began = asyncio.Event()
    flow.function.began = began
    if await rt.load_state(execution_id) is None:
        await rt.start(flow, execution_id=execution_id)
    else:
        await rt.recover(execution_id)
    await began.wait()
    account = await store.recoveries.get(execution_id)
    await rt.close()
    # A process that is killed leaves no mark of an orderly end.
    await store.recoveries.delete(execution_id)
    if account is not None:
        await store.recoveries.put(account)


@lf.flow(id="poison")
async def poison(ctx: lf.WorkflowContext, input: Any) -> None:
    async def effect() -> None:
        poison.function.began.set()  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    await ctx.run(effect, key="s")


async def test_at_the_cap_an_execution_is_set_aside_listed_and_released_by_hand(
    open_store: OpenStore,
) -> None:
    """F16."""
    async with open_store() as store:
        for crashes in (None, None, 1):  # the first run was started, not recovered
            account = await store.recoveries.get("x")
            assert (account and account.crashes) == crashes
            await crashed(store, poison, "x")
        before = await store.read("x")
        async with runtime(store, poison, max_crashes=3) as rt:
            for _ in range(2):
                (report,) = await rt.recover_abandoned()
                assert report.outcome == "set-aside"
                assert report.reason == "3 runs in a row crashed without progress"
            with pytest.raises(lf.ExecutionSetAsideError, match="3 runs in a row"):
                await rt.recover("x", max_crashes=100)
            assert await store.read("x") == before
            assert [account.execution_id for account in await rt.set_aside()] == ["x"]
            assert (await rt.load_state("x")).status == "running"  # type: ignore[union-attr]
            assert await rt.release("x")
            assert not await rt.release("x")
            assert await rt.set_aside() == []
        await crashed(store, poison, "x")
        assert (await store.recoveries.get("x")).crashes == 1  # type: ignore[union-attr]


async def test_cancelling_what_is_set_aside_works_and_forgets_its_account(open_store: OpenStore) -> None:
    async with open_store() as store:
        await leave_behind(store, "x")
        async with runtime(store, works) as rt:
            assert [r.outcome for r in await rt.recover_abandoned(max_crashes=1)] == ["set-aside"]
            assert (await rt.cancel("x")).status == "cancelled"
            assert await store.recoveries.get("x") is None
            assert await rt.set_aside() == []


async def test_coming_to_rest_forgets_the_crashes(open_store: OpenStore) -> None:
    @lf.flow(id="works")
    async def parks(ctx: lf.WorkflowContext, input: Any) -> None:
        await ctx.suspend("go")

    async with open_store() as store:
        for flow, ended in ((works, "completed"), (parks, "suspended")):
            await leave_behind(store, ended)
            async with runtime(store, flow) as rt:
                assert [r.outcome for r in await rt.recover_abandoned()] == ["recovered"]
                assert (await rt.load_state(ended)).status == ended  # type: ignore[union-attr]
            assert await store.recoveries.get(ended) is None


async def test_refused_starts_answers_and_timer_fires_count_no_crash(open_store: OpenStore) -> None:
    """F16: a hundred repeated starts and twenty answers leave the count at 0."""
    async with open_store() as store:
        await leave_behind(store, "x")
        async with runtime(store, works) as rt:
            calls = [rt.start(works, execution_id="x") for _ in range(100)]
            calls += [rt.resume("x", "go") for _ in range(20)] + [rt.fire("x") for _ in range(20)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            refused = (lf.ExecutionAlreadyExistsError, lf.GateRefusedError)
            assert all(isinstance(outcome, refused) for outcome in outcomes)
            assert await store.recoveries.get("x") is None


async def test_the_crash_is_counted_durably_before_the_body_runs() -> None:
    seen: list[Any] = []
    store = lf.MemoryEventStore()

    @lf.flow(id="works")
    async def looks(ctx: lf.WorkflowContext, input: Any) -> None:
        seen.append(await store.recoveries.get("x"))

    await leave_behind(store, "x")
    async with runtime(store, looks) as rt:
        await (await rt.recover("x")).result()
    assert seen == [lf.Recovery("x", 1, 0, False, None)]


async def test_a_count_that_cannot_be_kept_lets_no_body_run() -> None:
    class NoAccounts(lf.MemoryEventStore):
        @property
        def recoveries(self) -> Any:
            raise lf.StorageWriteError("x", None, "disk full")

    store = NoAccounts()
    await leave_behind(store, "x")
    async with runtime(store, works) as rt:
        (report,) = await rt.recover_abandoned()
        assert (report.outcome, report.reason) == (
            "failed",
            "StorageWriteError: execution 'x': disk full",
        )
    assert kinds(await store.read("x")) == ["EXECUTION_STARTED"]


@pytest.mark.parametrize("first", [0, 1])
async def test_of_two_recoverers_held_before_one_append_the_later_fence_wins_whole(first: int) -> None:
    """F14: the loser's run is aborted, nothing of it is stored, and the result is what the log says."""
    answers, held = iter(["theirs", "ours"]), [asyncio.Event(), asyncio.Event()]
    waiting: list[int] = []

    async def hold(envelopes: Sequence[lf.Envelope]) -> None:
        if envelopes[0].event_type == "STEP_STARTED" and len(waiting) < 2:
            place = len(waiting)
            waiting.append(place)
            await held[place].wait()

    @lf.flow(id="works")
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        value = await ctx.run(lambda: next(answers), key="s")
        return [value, await ctx.run(lambda: value, key="t")]

    store = ScriptedStore(dict.fromkeys(range(1, 99), hold))
    await leave_behind(store, "x")
    async with runtime(store, flow) as one, runtime(store, flow) as two:
        handles = [await one.recover("x"), await two.recover("x")]
        while len(waiting) < 2:
            await asyncio.sleep(0)
        held[first].set()
        await turns(50)
        held[1 - first].set()
        outcomes = await asyncio.gather(*(h.result() for h in handles), return_exceptions=True)
        log = await store.read("x")
        fences = [event.fence for event in log[1:]]
        assert set(fences) == {2}
        state = lf.fold_events(None, log)
        assert state.output == outcomes[1]
        assert isinstance(outcomes[0], lf.StorageWriteError) or outcomes[0] == state.output
        assert state.output[0] == state.output[1] == state.steps.get("s").output


async def test_a_close_ends_a_sweep_and_what_it_had_not_taken_up_is_left() -> None:
    release = asyncio.Event()

    @lf.flow(id="works")
    async def waits(ctx: lf.WorkflowContext, input: Any) -> None:
        await release.wait()

    store = lf.MemoryEventStore()
    await leave_behind(store, *(f"x{n}" for n in range(5)))
    rt = runtime(store, waits)
    sweep = asyncio.create_task(rt.recover_abandoned(concurrency=2))
    await turns(30)
    await rt.close()
    reports = await sweep
    assert [(r.execution_id, type(r.error)) for r in reports] == [
        ("x0", lf.RuntimeClosedError),
        ("x1", lf.RuntimeClosedError),
    ]
    assert await store.recoveries.get("x4") is None


async def test_counts_that_mean_nothing_are_refused() -> None:
    store = lf.MemoryEventStore()
    async with runtime(store) as rt:
        for bad in (0, -1, 1.5, True):
            with pytest.raises(lf.BadInputError):
                await rt.recover_abandoned(concurrency=bad)  # type: ignore[arg-type]
            with pytest.raises(lf.BadInputError):
                await rt.recover_abandoned(max_crashes=bad)  # type: ignore[arg-type]
            with pytest.raises(lf.BadInputError):
                lf.WorkflowRuntime(store, max_crashes=bad)  # type: ignore[arg-type]


async def test_a_damaged_outcome_is_reported_as_itself_and_counts_no_crash() -> None:
    store = lf.MemoryEventStore()
    await leave_behind(store, "x")
    started = {"key": "s", "stepId": "s", "attempt": 1, "inputDigest": "0" * 16}
    await store.append(lf.Envelope.make("x", 1, "STEP_STARTED", started, 0))
    await store.append(lf.Envelope("x", 2, "STEP_FAILED", b"{", 0, "s"))
    async with runtime(store, works) as rt:
        (report,) = await rt.recover_abandoned(max_crashes=1)
        assert (report.outcome, type(report.error)) == ("failed", lf.StoreReadError)
        assert "sequence 2" in str(report.reason)
        assert await store.recoveries.get("x") is None


async def test_a_run_that_cannot_go_on_in_its_very_first_turn_is_reported_with_its_reason() -> None:
    store = lf.MemoryEventStore()
    await leave_behind(store, "x")
    started = {"key": "s", "stepId": "s", "attempt": 1, "inputDigest": "0" * 16}
    await store.append(lf.Envelope.make("x", 1, "STEP_STARTED", started, 0))
    await store.append(lf.Envelope.make("x", 2, "STEP_COMPLETED", {"key": "s", "output": 1}, 0))
    for _ in range(3):  # it is never a crash
        async with runtime(store, works) as rt:  # which asks with another input
            (report,) = await rt.recover_abandoned(max_crashes=2)
        assert (report.outcome, type(report.error)) == ("failed", lf.DeterminismError)
