"""Guarantees 19 to 21: one owner at a time, by the store's clock, durably."""

from __future__ import annotations

import asyncio

import pytest

from loomfast._errors import BadInputError
from loomfast.testing.conformance._suite import LONG_S, Conformance, guarantee


class LeaseConformance(Conformance):
    """Leases."""

    @guarantee(19)
    async def test_a_lease_is_held_by_one_owner_until_it_is_released(self) -> None:
        async with self.open_store() as store:
            leases = store.leases
            assert await leases.get("k") is None
            lease = await leases.acquire("k", "a", LONG_S)
            assert lease is not None
            assert (lease.key, lease.owner) == ("k", "a")
            assert await leases.get("k") == lease
            assert await leases.acquire("k", "b", LONG_S) is None
            assert await leases.get("k") == lease
            await leases.release([lease])
            assert await leases.get("k") is None
            later = await leases.acquire("k", "b", LONG_S)
            assert later is not None
            assert later.token > lease.token

    @guarantee(19)
    async def test_of_many_that_want_a_lease_exactly_one_gets_it(self) -> None:
        async with self.open_store() as store:
            for key in ("k", "l"):
                taken = await asyncio.gather(
                    *(store.leases.acquire(key, f"node-{n}", LONG_S) for n in range(20))
                )
                [lease] = [one for one in taken if one is not None]
                assert await store.leases.get(key) == lease

    @guarantee(19)
    async def test_tokens_are_new_whatever_was_released_in_between(self) -> None:
        async with self.open_store() as store:
            tokens = []
            for n in range(12):
                lease = await store.leases.acquire(f"k{n % 3}", "a", LONG_S)
                assert lease is not None
                tokens.append(lease.token)
                if n % 2:
                    await store.leases.release([lease])
            assert tokens == sorted(set(tokens))

    @guarantee(19)
    async def test_whoever_holds_a_lease_can_take_it_anew_and_the_older_one_is_void(self) -> None:
        async with self.open_store() as store:
            older = await store.leases.acquire("k", "a", LONG_S)
            newer = await store.leases.acquire("k", "a", LONG_S)
            assert older is not None
            assert newer is not None
            assert newer.token > older.token
            assert await store.leases.renew([older], LONG_S) == []
            await store.leases.release([older])
            assert await store.leases.get("k") == newer

    @guarantee(20)
    async def test_a_lease_ends_when_its_time_by_the_stores_clock_is_over(self) -> None:
        async with self.open_store() as store:
            lease = await store.leases.acquire("k", "a", self.lease_s)
            assert lease is not None
            assert await store.leases.acquire("k", "b", LONG_S) is None
            await self.wait(self.lease_s + 0.01)
            assert await store.leases.get("k") is None
            assert await store.leases.renew([lease], LONG_S) == []  # though nobody has taken it
            taken = await store.leases.acquire("k", "b", LONG_S)
            assert taken is not None
            assert taken.token > lease.token
            await store.leases.release([lease])  # it is no longer a's to give back
            assert await store.leases.renew([lease], LONG_S) == []
            assert await store.leases.get("k") == taken

    @guarantee(20)
    async def test_which_of_many_keys_are_held_is_answered_in_the_order_of_the_keys(self) -> None:
        async with self.open_store() as store:
            leases = store.leases
            assert await leases.held([]) == []
            assert await leases.held(["nobody's"]) == []
            odd = ["\ud800", "a\x00b", "é", "1:a:b", "x" * 3_000]
            keys = [f"k{n}" for n in range(1_000)] + odd
            taken = {}
            for n, key in enumerate(keys):
                if n % 5 == 0 or key in odd:
                    owner = f"owner of {key}"
                    taken[key] = await leases.acquire(key, owner, self.lease_s if n % 2 else LONG_S)
                    assert taken[key] is not None
            asked = keys[::-1]
            long = [taken[key] for key in asked if key in taken and not keys.index(key) % 2]
            await self.wait(self.lease_s + 0.01)
            assert await leases.held(asked) == long
            first, second = long[0], long[1]
            assert first is not None
            assert second is not None
            await leases.release([second])
            assert await leases.held([second.key, first.key, "nobody's", first.key]) == [first, first]
            assert await leases.held(["nobody's", second.key]) == []

    @guarantee(20)
    async def test_a_lease_that_is_renewed_lasts_on_and_says_how_long(self) -> None:
        async with self.open_store() as store:
            lease = await store.leases.acquire("k", "a", self.lease_s)
            other = await store.leases.acquire("l", "a", self.lease_s)
            assert lease is not None
            assert other is not None
            [renewed] = await store.leases.renew([lease], LONG_S)
            assert renewed == lease._replace(expires_ms=renewed.expires_ms)
            gained_ms = renewed.expires_ms - lease.expires_ms
            assert gained_ms >= (LONG_S - self.lease_s) * 1000 - 1
            await self.wait(self.lease_s + 0.01)
            assert await store.leases.get("k") == renewed
            assert await store.leases.renew([other, lease], LONG_S) != []
            assert await store.leases.get("l") is None

    @guarantee(19)
    async def test_many_leases_are_renewed_and_released_in_one_call(self) -> None:
        async with self.open_store() as store:
            taken = [await store.leases.acquire(f"k{n}", "a", LONG_S) for n in range(300)]
            leases = [lease for lease in taken if lease is not None]
            assert len(leases) == 300
            stolen = await store.leases.acquire("k7", "a", LONG_S)
            renewed = await store.leases.renew(leases, 2 * LONG_S)
            assert [lease.key for lease in renewed] == [f"k{n}" for n in range(300) if n != 7]
            assert [lease.token for lease in renewed] == [one.token for one in leases if one.key != "k7"]
            [known] = await store.leases.renew([leases[0]._replace(owner="somebody else")], 2 * LONG_S)
            assert (known.key, known.owner) == ("k0", "a")  # the token counts, and the owner is the store's
            await store.leases.release(leases)
            assert [await store.leases.get(f"k{n}") for n in (0, 7, 299)] == [None, stolen, None]
            assert await store.leases.renew([], 1) == []
            await store.leases.release([])

    @guarantee(19)
    async def test_leases_take_any_text_and_their_keys_need_not_be_executions(self) -> None:
        async with self.open_store() as store:
            for key in ("é", "\ud800", "a\x00b", "a", " ", "1:a:b"):
                lease = await store.leases.acquire(key, key, LONG_S)
                assert lease is not None
                assert (lease.key, lease.owner) == (key, key)
                assert await store.leases.get(key) == lease

    @guarantee(19)
    async def test_leases_that_cannot_be_are_refused(self) -> None:
        async with self.open_store() as store:
            for key, owner, ttl_s in (
                ("", "a", 1.0),
                ("k", "", 1.0),
                ("k", "a", 0.0),
                ("k", "a", -1.0),
                ("k", "a", float("nan")),
                ("k", "a", float("inf")),
                ("k", "a", 1e18),
            ):
                with pytest.raises(BadInputError):
                    await store.leases.acquire(key, owner, ttl_s)
            lease = await store.leases.acquire("k", "a", LONG_S)
            assert lease is not None
            for ttl_s in (0.0, -1.0, float("nan"), float("inf")):
                with pytest.raises(BadInputError):
                    await store.leases.renew([lease], ttl_s)
            assert await store.leases.get("k") == lease

    @guarantee(19, 21, needs="restart")
    async def test_leases_and_the_count_of_tokens_survive_a_restart(self) -> None:
        async with self.open_store() as store:
            held = await store.leases.acquire("held", "a", LONG_S)
            given_back = await store.leases.acquire("given back", "a", LONG_S)
            assert held is not None
            assert given_back is not None
            [held] = await store.leases.renew([held], 2 * LONG_S)
            await store.leases.release([given_back])
        async with self.open_store() as store:
            assert await store.leases.get("held") == held
            assert await store.leases.acquire("held", "b", LONG_S) is None
            assert await store.leases.get("given back") is None
            newer = await store.leases.acquire("given back", "a", LONG_S)
            assert newer is not None
            assert newer.token > given_back.token
            assert await store.leases.renew([held], LONG_S) != []

    @guarantee(19, needs="sharing")
    async def test_two_openings_never_both_hold_a_lease(self) -> None:
        async with self.open_store() as one, self.open_store() as other:
            tokens = set()
            for n in range(10):
                taken = await asyncio.gather(
                    one.leases.acquire(f"k{n}", "a", LONG_S), other.leases.acquire(f"k{n}", "b", LONG_S)
                )
                [lease] = [lease for lease in taken if lease is not None]
                tokens.add(lease.token)
                assert await one.leases.get(f"k{n}") == await other.leases.get(f"k{n}") == lease
            assert len(tokens) == 10
