"""Copying the front of a log into a new execution: guarantee 11, on every store (F23, F26)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loomfast import _events as ev
from loomfast._core.snapshots import snapshot_of
from loomfast._errors import (
    BadInputError,
    BeyondLogError,
    BranchExistsError,
    DuplicateSequenceError,
    PrefixTruncatedError,
    StaleFenceError,
    UnknownExecutionError,
)
from loomfast._kernels import fold_events
from loomfast.stores import EventStore
from tests.conftest import OpenStore

from .logs import GATED, event, log


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
        events = log("x", 10)
        await store.append_batch(events)
        await store.snapshots.save(snapshot_of(fold_events(None, events)))
        await store.truncate_prefix("x", 6)
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
