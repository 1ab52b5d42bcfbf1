"""Group commit on PostgreSQL: who shares a transaction, who is told what, and when. F22, F23."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loomfast._errors import DuplicateSequenceError, LeaseLostError, StorageWriteError
from loomfast._kernels import fold_events
from loomfast.stores import PostgresEventStore
from loomfast.stores import _postgres_ledger as ledger
from loomfast.stores import _postgres_writer as writer
from loomfast.stores._threads import ANSWERS_A_TURN

from .conftest import OpenPostgres
from .logs import event, log
from .programs import on_the_server


class Groups:
    """Counts the groups of a store and their statements."""

    def __init__(self, store: PostgresEventStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.statements = 0
        assert store._writer._connection is not None
        store._writer._connection.add_query_logger(self._count)
        settled = store._writer._settled

        async def counted(connection: Any, calls: Any) -> Any:
            self.sizes.append(len(calls))
            return await settled(connection, calls)

        monkeypatch.setattr(store._writer, "_settled", counted)

    def _count(self, query: Any) -> None:
        self.statements += query.query in (ledger.APPEND, ledger.APPEND_UNDER)


async def test_concurrent_appends_share_one_round_trip_and_a_lone_one_waits_for_nobody(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await open_postgres() as store:
        groups = Groups(store, monkeypatch)
        await store.append(event("lone", 0))
        await store.append(event("lone", 1))
        assert (groups.sizes, groups.statements) == ([1, 1], 2)
        await asyncio.gather(*(store.append_batch(log(f"x{n}", 2)) for n in range(200)))
        assert (groups.sizes[2:], groups.statements) == ([200], 3)


async def test_fences_under_leases_share_the_round_trip_and_a_lost_one_costs_one_more(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await open_postgres() as store:
        leases = [await store.leases.acquire(f"x{n}", "a", 60) for n in range(40)]
        groups = Groups(store, monkeypatch)

        async def together() -> list[Any]:
            fences = (store.acquire_fence(f"x{n}", lease=lease) for n, lease in enumerate(leases))
            return await asyncio.gather(*fences, store.append_batch(log("y", 2)), return_exceptions=True)

        assert await together() == [1] * 40 + [None]
        assert (groups.sizes, groups.statements) == ([41], 1)
        lost = leases[7]
        assert lost is not None
        await store.leases.release([lost])
        answers = await together()
        assert [n for n, answer in enumerate(answers[:40]) if answer != 2] == [7]
        assert isinstance(answers[7], LeaseLostError)
        assert isinstance(answers[40], DuplicateSequenceError)
        assert (groups.sizes, groups.statements) == ([41, 41], 3)


async def test_many_callers_are_answered_a_few_at_a_time(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as store:
        turns: list[int] = []
        calls = [asyncio.create_task(store.append(event(f"x{n}", 0))) for n in range(100)]
        while not all(call.done() for call in calls):
            before = sum(call.done() for call in calls)
            await asyncio.sleep(0)
            turns.append(sum(call.done() for call in calls) - before)
        assert max(turns) <= ANSWERS_A_TURN
        assert len(await store.read_all()) == 100


async def test_a_group_is_bounded_and_a_call_is_never_cut(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_CALLS", 5)
    monkeypatch.setattr(writer, "MAX_EVENTS", 12)
    async with await open_postgres() as store:
        groups = Groups(store, monkeypatch)
        await asyncio.gather(*(store.append_batch(log(f"x{n}", 5)) for n in range(40)))
        await store.append_batch(log("large", 500))
        assert max(groups.sizes) == 3
        assert len(await store.read_all()) == 700


@pytest.mark.parametrize("bound", ["STATEMENT_EVENTS", "STATEMENT_BYTES"])
async def test_what_is_too_large_for_one_statement_is_one_transaction_all_the_same(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(ledger, bound, 7)
    async with await open_postgres() as store:
        await store.append(event("old", 0))
        groups = Groups(store, monkeypatch)
        batch = [*log("x", 30), *log("old", 20, first=1), *log("y", 3), *log("x", 5, first=30)]
        await store.append_batch(batch)
        assert groups.statements >= 9
        assert [p.event for p in await store.read_all(1)] == batch
        assert [(s.execution_id, s.last_sequence) for s in await store.list_executions()] == [
            ("old", 20),
            ("x", 34),
            ("y", 2),
        ]
        assert await store.fold("x") == fold_events(None, [*log("x", 30), *log("x", 5, first=30)])
        await store.append(event("x", 35))


async def test_a_failure_in_the_last_statement_of_a_large_batch_leaves_nothing_of_it(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres() as store:
        on_the_server(store, "ALTER TABLE events ADD CHECK (sequence < 2500)")
        with pytest.raises(StorageWriteError):
            await store.append_batch([event("y", 0), *log("x", 2_501)])
        assert await store.read_all() == []
        assert await store.list_executions() == []
        await store.append_batch([event("y", 0), *log("x", 2_500)])
        assert (await store.read_all(2_500))[0].position == 2_501


async def test_appends_of_one_execution_keep_their_order_within_a_group(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as store:
        await asyncio.gather(*(store.append(event("x", n)) for n in range(100)))
        assert [one.sequence for one in await store.read("x")] == list(range(100))


async def test_the_loser_and_the_winner_of_one_slot_may_share_a_group(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as store:
        results = await asyncio.gather(
            store.append(event("x", 0)),
            store.append_batch([event("x", 0), event("x", 1)]),
            store.append(event("x", 1)),
            return_exceptions=True,
        )
        assert results[0] is None
        assert isinstance(results[1], DuplicateSequenceError)
        assert results[2] is None


async def test_a_group_judged_by_what_another_process_has_changed_is_judged_again(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await open_postgres() as store, await open_postgres() as other:
        await store.append_batch([event("x", 0), event("y", 0)])
        await other.append(event("x", 1))
        token = await other.acquire_fence("y")
        groups = Groups(store, monkeypatch)
        results = await asyncio.gather(
            store.append(event("x", 2)),  # which was a gap when this store last looked
            store.append(event("z", 0)),
            store.append(event("y", 1, fence=token)),
            store.append(event("x", 1)),
            return_exceptions=True,
        )
        assert results[:3] == [None] * 3
        assert isinstance(results[3], DuplicateSequenceError)
        assert groups.sizes == [4]


async def test_a_group_that_keeps_losing_races_is_judged_under_the_lock(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await open_postgres() as store, await open_postgres() as rival:
        await store.append(event("x", 0))
        send = store._writer._send
        tokens: list[int] = []

        async def send_late(connection: Any, calls: Any) -> Any:
            if not connection.is_in_transaction():  # somebody else gets in between
                tokens.append(await rival.acquire_fence("x"))
            return await send(connection, calls)

        monkeypatch.setattr(store._writer, "_send", send_late)
        assert await store.acquire_fence("x") == len(tokens) + 1
        assert len(tokens) == 3
