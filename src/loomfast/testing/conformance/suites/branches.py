"""Guarantees 16 to 18: names of forks, where each comes from, and which one is the main one."""

from __future__ import annotations

import asyncio

import pytest

from loomfast._errors import (
    BadInputError,
    BeyondLogError,
    BranchExistsError,
    UnknownBranchError,
    UnknownExecutionError,
)
from loomfast.stores import Branch, EventStore
from loomfast.testing.conformance._suite import Conformance, guarantee
from loomfast.testing.conformance.logs import event, log


async def lineage(store: EventStore) -> None:
    """Make the picture in the contract: s with a at 4 and b at 9, and c of a at 6."""
    await store.append_batch(log("s", 10))
    await store.copy_prefix("s", "a", 4, branch_name="try-a")
    await store.append_batch(log("a", 5, first=5))
    await store.copy_prefix("s", "b", 9, branch_name="try-b")
    await store.copy_prefix("a", "c", 6)
    await store.branches.add("try-c", "c", parent_id="a", cut=6)


S = Branch("s", "origin", "s", None, None, True)
A = Branch("s", "try-a", "a", "s", 4, False)
B = Branch("s", "try-b", "b", "s", 9, False)
C = Branch("s", "try-c", "c", "a", 6, False)


class BranchConformance(Conformance):
    """The branch registry."""

    @guarantee(16)
    async def test_a_lineage_has_names_parents_and_cuts(self) -> None:
        async with self.open_store() as store:
            await lineage(store)
            branches = store.branches
            assert await branches.refs("s") == [S, A, B, C]
            assert await branches.children("s") == [A, B]
            assert await branches.children("a") == [C]
            assert await branches.children("c") == []
            assert [await branches.branch_of(name) for name in "sabc"] == [S, A, B, C]
            assert await branches.get("s", "try-c") == C
            assert await branches.get("s", "origin") == S

    @guarantee(16)
    async def test_tips_say_where_each_branch_stands_now(self) -> None:
        async with self.open_store() as store:
            await lineage(store)
            await store.append(event("b", 10, "EXECUTION_COMPLETED", {"output": 1}))
            assert await store.branches.tips("s") == [
                ("origin", "s", 9, "running"),
                ("try-a", "a", 9, "running"),
                ("try-b", "b", 10, "completed"),
                ("try-c", "c", 6, "running"),
            ]

    @guarantee(16)
    async def test_what_is_no_branch_has_none(self) -> None:
        async with self.open_store() as store:
            await lineage(store)
            await store.append(event("alone", 0))
            for name in ("alone", "nobody", "a"):
                assert await store.branches.refs(name) == []
                assert await store.branches.tips(name) == []
                assert await store.branches.get(name, "origin") is None
            for name in ("alone", "nobody"):
                assert await store.branches.children(name) == []
                assert await store.branches.branch_of(name) is None
            assert await store.branches.get("s", "nothing") is None

    @guarantee(16)
    async def test_branches_take_any_text(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(log("\ud800", 3))
            for name in ("é", "\udfff", "a\x00b", "a", " "):
                await store.copy_prefix("\ud800", f"t{name}", 1, branch_name=name)
                assert await store.branches.get("\ud800", name) == (
                    "\ud800",
                    name,
                    f"t{name}",
                    "\ud800",
                    1,
                    False,
                )
            assert len(await store.branches.children("\ud800")) == 5

    @guarantee(17)
    async def test_a_name_is_taken_once_in_its_lineage_and_an_execution_named_once(
        self,
    ) -> None:
        async with self.open_store() as store:
            await lineage(store)
            await store.append_batch([event("d", 0), event("other", 0), event("e", 0)])
            add = store.branches.add
            for name, execution_id, parent_id, cut, there in (
                ("try-a", "d", "s", 0, A),
                ("try-a", "d", "c", 0, A),  # of another parent, but of the same lineage
                ("another", "a", "s", 4, A),
                ("try-a", "a", "s", 3, A),
                ("try-a", "a", "b", 4, A),
                ("round", "s", "a", 1, S),  # the origin is nobody's branch
                ("moved", "c", "other", 0, C),
            ):
                with pytest.raises(BranchExistsError) as caught:
                    await add(name, execution_id, parent_id=parent_id, cut=cut)
                assert (caught.value.execution_id, caught.value.name) == (
                    self.named(there.execution_id),
                    there.name,
                )
            assert await store.branches.refs("s") == [S, A, B, C]
            added = await add("try-a", "d", parent_id="other", cut=0)
            assert added == ("other", "try-a", "d", "other", 0, False)

    @guarantee(17)
    async def test_repeating_an_addition_word_for_word_is_no_conflict(self) -> None:
        async with self.open_store() as store:
            await lineage(store)
            assert await store.branches.add("try-c", "c", parent_id="a", cut=6) == C
            assert await store.branches.refs("s") == [S, A, B, C]

    @guarantee(17)
    async def test_branches_that_cannot_be_are_refused(self) -> None:
        async with self.open_store() as store:
            await store.append_batch([event("s", 0), event("t", 0)])
            add = store.branches.add
            for name in ("", "origin"):
                with pytest.raises(BadInputError):
                    await add(name, "t", parent_id="s", cut=0)
            with pytest.raises(BadInputError):
                await add("b", "s", parent_id="s", cut=0)
            with pytest.raises(BadInputError):
                await add("b", "t", parent_id="s", cut=-1)
            with pytest.raises(BeyondLogError):
                await add("b", "t", parent_id="s", cut=1)
            await store.acquire_fence("fenced")
            for execution_id, parent_id in (("t", "nobody"), ("nobody", "s"), ("fenced", "s")):
                with pytest.raises(UnknownExecutionError):
                    await add("b", execution_id, parent_id=parent_id, cut=0)
            assert await store.branches.refs("s") == []

    @guarantee(17)
    async def test_of_many_that_want_one_name_exactly_one_gets_it(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(log("s", 3))
            results = await asyncio.gather(
                *(store.copy_prefix("s", f"t{n}", 2, branch_name="it") for n in range(20)),
                return_exceptions=True,
            )
            assert results.count(None) == 1
            assert all(r is None or isinstance(r, BranchExistsError) for r in results)
            assert len(await store.list_executions()) == 2
            assert len(await store.branches.refs("s")) == 2

    @guarantee(18)
    async def test_a_lineage_has_exactly_one_main_branch(self) -> None:
        async with self.open_store() as store:
            await lineage(store)
            for name in ("try-b", "try-b", "try-c", "origin"):
                promoted = await store.branches.promote("s", name)
                assert (promoted.name, promoted.main) == (name, True)
                assert [branch.name for branch in await store.branches.refs("s") if branch.main] == [name]
            await store.branches.promote("s", "try-a")
            assert await store.branches.branch_of("a") == A._replace(main=True)
            assert await store.branches.children("s") == [A._replace(main=True), B]
            for origin_id, name in (("s", "nothing"), ("a", "try-c"), ("nobody", "origin")):
                with pytest.raises(UnknownBranchError) as caught:
                    await store.branches.promote(origin_id, name)
                assert (caught.value.origin_id, caught.value.name) == (self.named(origin_id), name)

    @guarantee(16, 18, needs="restart")
    async def test_branches_survive_a_restart(self) -> None:
        async with self.open_store() as store:
            await lineage(store)
            await store.branches.promote("s", "try-a")
        async with self.open_store() as store:
            assert await store.branches.refs("s") == [
                S._replace(main=False),
                A._replace(main=True),
                B,
                C,
            ]
            with pytest.raises(BranchExistsError):
                await store.copy_prefix("s", "d", 1, branch_name="try-a")
