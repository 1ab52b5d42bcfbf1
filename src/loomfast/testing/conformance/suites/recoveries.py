"""Guarantee 22: the account of executions that crashed."""

from __future__ import annotations

import pytest

from loomfast._errors import BadInputError, UnknownExecutionError
from loomfast.stores import EventStore, Recovery
from loomfast.testing.conformance._suite import Conformance, guarantee
from loomfast.testing.conformance.logs import event


async def account(store: EventStore, execution_id: str, set_aside: str | None = None) -> Recovery:
    """Put an account of an execution that is there."""
    recovery = Recovery(execution_id, 3, 17, False, set_aside)
    await store.recoveries.put(recovery)
    return recovery


class RecoveryConformance(Conformance):
    """Accounts of crashes."""

    @guarantee(22)
    async def test_an_account_is_replaced_whole_and_can_be_forgotten(self) -> None:
        async with self.open_store() as store:
            await store.append_batch([event("x", 0), event("y", 0)])
            assert await store.recoveries.get("x") is None
            assert await store.recoveries.delete("x") is False
            for recovery in (
                Recovery("x", 1, 4, False, None),
                Recovery("x", 2, 4, True, None),
                Recovery("x", 0, 0, False, "a\x00\ud800 é"),
                Recovery("x", 2**31, 2**31, True, ""),
            ):
                await store.recoveries.put(recovery)
                kept = await store.recoveries.get("x")
                assert kept == recovery
                assert kept is not None
                assert type(kept.orderly) is bool
            assert await store.recoveries.get("y") is None
            assert await store.recoveries.delete("x") is True
            assert await store.recoveries.delete("x") is False
            assert await store.recoveries.get("x") is None

    @guarantee(22)
    async def test_only_an_execution_that_exists_has_an_account(self) -> None:
        async with self.open_store() as store:
            await store.acquire_fence("fenced")
            for unknown in ("nobody", "fenced"):
                with pytest.raises(UnknownExecutionError) as caught:
                    await account(store, unknown)
                assert caught.value.execution_id == self.named(unknown)
                assert await store.recoveries.get(unknown) is None
                assert await store.recoveries.delete(unknown) is False

    @guarantee(22)
    async def test_what_is_set_aside_is_listed_in_pages_in_the_order_of_executions(self) -> None:
        async with self.open_store() as store:
            names = [f"x{n}" for n in (5, 3, 9, 1, 7, 0)]
            for name in names:
                await store.append(event(name, 0))
            assert await store.recoveries.list() == []
            aside = {}
            for name in reversed(names):
                if name == "x9":
                    await account(store, name)
                elif name != "x1":
                    aside[name] = await account(store, name, f"why {name}")
            expected = [aside[name] for name in names if name in aside]
            assert await store.recoveries.list() == expected
            assert await store.recoveries.list(limit=2) == expected[:2]
            assert await store.recoveries.list(after="x3", limit=2) == expected[2:4]
            assert await store.recoveries.list(after="x9") == expected[2:]  # it need not be one of them
            assert await store.recoveries.list(after="x0") == []
            await store.recoveries.delete("x5")
            await account(store, "x3")  # released
            assert await store.recoveries.list() == expected[2:]

    @guarantee(22)
    async def test_pages_of_accounts_that_cannot_be_are_refused(self) -> None:
        async with self.open_store() as store:
            for limit in (0, -1):
                with pytest.raises(BadInputError):
                    await store.recoveries.list(limit=limit)
            with pytest.raises(UnknownExecutionError):
                await store.recoveries.list(after="nobody")

    @guarantee(22, needs="restart")
    async def test_accounts_survive_a_restart(self) -> None:
        async with self.open_store() as store:
            await store.append_batch([event("x", 0), event("y", 0)])
            recovery = await account(store, "x", "crashed too often")
            await account(store, "y")
            await store.recoveries.delete("y")
        async with self.open_store() as store:
            assert await store.recoveries.get("x") == recovery
            assert await store.recoveries.get("y") is None
            assert await store.recoveries.list() == [recovery]
