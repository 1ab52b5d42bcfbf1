"""Guarantees 4 and 5: a writer that has been superseded is refused, and tokens only grow."""

from __future__ import annotations

import asyncio

import pytest

from loomfast._errors import DuplicateSequenceError, StaleFenceError
from loomfast.testing.conformance._suite import Conformance, guarantee
from loomfast.testing.conformance.logs import event, log


class FenceConformance(Conformance):
    """Fencing tokens."""

    @guarantee(4)
    async def test_a_missing_or_older_token_is_refused_once_a_fence_is_acquired(self) -> None:
        async with self.open_store() as store:
            await store.append(event("x", 0))
            old, new = await store.acquire_fence("x"), await store.acquire_fence("x")
            for writer, held in ((event("x", 1), None), (event("x", 1, fence=old), old)):
                with pytest.raises(StaleFenceError) as caught:
                    await store.append(writer)
                refused = caught.value
                assert (refused.execution_id, refused.fence, refused.current) == (self.named("x"), held, new)
            await store.append(event("x", 1, fence=new))
            await store.append(event("other", 0))

    @guarantee(4)
    async def test_a_newer_token_than_the_newest_is_taken(self) -> None:
        """A fork or an import carries tokens that this store never gave out."""
        async with self.open_store() as store:
            token = await store.acquire_fence("x")
            await store.append_batch([event("x", 0, fence=token + 5), event("y", 0, fence=9)])
            assert [p.event.fence for p in await store.read_all()] == [token + 5, 9]

    @guarantee(4)
    async def test_the_token_is_checked_before_the_slot_on_every_envelope(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(log("x", 2))
            await store.append(event("free", 0))
            token = await store.acquire_fence("x")
            with pytest.raises(StaleFenceError):
                await store.append(event("x", 0))
            with pytest.raises(DuplicateSequenceError):
                await store.append(event("x", 0, fence=token))
            with pytest.raises(StaleFenceError):
                await store.append(event("x", 7))  # before the gap, too
            with pytest.raises(StaleFenceError):
                await store.append_batch([event("free", 0), event("x", 2, fence=token), event("x", 3)])
            assert await store.last_sequence("x") == 1

    @guarantee(4)
    async def test_the_holders_of_older_tokens_are_refused_whatever_waits_beside_them(self) -> None:
        async with self.open_store() as store:
            await store.append(event("x", 0))
            first, token = await asyncio.gather(
                store.append(event("x", 1)), store.acquire_fence("x"), return_exceptions=True
            )
            # Which of the two came first is open; whoever waited behind the fence was judged by it.
            assert first is None or isinstance(first, StaleFenceError)
            last = await store.last_sequence("x")
            assert last == (1 if first is None else 0)
            with pytest.raises(StaleFenceError):
                await store.append(event("x", last + 1))
            await store.append(event("x", last + 1, fence=token))

    @guarantee(4, 5)
    async def test_an_execution_can_be_fenced_before_it_exists_and_is_then_not_listed(self) -> None:
        async with self.open_store() as store:
            token = await store.acquire_fence("early")
            assert await store.list_executions() == []
            assert await store.last_sequence("early") is None
            assert await store.read("early") == []
            assert await store.fold("early") is None
            await store.append(event("late", 0))
            with pytest.raises(StaleFenceError):
                await store.append(event("early", 0))
            await store.append(event("early", 0, fence=token))
            listed = await store.list_executions()
            assert [summary.execution_id for summary in listed] == ["late", "early"]
            assert await store.acquire_fence("early") > token

    @guarantee(5)
    async def test_tokens_of_one_execution_increase_strictly_under_concurrency(self) -> None:
        async with self.open_store() as store:
            tokens = await asyncio.gather(*(store.acquire_fence("x") for _ in range(40)))
            assert len(set(tokens)) == 40
            newer = await store.acquire_fence("x")
            assert newer > max(tokens)
            await store.append(event("x", 0, fence=newer))

    @guarantee(4, 5, needs="restart")
    async def test_tokens_survive_a_restart_and_go_on_from_there(self) -> None:
        async with self.open_store() as store:
            await store.append(event("x", 0))
            await store.acquire_fence("x")
            token = await store.acquire_fence("x")
            early = await store.acquire_fence("early")
        async with self.open_store() as store:
            for stale in (event("x", 1), event("x", 1, fence=token - 1)):
                with pytest.raises(StaleFenceError):
                    await store.append(stale)
            await store.append(event("x", 1, fence=token))
            assert await store.acquire_fence("x") > token
            with pytest.raises(StaleFenceError):
                await store.append(event("early", 0))
            assert await store.acquire_fence("early") > early

    @guarantee(4, 5, needs="sharing")
    async def test_a_token_acquired_at_one_opening_is_judged_by_at_another(self) -> None:
        async with self.open_store() as one, self.open_store() as other:
            await one.append(event("x", 0))
            token = await other.acquire_fence("x")
            with pytest.raises(StaleFenceError):
                await one.append(event("x", 1))
            tokens = await asyncio.gather(
                *(store.acquire_fence("x") for _ in range(10) for store in (one, other))
            )
            assert len({token, *tokens}) == 21
            await one.append(event("x", 1, fence=max(tokens)))
