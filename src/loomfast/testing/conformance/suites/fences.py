"""Guarantees 4, 5 and 26: who has been superseded is refused, be it a writer or who asks for a fence."""

from __future__ import annotations

import asyncio

import pytest

from loomfast._errors import DuplicateSequenceError, LeaseLostError, StaleFenceError
from loomfast._kernels import Envelope
from loomfast.stores import EventStore, Lease
from loomfast.testing.conformance._suite import LONG_S, Conformance, guarantee
from loomfast.testing.conformance.logs import event, log


async def taken(store: EventStore, key: str, owner: str, ttl_s: float = LONG_S) -> Lease:
    lease = await store.leases.acquire(key, owner, ttl_s)
    assert lease is not None
    return lease


async def asked(store: EventStore, lease: Lease) -> int | LeaseLostError:
    """The token that a fence under the lease of an execution gets, or the refusal."""
    try:
        return await store.acquire_fence(lease.key, lease=lease)
    except LeaseLostError as error:
        return error


def written(execution_id: str, sequence: int, token: int | None) -> Envelope:
    return event(execution_id, sequence) if token is None else event(execution_id, sequence, fence=token)


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

    @guarantee(26)
    async def test_a_fence_under_a_lease_that_was_taken_over_is_refused_and_changes_nothing(
        self,
    ) -> None:
        async with self.open_store() as store:
            await store.append(event("x", 0))
            ours = await taken(store, "x", "a")
            first = await store.acquire_fence("x", lease=ours)
            assert await store.acquire_fence("x", lease=ours) > first
            await store.leases.release([ours])
            theirs = await taken(store, "x", "b")
            token = await store.acquire_fence("x", lease=theirs)
            assert token > first
            await store.append(event("x", 1, fence=token))
            for _ in range(3):
                with pytest.raises(LeaseLostError) as caught:
                    await store.acquire_fence("x", lease=ours)
                assert caught.value.execution_id == self.named("x")
            await store.append(event("x", 2, fence=token))
            assert await store.acquire_fence("x", lease=theirs) > token

    @guarantee(26)
    async def test_a_lease_that_was_given_back_or_taken_anew_or_is_of_another_key_is_not_held(self) -> None:
        async with self.open_store() as store:
            older, newer = await taken(store, "x", "a"), await taken(store, "x", "a")
            other, gone = await taken(store, "other", "a"), await taken(store, "gone", "a")
            await store.leases.release([gone])
            exchanged = newer._replace(key="other"), other._replace(key="x")
            for lost in (older, gone, *exchanged):
                with pytest.raises(LeaseLostError):
                    await store.acquire_fence("x", lease=lost)
            await store.append(event("x", 0))  # which nobody has fenced
            # The key need not be the execution's, and of the rest the token counts.
            for n, held in enumerate((other, newer, newer._replace(owner="b", expires_ms=0)), 1):
                await store.append(event("x", n, fence=await store.acquire_fence("x", lease=held)))

    @guarantee(26)
    async def test_a_lease_that_has_run_out_is_not_held_though_nobody_has_taken_it(self) -> None:
        async with self.open_store() as store:
            short = await taken(store, "x", "a", self.lease_s)
            renewed = await taken(store, "y", "a", self.lease_s)
            await store.acquire_fence("x", lease=short)
            await store.leases.renew([renewed], LONG_S)
            await self.wait(self.lease_s + 0.01)
            for _ in range(2):
                with pytest.raises(LeaseLostError):
                    await store.acquire_fence("x", lease=short)
            await store.acquire_fence("y", lease=renewed)  # as it was when it was taken: it lasts on

    @guarantee(26)
    async def test_fences_under_leases_are_judged_one_by_one_whatever_waits_beside_them(self) -> None:
        async with self.open_store() as store:
            held, lost = await taken(store, "held", "a"), await taken(store, "lost", "a")
            await store.leases.release([lost])
            answers = await asyncio.gather(*(asked(store, (held, lost)[n % 2]) for n in range(40)))
            tokens = [token for token in answers[::2] if isinstance(token, int)]
            assert len(set(tokens)) == 20
            assert all(isinstance(answer, LeaseLostError) for answer in answers[1::2])
            refused, appended, token = await asyncio.gather(
                asked(store, lost), store.append(event("other", 0)), store.acquire_fence("fenced")
            )
            assert isinstance(refused, LeaseLostError)
            assert appended is None
            await store.append(event("fenced", 0, fence=token))
            await store.append(event("held", 0, fence=max(tokens)))
            await store.append(event("lost", 0))

    @guarantee(26)
    async def test_no_late_fence_stops_whoever_takes_the_lease_over_fences_and_writes(self) -> None:
        async with self.open_store() as store:
            await self._contested(store, store)

    @guarantee(26, needs="sharing")
    async def test_no_late_fence_of_another_opening_stops_whoever_has_taken_the_lease_over(self) -> None:
        async with self.open_store() as one, self.open_store() as other:
            await self._contested(one, other)

    async def _contested(self, late: EventStore, store: EventStore) -> None:
        """Fences under a lease are on their way while it is taken over: each is before that, or refused.

        Whoever takes over begins with a fence, or with an append, as the runtime does where nothing runs.
        """
        for n in range(16):
            x = f"x{n}"
            ours = await taken(late, x, "a")
            requests = [asyncio.create_task(asked(late, ours)) for _ in range(8)]
            await asyncio.sleep(0)
            await store.leases.release([ours])
            theirs = await taken(store, x, "b")
            token = await store.acquire_fence(x, lease=theirs) if n % 2 else None
            try:
                await store.append(written(x, 0, token))
            except StaleFenceError:
                assert token is None
                token = await store.acquire_fence(x, lease=theirs)
                await store.append(written(x, 0, token))
            requests += [asyncio.create_task(asked(late, ours)) for _ in range(8)]
            answers = await asyncio.gather(*requests)
            assert all(isinstance(answer, LeaseLostError) for answer in answers[8:])
            await store.append(written(x, 1, token))  # nobody has stopped them

    @guarantee(26, needs="restart")
    async def test_a_lease_that_is_held_over_a_restart_is_fenced_under(self) -> None:
        async with self.open_store() as store:
            lease, lost = await taken(store, "x", "a"), await taken(store, "y", "a")
            await store.leases.release([lost])
        async with self.open_store() as store:
            await store.append(event("x", 0, fence=await store.acquire_fence("x", lease=lease)))
            assert isinstance(await asked(store, lost), LeaseLostError)
