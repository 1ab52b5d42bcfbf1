"""Guarantee 11: a fork of a log is whole, and a log of its own."""

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
    StoreReadError,
    UnknownExecutionError,
)
from loomfast._kernels import Envelope, fold_events
from loomfast.stores import EventStore
from loomfast.testing.conformance._suite import Conformance, guarantee
from loomfast.testing.conformance.logs import GATED, event, log


async def fenced_source(store: EventStore) -> list[Envelope]:
    """Append `GATED` with a token that the store gave out; return it as it was appended."""
    await store.append_batch(GATED[:5])
    token = await store.acquire_fence("s")
    rest = [
        Envelope(
            e.execution_id, e.sequence, e.event_type, e.body, e.timestamp, e.subject, e.stamp, token, e.extra
        )
        for e in GATED[5:]
    ]
    await store.append_batch(rest)
    return [*GATED[:5], *rest]


class CopyConformance(Conformance):
    """Copying the front of a log into a new execution (F23, F26)."""

    @guarantee(11)
    @pytest.mark.parametrize("through", range(len(GATED)))
    async def test_a_copy_is_the_prefix_with_its_own_ids_and_says_where_it_comes_from(
        self, through: int
    ) -> None:
        """F26: payloads, timestamps, stamps and metadata come along; fence, lease and ending do not."""
        async with self.open_store() as store:
            source = await fenced_source(store)
            await store.copy_prefix("s", "t", through)
            copies = await store.read("t")
            assert len(copies) == through + 1
            for copy, original in zip(copies, source, strict=False):
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
            assert await store.read("s") == source
            if state.status not in ev.END_KIND:
                await store.append(event("t", through + 1))  # nobody's fence
                await store.append(event("t", through + 2))

    @guarantee(11)
    async def test_a_copy_takes_its_place_at_the_end_of_the_total_order(self) -> None:
        async with self.open_store() as store:
            await fenced_source(store)
            await store.copy_prefix("s", "t", 3)
            await store.append(event("later", 0))
            order = await store.read_all()
            positions = [p.position for p in order]
            assert positions == sorted(set(positions))
            assert [p.event.id for p in order[11:]] == ["t-0", "t-1", "t-2", "t-3", "later-0"]

    @guarantee(11)
    async def test_the_metadata_of_a_fork_may_be_added_to_but_its_stamps_are_the_kernels(
        self,
    ) -> None:
        async with self.open_store() as store:
            await fenced_source(store)
            await store.copy_prefix(
                "s", "t", 1, fork_metadata={"why": "a test", "forkOf": {"executionId": "S"}}
            )
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

    @guarantee(11)
    async def test_a_copy_of_any_size_is_whole(self) -> None:
        """F23."""
        async with self.open_store() as store:
            for size in self.sizes:
                events = log(f"s{size}", size)
                await store.append_batch(events)
                await store.copy_prefix(f"s{size}", f"t{size}", size - 1)
                copies = await store.read(f"t{size}")
                assert [(c.sequence, c.body) for c in copies] == [(e.sequence, e.body) for e in events]
            total = 2 * sum(self.sizes)
            assert len(await store.read_all(limit=total + 1)) == total

    @guarantee(11)
    async def test_a_refused_copy_leaves_nothing(self) -> None:
        async with self.open_store() as store:
            await fenced_source(store)
            await store.append(event("t", 0))
            await store.acquire_fence("fenced")
            refused: list[tuple[Any, type[Exception], dict[str, Any]]] = [
                (("s", "t", 3), DuplicateSequenceError, {"execution_id": "t", "sequence": 0}),
                (("s", "s", 3), StaleFenceError, {"execution_id": "s"}),  # the token before the slot
                (("s", "u", 11), BeyondLogError, {"execution_id": "s", "sequence": 11, "last_sequence": 10}),
                (("s", "u", 2**70), BeyondLogError, {"execution_id": "s"}),
                (("nobody", "u", 0), UnknownExecutionError, {"execution_id": "nobody"}),
                (("s", "fenced", 3), StaleFenceError, {"execution_id": "fenced", "fence": None}),
                (("s", "u", -1), BadInputError, {}),
            ]
            for arguments, error, members in refused:
                with pytest.raises(error) as caught:
                    await store.copy_prefix(*arguments)
                if "execution_id" in members:
                    members["execution_id"] = self.named(members["execution_id"])
                assert {name: getattr(caught.value, name) for name in members} == members
            assert len(await store.read_all()) == 12
            assert [s.execution_id for s in await store.list_executions()] == ["s", "t"]

    @guarantee(11)
    async def test_a_truncated_source_is_refused_unless_only_its_start_is_wanted(self) -> None:
        async with self.open_store() as store:
            events = log("x", 10)
            await store.append_batch(events)
            await store.snapshots.save(snapshot_of(fold_events(None, events)))
            await store.truncate_prefix("x", 6)
            for through in (1, 5, 6, 9):
                with pytest.raises(PrefixTruncatedError) as caught:
                    await store.copy_prefix("x", "t", through)
                assert (caught.value.execution_id, caught.value.first_available) == (self.named("x"), 6)
            assert await store.last_sequence("t") is None
            await store.copy_prefix("x", "t", 0)
            assert await store.last_sequence("t") == 0

    @guarantee(11)
    async def test_of_many_copies_into_one_execution_exactly_one_succeeds(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(log("s", 20))
            results = await asyncio.gather(
                *(store.copy_prefix("s", "t", n) for n in range(20)), return_exceptions=True
            )
            assert results.count(None) == 1
            assert all(r is None or isinstance(r, DuplicateSequenceError) for r in results)
            assert await store.last_sequence("t") == results.index(None)

    @guarantee(11)
    async def test_a_copy_is_a_log_of_its_own_that_can_be_copied_on(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(log("s", 4))
            await store.copy_prefix("s", "t", 3)
            await asyncio.gather(store.append(event("s", 4)), store.append(event("t", 4)))
            with pytest.raises(DuplicateSequenceError):
                await store.append(event("t", 4))
            await store.copy_prefix("t", "u", 4)
            await store.append(event("u", 5))
            assert (await store.read("u"))[1].metadata["forkOf"] == {"executionId": "t", "sequence": 4}
            assert [await store.last_sequence(name) for name in "stu"] == [4, 4, 5]

    @guarantee(11)
    async def test_a_copy_may_register_its_branch_and_is_refused_with_it(self) -> None:
        async with self.open_store() as store:
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

    @guarantee(11, 16, needs="restart")
    async def test_a_copy_survives_a_restart_with_its_branch(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(log("s", 5))
            await store.copy_prefix("s", "t", 3, branch_name="try")
            copies = await store.read("t")
        async with self.open_store() as store:
            assert await store.read("t") == copies
            assert await store.branches.branch_of("t") == ("s", "try", "t", "s", 3, False)
            await store.append(event("t", 4))

    @guarantee(11, needs="damaged-events")
    async def test_a_damaged_source_is_copied_up_to_the_damage_and_no_further(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(log("s", 6))
            await self.damage_event(store, "s", 3)
            with pytest.raises(StoreReadError) as caught:
                await store.copy_prefix("s", "t", 4)
            assert caught.value.execution_id == self.named("s")
            assert await store.last_sequence("t") is None
            await store.copy_prefix("s", "t", 2)
            assert await store.last_sequence("t") == 2
