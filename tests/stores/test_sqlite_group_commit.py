"""Group commit: who shares a transaction, who is told what, and when."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import apsw
import pytest

from loomfast._errors import DuplicateSequenceError, StorageWriteError
from loomfast.stores import SqliteEventStore
from loomfast.stores import _sqlite_writer as writer

from .logs import event, log


class Transactions:
    """Counts the writer's transactions, and fails those that hold a call of a chosen execution at COMMIT."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.fails_with: str | None = None

    def commit(self, ledger: Any, calls: list[Any], deadline: float) -> list[tuple[Any, Any]]:
        self.sizes.append(len(calls))
        names = {one.execution_id for call in calls for one in getattr(call, "envelopes", ())}
        connection = ledger.connection
        if self.fails_with in names:
            ledger.connection = _FailingAtCommit(connection)
        try:
            outcomes: list[tuple[Any, Any]] = _COMMIT(ledger, calls, deadline)
        finally:
            ledger.connection = connection
        return outcomes


_COMMIT = writer.Ledger.commit


class _FailingAtCommit:
    """A connection that refuses COMMIT and does all else."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, sql: str, *arguments: Any) -> Any:
        if sql == "COMMIT":
            raise apsw.IOError("the disk is gone")
        return self._connection.execute(sql, *arguments)


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> Transactions:
    counted = Transactions()
    monkeypatch.setattr(
        writer.Ledger, "commit", lambda ledger, calls, deadline: counted.commit(ledger, calls, deadline)
    )
    return counted


async def test_concurrent_appends_share_transactions_and_a_lone_one_waits_for_nobody(
    path: Path, transactions: Transactions
) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append(event("lone", 0))
        assert transactions.sizes == [1]
        await asyncio.gather(*(store.append(event(f"x{n}", 0)) for n in range(200)))
        assert sum(transactions.sizes) == 201
        assert len(transactions.sizes) < 60


async def test_a_transaction_is_bounded_and_a_call_is_never_cut(
    path: Path, transactions: Transactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_CALLS", 5)
    monkeypatch.setattr(writer, "MAX_EVENTS", 12)
    async with await SqliteEventStore.open(path) as store:
        await asyncio.gather(*(store.append_batch(log(f"x{n}", 5)) for n in range(40)))
        await store.append_batch(log("large", 500))
        assert max(transactions.sizes) == 3
        assert len(await store.read_all()) == 700


async def test_appends_of_one_execution_keep_their_order_within_a_transaction(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await asyncio.gather(*(store.append(event("x", n)) for n in range(100)))
        assert [one.sequence for one in await store.read("x")] == list(range(100))


async def test_the_loser_and_the_winner_of_one_slot_may_share_a_transaction(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        results = await asyncio.gather(
            store.append(event("x", 0)),
            store.append_batch([event("x", 0), event("x", 1)]),
            store.append(event("x", 1)),
            return_exceptions=True,
        )
        assert results[0] is None
        assert isinstance(results[1], DuplicateSequenceError)
        assert results[2] is None


async def test_nobody_is_told_stored_when_the_commit_fails_and_only_the_culprit_is_rejected(
    path: Path, transactions: Transactions
) -> None:
    transactions.fails_with = "bad"
    async with await SqliteEventStore.open(path) as store:
        results = await asyncio.gather(
            *(store.append_batch(log(name, 3)) for name in ("a", "bad", "b", "c")), return_exceptions=True
        )
        assert [type(result) for result in results] == [type(None), StorageWriteError, type(None), type(None)]
        error = results[1]
        assert isinstance(error, StorageWriteError)
        assert (error.execution_id, error.sequence) == ("bad", 0)
        assert isinstance(error.__cause__, apsw.IOError)
        assert await store.last_sequence("bad") is None
        assert [p.position for p in await store.read_all()] == list(range(1, 10))
        transactions.fails_with = None
        await store.append_batch(log("bad", 3))
        assert await store.fold("bad") is not None
