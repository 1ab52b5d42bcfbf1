"""Snapshots, compaction and forks of real executions: ADR 0102 D5, F06, F07, F25, F26."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import loomfast as lf
from tests.conftest import OpenStore
from tests.runtime.harness import kinds, runtime

calls: list[str] = []


@lf.step
async def effect(name: str) -> str:
    calls.append(name)
    return name


@lf.flow
async def session(ctx: lf.WorkflowContext, input: Any) -> Any:
    said = []
    for turn in range(input):
        ctx.emit("turn", turn)
        await ctx.run(effect, f"turn {turn}")
        said.append(await ctx.suspend("say"))
        ctx.ui.append("timeline", said[-1])
    return said


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


async def at_turn(rt: lf.WorkflowRuntime, turn: int, turns: int = 4) -> str:
    handle = await rt.start(session, turns)
    await handle.rest()
    for n in range(turn):
        await (await rt.resume(handle.execution_id, "say", n)).rest()
    return handle.execution_id


async def test_a_compacted_session_goes_on_and_serves_what_was_removed(open_store: OpenStore) -> None:
    async with open_store() as store:
        async with runtime(store) as rt:
            execution = await at_turn(rt, 2)
            whole = await rt.load_state(execution)
            assert await rt.truncate_prefix(execution) > 0
        async with runtime(store, session) as rt:
            assert await rt.load_state(execution) == whole
            for n in (2, 3):
                await (await rt.resume(execution, "say", n)).rest()
            assert await rt.handle(execution).result() == [0, 1, 2, 3]
            with pytest.raises(lf.ExecutionAlreadyExistsError):
                await rt.start(session, 1, execution_id=execution)
        with pytest.raises(lf.PrefixTruncatedError):
            await store.read_from(execution, 1)
    assert calls == ["turn 0", "turn 1", "turn 2", "turn 3"]


async def test_a_snapshot_in_the_middle_of_a_run_and_the_rest_of_the_log_give_the_same_state(
    open_store: OpenStore,
) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        for n in range(5):
            ctx.emit("before", n)
            await ctx.run(effect, "a")
        await ctx._journal.drain()
        reached.set()
        await go_on.wait()
        ctx.emit("after")

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        await reached.wait()
        covered = await rt.snapshot(handle.execution_id)
        go_on.set()
        await handle.result()
        snapshot = await store.snapshots.latest(handle.execution_id)
        assert snapshot is not None
        assert snapshot.sequence == covered
        suffix = await store.read_from(handle.execution_id, covered + 1)
        whole = await store.read(handle.execution_id)
        assert lf.fold_events(lf.state_of(snapshot), suffix) == lf.fold_events(None, whole)


async def test_a_policy_takes_snapshots_at_gates_and_bounds_what_is_kept(open_store: OpenStore) -> None:
    async with open_store() as store:
        async with runtime(store, snapshot_every=10, truncate=True) as rt:
            execution = await at_turn(rt, 6, turns=8)
            await asyncio.gather(*rt._history.snapshots_due)
            assert len(await store.snapshots.list(execution)) == 1
            (snapshot,) = await store.snapshots.list(execution)
            assert len(await store.read_from(execution, snapshot.sequence + 1)) < 12
        async with runtime(store, session) as rt:
            for n in (6, 7):
                await (await rt.resume(execution, "say", n)).rest()
            assert await rt.handle(execution).result() == list(range(8))


async def test_an_unsound_snapshot_is_passed_over_for_an_older_one(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Damaged(lf.SnapshotStore):
        """The snapshots of another store, the newest with one byte flipped."""

        def __init__(self, inner: lf.SnapshotStore) -> None:
            self.inner = inner

        async def latest(self, execution_id: str, at_most: int | None = None) -> lf.Snapshot | None:
            found = await self.inner.latest(execution_id, at_most)
            if found is None or at_most is not None:
                return found
            body = found.body[:-1] + b"!"
            return lf.Snapshot(found.execution_id, found.sequence, found.schema_version, body, found.checksum)

        save = delete = list = verify = None  # type: ignore[assignment]  # not asked for here

    async with open_store() as store:
        async with runtime(store) as rt:
            execution = await at_turn(rt, 1)
            first = await rt.snapshot(execution)
            await (await rt.resume(execution, "say", 1)).rest()
            whole = await rt.load_state(execution)
            await rt.snapshot(execution)
            await store.truncate_prefix(execution, first + 1)
        inner = store.snapshots
        type(store).snapshots, kept = property(lambda self: Damaged(inner)), type(store).__dict__["snapshots"]
        try:
            async with runtime(store, session) as rt:
                assert await rt.load_state(execution) == whole
        finally:
            type(store).snapshots = kept
    assert "an unsound snapshot is passed over" in caplog.text


async def test_a_fork_at_every_sequence_serves_what_it_inherits(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store) as rt:
        origin = await at_turn(rt, 2, turns=2)
        source = await store.read(origin)
        for cut in range(len(source) - 1):
            calls.clear()
            fork = await rt.fork(origin, cut)
            state = await fork.rest()
            while state.status == "suspended":
                state = await (await rt.resume(fork.execution_id, "say", state.pending.ordinal)).rest()
            assert state.output == [0, 1]
            log = await store.read(fork.execution_id)
            for copied, event in zip(log[: cut + 1], source, strict=False):
                assert (copied.body, copied.timestamp, copied.stamp) == (
                    event.body,
                    event.timestamp,
                    event.stamp,
                )
                assert copied.metadata["forkOf"] == {"executionId": origin, "sequence": cut}
            inherited = sum(event.event_type == "STEP_COMPLETED" for event in source[: cut + 1])
            assert len(calls) == 2 - inherited
            stamped = [kind for kind in kinds(log) if kind.endswith("*")]
            assert stamped == [kind for kind in kinds(source) if kind.endswith("*")]
        assert await store.read(origin) == source


async def test_a_fork_reads_a_long_log_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the log, the event loop gets its turn, and no more than a page is held."""
    read: list[int] = []

    class Noting(lf.MemoryEventStore):
        async def read_range(self, execution_id: str, first: int, last: int | None) -> list[lf.Envelope]:
            events = await super().read_range(execution_id, first, last)
            read.append(len(events))
            return events

    @lf.flow
    async def chatty(ctx: lf.WorkflowContext, input: Any) -> None:
        for n in range(20):
            ctx.emit("note", n)
        await ctx.suspend("go")

    monkeypatch.setattr("loomfast._runtime.history.PAGE", 4)
    store = Noting()
    async with runtime(store, chatty) as rt:
        await (await rt.start(chatty, execution_id="x")).rest()
        for at, pages in ((3, [4]), (4, [4, 1]), (21, [4, 4, 4, 4, 4, 2])):
            read.clear()
            child = await rt.fork("x", at)
            assert read[: len(pages)] == pages
            assert (await child.rest()).sequence == 21
        with pytest.raises(lf.BeyondLogError):
            await rt.fork("x", 23)
        with pytest.raises(lf.UnknownExecutionError):
            await rt.fork("y", 10**18)


async def test_a_fork_takes_another_way_at_a_gate_and_is_found_by_its_branch(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store) as rt:
        origin = await at_turn(rt, 1, turns=1)
        gate = kinds(await store.read(origin)).index("EXECUTION_SUSPENDED")
        fork = await rt.fork(origin, gate, "what if", fork_id="child")
        assert (await fork.rest()).status == "suspended"
        await rt.resume("child", "say", "something else")
        assert await fork.result() == ["something else"]
        assert [branch.execution_id for branch in await store.branches.children(origin)] == ["child"]
        with pytest.raises(lf.ExecutionAlreadyExistsError):
            await rt.fork(origin, gate, fork_id="child")
        with pytest.raises(lf.BadInputError, match="cut before that"):
            await rt.fork(origin, len(await store.read(origin)) - 1)
        with pytest.raises(lf.UnknownExecutionError):
            await rt.fork("nobody", 0)
        with pytest.raises(lf.BadInputError, match="0 or more"):
            await rt.fork(origin, -1)


async def test_a_snapshot_that_is_due_is_taken_before_the_runtime_has_closed(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store() as store:
        async with runtime(store, snapshot_every=1) as rt:
            execution = await at_turn(rt, 1)
        assert await store.snapshots.latest(execution) is not None
    assert "no snapshot" not in caplog.text


async def test_a_repaired_step_runs_again_in_a_fork_before_its_failure(open_store: OpenStore) -> None:
    """F06."""
    broken = True

    @lf.step
    async def b(_: None) -> str:
        calls.append("b")
        if broken:
            raise ValueError("bug")
        return "b"

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> list[str]:
        return [await ctx.run(effect, "a"), await ctx.run(b), await ctx.run(effect, "c", key="c")]

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        with pytest.raises(lf.ExecutionFailedError, match="bug"):
            await handle.result()
        broken = False
        calls.clear()
        events = kinds(await store.read(handle.execution_id))
        for cut in (events.index("STEP_COMPLETED"), events.index("STEP_FAILED")):
            calls.clear()
            fork = await rt.fork(handle.execution_id, cut)
            assert await fork.result() == ["a", "b", "c"]
            assert calls == ["b", "c"]
