"""What only the SQLite store promises of cuts, copies, snapshots and branches: its file, faults and races."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from loomfast._core.snapshots import snapshot_of, state_of
from loomfast._errors import (
    BadSnapshotError,
    BeyondLogError,
    DuplicateSequenceError,
    PrefixTruncatedError,
    StaleFenceError,
    StorageWriteError,
    StoreReadError,
)
from loomfast._kernels import fold_events
from loomfast.stores import SqliteEventStore
from loomfast.stores import _sqlite_reader as reader
from loomfast.stores._sqlite_migrations import MIGRATIONS

from .logs import event, log
from .programs import foreign, on_the_writer, start_program

RECORDED = Path(__file__).parent / "data"


async def save(store: SqliteEventStore, events: list[Any]) -> None:
    await store.snapshots.save(snapshot_of(fold_events(None, events)))


# --- the file ------------------------------------------------------------------------------------


async def test_a_database_of_schema_version_1_is_brought_up_to_date_and_keeps_everything(path: Path) -> None:
    shutil.copy(RECORDED / "schema-1.sqlite", path)
    stores = await asyncio.gather(*(SqliteEventStore.open(path, create=False) for _ in range(4)))
    for other in stores[1:]:
        await other.close()
    async with stores[0] as store:
        events = log("x", 5)
        assert (await store.read("x"))[:5] == events
        odd = await store.read("\ud800")
        assert (odd[1].event_type, odd[1].payload) == ("\udfff", {"a": "\ud800"})
        assert odd[1].metadata == {"computeTarget": "gpu", "flowEmit": "f" * 16}
        assert [s[:4] for s in await store.list_executions()] == [
            ("x", "guard", "suspended", 5),
            ("\ud800", "guard", "completed", 2),
        ]
        assert [p.position for p in await store.read_all()] == list(range(1, 10))
        with pytest.raises(StaleFenceError):
            await store.append(event("x", 6))
        assert await store.acquire_fence("unborn") == 2

        assert await store.snapshots.verify() == []
        await save(store, await store.read("x"))
        assert await store.truncate_prefix("x", 4) == 3
        await store.copy_prefix("\ud800", "copy", 2, branch_name="again")
        assert (await store.read("copy"))[1].metadata["computeTarget"] == "gpu"
        await store.append(event("x", 6, fence=1))
    connection = foreign(path)
    assert connection.pragma("user_version") == len(MIGRATIONS)
    assert connection.pragma("integrity_check") == "ok"
    connection.close()


async def test_cuts_snapshots_and_branches_survive_a_restart(path: Path) -> None:
    events = log("x", 10)
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(events)
        await save(store, events)
        await store.copy_prefix("x", "t", 4, branch_name="try")
        await store.branches.promote("x", "try")
        await store.truncate_prefix("x", 7)
    async with await SqliteEventStore.open(path) as store:
        with pytest.raises(PrefixTruncatedError) as caught:
            await store.read("x")
        assert caught.value.first_available == 7
        with pytest.raises(DuplicateSequenceError):
            await store.append(event("x", 0))
        snapshot = await store.snapshots.latest("x")
        assert snapshot is not None
        assert state_of(snapshot) == fold_events(None, events)
        assert [branch[:6] for branch in await store.branches.refs("x")] == [
            ("x", "origin", "x", None, None, False),
            ("x", "try", "t", "x", 4, True),
        ]
        await store.append_batch([event("x", 10), event("t", 5)])
        assert [p.position for p in await store.read_all()] == [1, *range(8, 18)]


async def test_what_one_store_cuts_and_copies_another_one_on_the_file_respects(path: Path) -> None:
    async with await SqliteEventStore.open(path) as one, await SqliteEventStore.open(path) as two:
        events = log("x", 10)
        await one.append_batch(events)
        await two.append(event("y", 0))
        await save(two, events)
        await one.copy_prefix("x", "t", 4)
        with pytest.raises(DuplicateSequenceError):
            await two.append(event("t", 4))
        await two.append(event("t", 5))
        await one.append(event("t", 6))
        await two.truncate_prefix("x", 9)
        assert await one.truncate_prefix("x", 9) == 0
        with pytest.raises(PrefixTruncatedError):
            await one.copy_prefix("x", "u", 4)
        await one.copy_prefix("t", "u", 6)
        assert [p.position for p in await two.read_all()] == [1, 10, 11, *range(12, 26)]


async def test_the_space_of_what_was_cut_is_used_again(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        state = None
        sizes = []
        for first in range(0, 20_000, 2_000):
            events = log("x", 2_000, first)
            await store.append_batch(events)
            state = fold_events(state, events)
            await store.snapshots.save(snapshot_of(state))
            await store.truncate_prefix("x", first + 2_000)
            await store.snapshots.delete("x", state.sequence)
            sizes.append(foreign(path).pragma("page_count"))
    assert sizes[-1] <= sizes[1] * 1.2


# --- races ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.read_range("x", 0, 7),
        lambda store: store.read_range("x", 1, 3),
        lambda store: store.read_range("x", 3, None),
        lambda store: store.fold("x"),
        lambda store: store.fold("x", fold_events(None, log("x", 3))),
    ],
)
async def test_a_log_that_is_cut_while_it_is_read_is_never_read_with_a_hole(
    path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[SqliteEventStore], Any]
) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 10))
        find = reader._find

        def find_and_cut(connection: apsw.Connection, execution_id: str) -> Any:
            found = find(connection, execution_id)
            other = foreign(path)
            with other:
                other.execute("UPDATE executions SET cut = 6")
                other.execute("DELETE FROM events WHERE id BETWEEN (1 << 32) + 1 AND (1 << 32) + 5")
            other.close()
            monkeypatch.setattr(reader, "_find", find)
            return found

        monkeypatch.setattr(reader, "_find", find_and_cut)
        with pytest.raises(PrefixTruncatedError) as caught:
            await read(store)
        assert caught.value.first_available == 6


async def test_tasks_share_transactions_with_appends_and_with_each_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loomfast.stores import _sqlite_writer as writer

    async with await SqliteEventStore.open(path) as store:
        await store.append_batch([event(f"x{n}", 0) for n in range(100)])
        transactions: list[int] = []
        original = writer.Ledger.commit

        def commit(ledger: Any, calls: list[Any], deadline: float) -> Any:
            transactions.append(len(calls))
            return original(ledger, calls, deadline)

        monkeypatch.setattr(writer.Ledger, "commit", commit)
        await asyncio.gather(
            *(save(store, [event(f"x{n}", 0)]) for n in range(100)),
            *(store.append(event(f"x{n}", 1)) for n in range(100)),
            *(store.copy_prefix(f"x{n}", f"y{n}", 1, branch_name="y") for n in range(100)),
        )
        assert sum(transactions) == 300
        assert len(transactions) < 20
        assert len(await store.read_all()) == 400


# --- faults --------------------------------------------------------------------------------------


async def test_a_log_with_a_missing_row_is_a_read_error_that_names_it(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch([*log("x", 10), *log("y", 3)])
        for gone in (5, 9, 0):
            connection = foreign(path)
            connection.execute("DELETE FROM events WHERE id = (1 << 32) + ?", (gone,))
            connection.close()
            with pytest.raises(StoreReadError, match="'x'"):
                await store.read("x")
            with pytest.raises(StoreReadError):
                await store.copy_prefix("x", "t", 9)
        with pytest.raises(StoreReadError):
            await store.read_range("x", 0, 0)
        assert await store.read_range("x", 6, 8) == log("x", 3, first=6)
        assert await store.read("y") == log("y", 3)
        assert await store.last_sequence("t") is None


@pytest.mark.parametrize("damaged", [0, 1_500])
async def test_a_damaged_row_stops_its_copy_half_way_and_nobody_elses(path: Path, damaged: int) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch([*log("x", 2_000), *log("sound", 3)])
        connection = foreign(path)
        connection.execute("UPDATE events SET timestamp = 5 WHERE id = (1 << 32) + ?", (damaged,))
        connection.close()
        results = await asyncio.gather(
            store.append(event("sound", 3)),
            store.copy_prefix("x", "t", 1_999, branch_name="b"),
            store.copy_prefix("sound", "u", 3, branch_name="b"),
            store.append(event("u", 4)),
            return_exceptions=True,
        )
        assert [type(r) for r in results] == [type(None), StoreReadError, type(None), type(None)]
        assert results[1].execution_id == "x"  # type: ignore[union-attr]  # checked one line above
        assert await store.last_sequence("t") is None
        assert await store.branches.refs("x") == []
        page = await store.read_all(2_003)
        assert [(p.position, p.event.execution_id) for p in page] == [
            (2_004, "sound"),
            *((n, "u") for n in range(2_005, 2_010)),
        ]


async def test_a_disk_that_fills_up_during_a_copy_leaves_nothing_of_it(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 5_000))
        pages = foreign(path).pragma("page_count")
        await on_the_writer(store, f"PRAGMA max_page_count={pages + 20}")
        results = await asyncio.gather(
            store.append(event("y", 0)),
            store.copy_prefix("x", "t", 4_999, branch_name="b"),
            store.append(event("z", 0)),
            return_exceptions=True,
        )
        error = results[1]
        assert isinstance(error, StorageWriteError)
        assert (error.execution_id, error.sequence) == ("t", None)
        assert isinstance(error.__cause__, apsw.FullError)
        assert (results[0], results[2]) == (None, None)
        assert await store.last_sequence("t") is None
        assert await store.branches.refs("x") == []
        assert [p.position for p in await store.read_all(5_000)] == [5_001, 5_002]
        await on_the_writer(store, "PRAGMA max_page_count=1000000")
        await store.copy_prefix("x", "t", 4_999, branch_name="b")


@pytest.mark.parametrize(
    "change",
    [
        "body = 'text'",
        "body = 5",
        "body = x''",
        "checksum = 5",
        "checksum = ''",
        "schema_version = 2",
        "id = id + 1",
    ],
)
async def test_a_snapshot_row_that_is_not_as_it_was_written_is_found_out(path: Path, change: str) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 3))
        await save(store, log("x", 2))
        connection = foreign(path)
        connection.execute(f"UPDATE snapshots SET {change}")
        connection.close()
        snapshot = await store.snapshots.latest("x")
        assert snapshot is not None
        with pytest.raises(BadSnapshotError) as caught:
            state_of(snapshot)
        assert caught.value.execution_id == "x"
        assert len(await store.snapshots.verify()) == 1
        assert await store.fold("x") == fold_events(None, log("x", 3))


async def test_a_killed_writer_leaves_whole_copies_with_their_branches(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 3_000))
    process = start_program(
        """
        import asyncio, sys
        from loomfast import SqliteEventStore

        async def main():
            store = await SqliteEventStore.open(sys.argv[1])
            for n in range(10_000):
                await store.copy_prefix("x", f"t{n}", 2_999, branch_name=f"b{n}")
                print(n, flush=True)

        asyncio.run(main())
        """,
        path,
    )
    assert process.stdout is not None
    for _ in range(5):
        acknowledged = int(process.stdout.readline())
    process.kill()
    rest, _ = process.communicate()
    acknowledged = int((rest.split() or [acknowledged])[-1])
    async with await SqliteEventStore.open(path) as store:
        copies = (await store.list_executions(limit=100_000))[1:]
        assert acknowledged + 1 <= len(copies) <= acknowledged + 2
        for summary in copies:
            assert summary.last_sequence == 2_999
            assert len(await store.read(summary.execution_id)) == 3_000
        assert [b.execution_id for b in await store.branches.children("x")] == [s[0] for s in copies]
        with pytest.raises(BeyondLogError):
            await store.copy_prefix("x", "more", 3_000)
