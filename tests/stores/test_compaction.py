"""Cutting the front of a log, and copying it into a new execution: guarantees 9 to 11, on every store."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from loomfast import _events as ev
from loomfast._core.snapshots import snapshot_of, state_of
from loomfast._errors import (
    BadInputError,
    BeyondLogError,
    BranchExistsError,
    DuplicateSequenceError,
    PrefixTruncatedError,
    SnapshotNeededError,
    StaleFenceError,
    StoreClosedError,
    UnknownExecutionError,
)
from loomfast._kernels import Envelope, fold_events
from loomfast.stores import EventStore
from tests.conftest import OpenStore

from .logs import event, log

# A log of 11 events with a gate at 4, a step, stamps, metadata and a fence.
GATED = [
    event("s", 0, computeTarget="gpu"),
    event("s", 1, payload={"k": "\ud800"}, flowEmit="ffffffffffffffff", computeTarget="gpu"),
    event("s", 2, "STEP_STARTED", {"key": "a", "stepId": "a", "attempt": 1, "inputDigest": "0" * 16}),
    event("s", 3, "STEP_COMPLETED", {"key": "a", "output": -0.0}),
    event("s", 4, "EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}, forkOf={"executionId": "q", "sequence": 4}),
    event("s", 5, "go", {"ok": True}, fence=1),
    event("s", 6, "EXECUTION_RESUMED", {"gate": 0, "on": "go"}, fence=1),
    event("s", 7, "SURFACE_PATCH", {"surface": "ui", "op": "set", "path": "a"}, flowEmit="0" * 16, fence=1),
    event("s", 8, "EFFECT_INDOUBT", {"key": "b"}, fence=1),
    event("s", 9, "\udfff", None, fence=1),
    event("s", 10, "EXECUTION_COMPLETED", {"output": 1}, fence=1),
]


async def save(store: EventStore, events: list[Envelope], at: int) -> None:
    await store.snapshots.save(snapshot_of(fold_events(None, events[: at + 1])))


async def truncated(store: EventStore, length: int, before: int) -> list[Envelope]:
    """Append a log of `length` and cut it; return the log as it was."""
    events = log("x", length)
    await store.append_batch(events)
    await save(store, events, before - 1)
    assert await store.truncate_prefix("x", before) == before - 1
    return events


# --- 9: what is cut, and what is never cut -------------------------------------------------------


@pytest.mark.parametrize("sequence", range(11))
async def test_a_cut_needs_a_snapshot_that_covers_it(open_store: OpenStore, sequence: int) -> None:
    async with open_store() as store:
        events = log("x", 11)
        await store.append_batch(events)
        with pytest.raises(SnapshotNeededError) as caught:
            await store.truncate_prefix("x", 6)
        assert (caught.value.execution_id, caught.value.sequence) == ("x", 5)
        await save(store, events, sequence)
        if sequence < 5:
            with pytest.raises(SnapshotNeededError):
                await store.truncate_prefix("x", 6)
            assert await store.read("x") == events
        else:
            assert await store.truncate_prefix("x", 6) == 5
            assert await store.read_from("x", 6) == events[6:]


async def test_a_truncated_execution_still_exists_and_goes_on_where_it_was(open_store: OpenStore) -> None:
    async with open_store() as store:
        events = await truncated(store, 10, 8)
        assert await store.read_range("x", 0, 0) == events[:1]
        assert await store.last_sequence("x") == 9
        assert [(s.execution_id, s.flow_id, s.last_sequence) for s in await store.list_executions()] == [
            ("x", "guard", 9)
        ]
        for taken in (0, 1, 7, 9):
            with pytest.raises(DuplicateSequenceError):
                await store.append(event("x", taken))
        more = log("x", 3, first=10)
        await store.append_batch(more)
        assert await store.read_from("x", 8) == events[8:] + more


@pytest.mark.parametrize("before", [9, 10, 11, 2**40])
async def test_the_newest_event_is_never_removed(open_store: OpenStore, before: int) -> None:
    async with open_store() as store:
        events = log("x", 10)
        await store.append_batch(events)
        await save(store, events, 9)
        await store.truncate_prefix("x", before)
        assert await store.read_from("x", 9) == events[9:]
        assert (await store.read_all(9))[0].position == 10
        await store.append(event("y", 0))
        assert [p.position for p in await store.read_all(9)] == [10, 11]


async def test_cutting_again_removes_what_is_left_and_nothing_twice(open_store: OpenStore) -> None:
    async with open_store() as store:
        events = await truncated(store, 10, 4)
        await save(store, events, 8)
        assert await store.truncate_prefix("x", 4) == 0
        assert await store.truncate_prefix("x", 0) == 0
        assert await store.truncate_prefix("x", 2) == 0
        assert await store.truncate_prefix("x", 7) == 3
        assert await store.truncate_prefix("x", 7) == 0
        assert await store.read_from("x", 7) == events[7:]


async def test_cuts_that_cannot_be_are_refused(open_store: OpenStore) -> None:
    async with open_store() as store:
        with pytest.raises(UnknownExecutionError):
            await store.truncate_prefix("nobody", 3)
        await store.acquire_fence("fenced")
        with pytest.raises(UnknownExecutionError):
            await store.truncate_prefix("fenced", 3)
        with pytest.raises(BadInputError):
            await store.truncate_prefix("nobody", -1)
        await store.append(event("x", 0))
        assert await store.truncate_prefix("x", 1) == 0
        assert await store.truncate_prefix("x", 5) == 0


async def test_neither_fences_nor_other_executions_notice_a_cut(open_store: OpenStore) -> None:
    async with open_store() as store:
        other = log("y", 10)
        await store.append_batch(other)
        events = log("x", 10)
        await store.append_batch(events)
        token = await store.acquire_fence("x")
        await save(store, events, 9)
        await store.truncate_prefix("x", 6)
        with pytest.raises(StaleFenceError):
            await store.append(event("x", 10))
        await store.append(event("x", 10, fence=token))
        assert await store.read("y") == other


# --- 10: what is gone is named -------------------------------------------------------------------


async def test_a_read_that_needs_what_is_gone_names_the_first_available(open_store: OpenStore) -> None:
    async with open_store() as store:
        events = await truncated(store, 10, 6)
        for first, last, missing in ((0, None, 1), (0, 1, 1), (1, 1, 1), (3, 7, 3), (5, 5, 5), (-4, 9, 1)):
            with pytest.raises(PrefixTruncatedError) as caught:
                await store.read_range("x", first, last)
            error = caught.value
            assert (error.execution_id, error.sequence, error.first_available) == ("x", missing, 6)
        with pytest.raises(PrefixTruncatedError):
            await store.read("x")
        assert await store.read_range("x", -5, 0) == events[:1]
        assert await store.read_range("x", 0, -1) == []
        assert await store.read_range("x", 5, 4) == []
        assert await store.read_range("x", 6, 6) == events[6:7]
        assert await store.read_range("x", 6, None) == events[6:]
        assert await store.read_range("x", 7, 3) == []
        assert await store.read_range("x", 8, 2**40) == events[8:]
        assert await store.read_range("x", 10, None) == []


async def test_a_fold_goes_on_from_a_snapshot_and_from_nothing_older(open_store: OpenStore) -> None:
    async with open_store() as store:
        events = await truncated(store, 30, 20)
        await save(store, events, 24)
        whole = fold_events(None, events)
        for state in (None, fold_events(None, events[:1]), fold_events(None, events[:19])):
            with pytest.raises(PrefixTruncatedError) as caught:
                await store.fold("x", state)
            assert caught.value.first_available == 20
        for at_most in (19, 24, None):
            snapshot = await store.snapshots.latest("x", at_most)
            assert snapshot is not None
            assert await store.fold("x", state_of(snapshot)) == whole
        assert await store.fold("x", whole) == whole


@pytest.mark.parametrize("sequence", range(len(GATED)))
async def test_snapshot_and_rest_fold_to_what_the_log_did_wherever_it_is_cut(
    open_store: OpenStore, sequence: int
) -> None:
    async with open_store() as store:
        await store.append_batch(GATED)
        await save(store, GATED, sequence)
        await store.truncate_prefix("s", sequence + 1)
        snapshot = await store.snapshots.latest("s")
        assert snapshot is not None
        assert await store.fold("s", state_of(snapshot)) == fold_events(None, GATED)


async def test_the_total_order_keeps_the_positions_of_what_is_left(open_store: OpenStore) -> None:
    async with open_store() as store:
        for n in range(10):
            await store.append_batch([event("x", n), event("y", n)])
        everything = await store.read_all()
        await save(store, log("x", 10), 9)
        await store.truncate_prefix("x", 7)
        left = [p for p in everything if p.event.execution_id == "y" or p.event.sequence in (0, 7, 8, 9)]
        assert await store.read_all() == left
        read, after = [], 0
        while page := await store.read_all(after, limit=3):
            read += page
            after = page[-1].position
        assert read == left
        await store.append(event("z", 0))
        assert (await store.read_all(after))[0].position == 21


async def test_compacting_every_so_often_keeps_what_a_resume_reads_small(open_store: OpenStore) -> None:
    """F25: with a snapshot and a cut every K events a resume reads at most K + 1."""
    async with open_store() as store:
        state = None
        for first in range(0, 1_000, 50):
            events = log("x", 50, first)
            await store.append_batch(events)
            state = fold_events(state, events)
            await store.snapshots.save(snapshot_of(state))
            await store.truncate_prefix("x", first + 50)
            await store.snapshots.delete("x", first + 49)
        await store.append_batch(log("x", 20, 1_000))
        snapshot = await store.snapshots.latest("x")
        assert snapshot is not None
        assert len(await store.read_from("x", snapshot.sequence + 1)) == 20
        assert len(await store.read_all()) == 22
        assert await store.fold("x", state_of(snapshot)) == fold_events(None, log("x", 1_020))


# --- 11: copies ----------------------------------------------------------------------------------


async def fenced_source(store: EventStore) -> None:
    await store.append_batch(GATED[:5])
    assert await store.acquire_fence("s") == 1
    await store.append_batch(GATED[5:])


@pytest.mark.parametrize("through", range(len(GATED)))
async def test_a_copy_is_the_prefix_with_its_own_ids_and_says_where_it_comes_from(
    open_store: OpenStore, through: int
) -> None:
    """F26: payloads, timestamps, stamps and metadata come along; fence, lease and ending do not."""
    async with open_store() as store:
        await fenced_source(store)
        await store.copy_prefix("s", "t", through)
        copies = await store.read("t")
        assert len(copies) == through + 1
        for copy, original in zip(copies, GATED, strict=False):
            expected = original.to_json()
            metadata = expected.pop("metadata", {})
            metadata.pop("fence", None)
            metadata["forkOf"] = {"executionId": "s", "sequence": through}
            assert copy.to_json() == {
                **expected,
                "id": f"t-{original.sequence}",
                "executionId": "t",
                "metadata": metadata,
            }
            assert (copy.body, copy.stamp) == (original.body, original.stamp)
        state = await store.fold("t")
        assert state is not None
        assert state == fold_events(None, copies)
        listed = {s.execution_id: s for s in await store.list_executions()}
        assert listed["t"].status == state.status
        assert (listed["t"].flow_id, listed["t"].last_sequence) == ("guard", through)
        assert await store.read("s") == GATED
        if state.status not in ev.END_KIND:
            await store.append(event("t", through + 1))  # nobody's fence
        assert await store.acquire_fence("t") == 1


async def test_a_copy_takes_its_place_at_the_end_of_the_total_order(open_store: OpenStore) -> None:
    async with open_store() as store:
        await fenced_source(store)
        await store.copy_prefix("s", "t", 3)
        await store.append(event("later", 0))
        order = await store.read_all()
        assert [p.position for p in order] == list(range(1, 17))
        assert [p.event.id for p in order[11:]] == ["t-0", "t-1", "t-2", "t-3", "later-0"]


async def test_the_metadata_of_a_fork_may_be_added_to_but_its_stamps_are_the_kernels(
    open_store: OpenStore,
) -> None:
    async with open_store() as store:
        await fenced_source(store)
        await store.copy_prefix("s", "t", 1, fork_metadata={"why": "a test", "forkOf": {"executionId": "S"}})
        assert [copy.metadata for copy in await store.read("t")] == [
            {"computeTarget": "gpu", "forkOf": {"executionId": "S"}, "why": "a test"},
            {
                "computeTarget": "gpu",
                "forkOf": {"executionId": "S"},
                "why": "a test",
                "flowEmit": "ffffffffffffffff",
            },
        ]
        for name in ("fence", "flowEmit"):
            with pytest.raises(BadInputError, match=name):
                await store.copy_prefix("s", "u", 1, fork_metadata={name: 1})
        assert await store.last_sequence("u") is None


@pytest.mark.parametrize("size", [1, 999, 1_000, 1_001, 40_000])
async def test_a_copy_of_any_size_is_whole(open_store: OpenStore, size: int) -> None:
    """F23."""
    async with open_store() as store:
        events = log("s", size)
        await store.append_batch(events)
        await store.copy_prefix("s", "t", size - 1)
        copies = await store.read("t")
        assert [(c.sequence, c.body) for c in copies] == [(e.sequence, e.body) for e in events]
        assert len(await store.read_all(limit=3 * size)) == 2 * size


async def test_a_refused_copy_leaves_nothing(open_store: OpenStore) -> None:
    async with open_store() as store:
        await fenced_source(store)
        await store.append(event("t", 0))
        await store.acquire_fence("fenced")
        refused: list[tuple[Any, type[Exception], dict[str, Any]]] = [
            (("s", "t", 3), DuplicateSequenceError, {"execution_id": "t", "sequence": 0}),
            (("s", "s", 3), DuplicateSequenceError, {"execution_id": "s"}),
            (("s", "u", 11), BeyondLogError, {"execution_id": "s", "sequence": 11, "last_sequence": 10}),
            (("s", "u", 2**70), BeyondLogError, {"execution_id": "s"}),
            (("nobody", "u", 0), UnknownExecutionError, {"execution_id": "nobody"}),
            (("s", "fenced", 3), StaleFenceError, {"execution_id": "fenced", "fence": None, "current": 1}),
            (("s", "u", -1), BadInputError, {}),
        ]
        for arguments, error, members in refused:
            if arguments == ("s", "s", 3):
                error, members = StaleFenceError, {"execution_id": "s"}  # the token is judged before the slot
            with pytest.raises(error) as caught:
                await store.copy_prefix(*arguments)
            assert {name: getattr(caught.value, name) for name in members} == members
        assert len(await store.read_all()) == 12
        assert [s.execution_id for s in await store.list_executions()] == ["s", "t"]


async def test_a_truncated_source_is_refused_unless_only_its_start_is_wanted(open_store: OpenStore) -> None:
    async with open_store() as store:
        await truncated(store, 10, 6)
        for through in (1, 5, 6, 9):
            with pytest.raises(PrefixTruncatedError) as caught:
                await store.copy_prefix("x", "t", through)
            assert (caught.value.execution_id, caught.value.first_available) == ("x", 6)
        assert await store.last_sequence("t") is None
        await store.copy_prefix("x", "t", 0)
        assert await store.last_sequence("t") == 0


async def test_of_many_copies_into_one_execution_exactly_one_succeeds(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append_batch(log("s", 20))
        results = await asyncio.gather(
            *(store.copy_prefix("s", "t", n) for n in range(20)), return_exceptions=True
        )
        assert results.count(None) == 1
        assert all(r is None or isinstance(r, DuplicateSequenceError) for r in results)
        assert await store.last_sequence("t") == results.index(None)


async def test_a_copy_and_the_appends_around_it_see_each_other(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append_batch(log("s", 3))
        results = await asyncio.gather(
            store.append(event("s", 3)),
            store.copy_prefix("s", "t", 3),
            store.append(event("t", 4)),
            store.append(event("t", 4)),
            store.copy_prefix("s", "t", 3),
            store.copy_prefix("t", "u", 4),
            store.append(event("u", 5)),
            return_exceptions=True,
        )
        assert [type(r) for r in results] == [
            *[type(None)] * 3,
            *[DuplicateSequenceError] * 2,
            *[type(None)] * 2,
        ]
        assert [p.position for p in await store.read_all()] == list(range(1, 16))
        assert (await store.read("u"))[1].metadata["forkOf"] == {"executionId": "t", "sequence": 4}


async def test_a_copy_may_register_its_branch_and_is_refused_with_it(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append_batch(log("s", 5))
        await store.copy_prefix("s", "t", 3, branch_name="try")
        branch = await store.branches.branch_of("t")
        assert branch is not None
        assert branch == ("s", "try", "t", "s", 3, False)
        with pytest.raises(BranchExistsError):
            await store.copy_prefix("s", "u", 3, branch_name="try")
        with pytest.raises(DuplicateSequenceError):
            await store.copy_prefix("s", "t", 3, branch_name="try")
        with pytest.raises(BadInputError):
            await store.copy_prefix("s", "u", 3, branch_name="")
        assert await store.last_sequence("u") is None
        assert len(await store.read_all()) == 9


async def test_a_closed_store_neither_cuts_nor_copies(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append_batch(log("s", 5))
        snapshot = snapshot_of(fold_events(None, log("s", 5)))
        await store.close()
        for call in (
            store.truncate_prefix("s", 3),
            store.copy_prefix("s", "t", 1),
            store.snapshots.save(snapshot),
            store.snapshots.latest("s"),
            store.snapshots.list("s"),
            store.snapshots.delete("s", 1),
            store.snapshots.verify(),
            store.branches.add("b", "t", parent_id="s", cut=1),
            store.branches.refs("s"),
            store.branches.promote("s", "b"),
        ):
            with pytest.raises(StoreClosedError):
                await call


async def test_a_snapshot_that_is_damaged_covers_no_cut(open_store: OpenStore) -> None:
    async with open_store() as store:
        events = log("x", 10)
        await store.append_batch(events)
        sound = snapshot_of(fold_events(None, events))
        await store.snapshots.save(sound)
        damage_kept(store, dataclasses.replace(sound, body=sound.body + b" "))
        with pytest.raises(SnapshotNeededError):
            await store.truncate_prefix("x", 5)
        await save(store, events, 6)
        assert await store.truncate_prefix("x", 5) == 4


def damage_kept(store: Any, snapshot: Any) -> None:
    """Put a bad snapshot where a good one is, behind the store's back."""
    if hasattr(store, "_path"):
        import apsw

        connection = apsw.Connection(store._path)
        connection.set_busy_timeout(5000)
        connection.execute(
            "UPDATE snapshots SET body = ? WHERE id & 4294967295 = ?", (snapshot.body, snapshot.sequence)
        )
        connection.close()
    else:
        store._snapshots._kept[snapshot.execution_id][snapshot.sequence] = snapshot
