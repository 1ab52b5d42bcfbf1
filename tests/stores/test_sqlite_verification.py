"""`verify_store` on SQLite files that were damaged behind the store's back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from loomfast.stores import SqliteEventStore

from .logs import event, log
from .programs import foreign
from .whole import fill, verify

ROW = "WHERE id = ((SELECT number FROM executions WHERE id = '{0}') << 32) + {1}"
OF = "(SELECT number FROM executions WHERE id = '{0}')"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            ["UPDATE events SET timestamp = 1 " + ROW.format("x", 7)],
            ["execution 'x', sequence 7: the row is not as it was written"],
        ),
        (
            ["UPDATE events SET timestamp = 1 " + ROW.format("x", n) for n in (3, 4, 5, 9)],
            [
                "execution 'x', sequences 3 to 5: the row is not as it was written",
                "execution 'x', sequence 9: the row is not as it was written",
            ],
        ),
        (
            ["DELETE FROM events " + ROW.format("x", 5)],
            ["execution 'x', sequence 5: the database holds a part of its log only"],
        ),
        (
            ["UPDATE executions SET status = 'completed' WHERE id = 'x'"],
            ["execution 'x': its status is listed as 'completed', its log says 'running'"],
        ),
        (
            ["UPDATE executions SET flow_id = 'other' WHERE id = 'x'"],
            ["execution 'x': its flow is listed as 'other', its log says 'guard'"],
        ),
        (
            ["UPDATE executions SET last_sequence = 10 WHERE id = 'x'"],
            [
                "execution 'x', sequence 11: the snapshot is of a sequence that the log does not hold",
                "execution 'x', sequence 11: stands behind the end of the log",
            ],
        ),
        (
            ["UPDATE executions SET last_sequence = 12 WHERE id = 'x'"],
            ["execution 'x', sequence 12: the database holds a part of its log only"],
        ),
        (
            ["UPDATE executions SET wake_at = 999 WHERE id = 'second'"],
            ["execution 'second': its gate wakes at 1000, and is not among those that are due then"],
        ),
        (
            ["UPDATE executions SET wake_at = NULL WHERE id = 'first'"],
            ["execution 'first': its gate wakes at 1000, and is not among those that are due then"],
        ),
        (
            ["UPDATE executions SET wake_at = 5 WHERE id = 'x'"],
            ["execution 'x': is due at 5, and no gate of its wakes then"],
        ),
        (
            ["UPDATE snapshots SET body = '{}' " + ROW.format("x", 8)],
            ["execution 'x', sequence 8: bad snapshot: checksum: "],
        ),
        (
            ["UPDATE snapshots SET body = '{}' " + ROW.format("cut", 8)],
            ["execution 'cut', sequence 8: bad snapshot: checksum: "],
        ),
        (
            ["DELETE FROM snapshots WHERE id >> 32 = " + OF.format("cut") + " AND id & 15 > 4"],
            ["execution 'cut': what lies before sequence 7 was truncated, and no sound snapshot has it"],
        ),
        (
            ["UPDATE branches SET cut = 99 WHERE name = 'what-if'"],
            ["execution 'fork': branch 'what-if' of 'x': 'x' has no sequence 99"],
        ),
        (
            ["UPDATE branches SET parent = 77 WHERE name = 'deeper'"],
            ["the store: table branches: 1 rows name no execution, the first of them 77"],
        ),
        (
            ["UPDATE executions SET number = 77 WHERE id = 'third'"],
            [
                "the store: table events: 4 rows name no execution, the first of them 5",
                "execution 'third', sequences 0 to 3: the database holds a part of its log only",
                "the store: in the total order: position 32: the event belongs to no execution",
                "the store: in the total order: position 33: the event belongs to no execution",
                "the store: in the total order: position 34: the event belongs to no execution",
                "the store: in the total order: position 35: the event belongs to no execution",
            ],
        ),
    ],
)
async def test_damage_to_a_database_is_found_and_named(
    path: Path, damage: list[str], expected: list[str]
) -> None:
    async with await SqliteEventStore.open(path) as store:
        await fill(store)
        assert (await verify(store))[0] == []
        connection = foreign(path)
        for sql in damage:
            connection.execute(sql)
            assert connection.changes() == 1 or "snapshots WHERE" in sql
        connection.close()
        faults, counts = await verify(store)
        assert len(faults) == len(expected), faults
        for fault, start in zip(faults, expected, strict=True):
            assert fault.startswith(start)
        assert counts.executions == 8


def _redefine(path: Path, sql: str) -> None:
    connection = foreign(path)
    connection.execute("PRAGMA writable_schema=ON")
    connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = 'events_by_position'", (sql,))
    connection.close()


def _without_an_index_entry(path: Path) -> str:
    whole = "CREATE UNIQUE INDEX events_by_position ON events (position)"
    _redefine(path, f"{whole} WHERE position <> 9")
    connection = foreign(path)
    connection.execute("REINDEX events_by_position")
    connection.close()
    _redefine(path, whole)
    return "missing from index events_by_position"


def _with_a_damaged_page(path: Path) -> str:
    connection = foreign(path)
    (page,) = connection.execute("SELECT max(pageno) FROM dbstat WHERE name = 'events'").fetchone()
    connection.close()
    with open(path, "r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)
    return f"page {page}"


@pytest.mark.parametrize("harm", [_without_an_index_entry, _with_a_damaged_page])
async def test_damage_below_the_rows_is_found_by_the_storage_itself(
    path: Path, harm: Callable[[Path], str]
) -> None:
    async with await SqliteEventStore.open(path) as store:
        await fill(store)
    said = harm(path)
    async with await SqliteEventStore.open(path) as store:
        faults, counts = await verify(store)
        assert any(fault.startswith("the store: ") and said in fault for fault in faults), faults
        assert counts.executions == 8


async def test_what_is_appended_meanwhile_is_no_fault(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await fill(store)

        async def busy() -> None:
            for n in range(12, 400):
                await store.append(event("x", n))
            resumed = event("second", 5, "EXECUTION_RESUMED", {"gate": 0, "on": "timer"})
            await store.append_batch([event("second", 4, "timer"), resumed, *log("late", 5)])

        writing = asyncio.create_task(busy())
        while not writing.done():
            assert (await verify(store))[0] == []
        await writing
        assert (await verify(store))[0] == []
