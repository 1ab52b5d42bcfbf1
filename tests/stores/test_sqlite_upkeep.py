"""What only the SQLite store promises of leases, accounts of crashes and timers: its file and its clock."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import apsw
import pytest

from loomfast.stores import Lease, Recovery, ScheduleRow, SqliteEventStore, Wake
from loomfast.stores import _sqlite_reader as reader
from loomfast.stores import _sqlite_schema as schema
from loomfast.stores import _sqlite_timers as timers
from loomfast.stores._sqlite_migrations import MIGRATIONS

from .logs import event, log
from .programs import foreign

RECORDED = Path(__file__).parent / "data"
ODD = "\ud800"


async def test_a_database_of_schema_version_2_learns_from_its_logs_when_gates_wake(path: Path) -> None:
    shutil.copy(RECORDED / "schema-2.sqlite", path)
    async with await SqliteEventStore.open(path, create=False) as store:
        # "cut" no longer holds its suspension: a snapshot does. "damaged" has one that cannot be trusted.
        due = [Wake("cut", 1_000), Wake(ODD, 1_500), Wake("sleeping", 2_000)]
        assert await store.timers.due_wakes(2**63) == due
        await store.append_batch(
            [
                event("sleeping", 5, "timer"),
                event("sleeping", 6, "EXECUTION_RESUMED", {"gate": 0, "on": "timer"}),
            ]
        )
        assert await store.timers.due_wakes(2**63) == due[:2]


async def test_tokens_go_on_after_a_restart_whatever_was_released(path: Path) -> None:  # guarantee 19
    async with await SqliteEventStore.open(path) as store:
        first = await store.leases.acquire("job", "node-a", 30)
        assert first is not None
        await store.leases.release([first])
    async with await SqliteEventStore.open(path) as store:
        second = await store.leases.acquire("job", "node-b", 30)
        assert second is not None
        assert second.token > first.token


async def test_leases_run_out_by_the_clock_that_was_injected(path: Path) -> None:  # guarantee 20
    now = 1_000
    async with await SqliteEventStore.open(path, now_ms=lambda: now) as store:
        held = await store.leases.acquire(ODD, "\udfff", 0.5)
        assert held == Lease(ODD, "\udfff", 1, 1_500)
        now = 1_499
        assert await store.leases.acquire(ODD, "node-b", 0.5) is None
        assert await store.leases.renew([held], 1) == [held._replace(expires_ms=2_499)]
        now = 2_499
        assert await store.leases.get(ODD) is None
        assert await store.leases.renew([held], 1) == []
        taken = await store.leases.acquire(ODD, "node-b", 0.5)
        assert taken == Lease(ODD, "node-b", 2, 2_999)
        await store.leases.release([held])
        assert await store.leases.get(ODD) == taken


async def test_of_two_stores_on_one_file_one_gets_the_lease(path: Path) -> None:  # guarantee 19
    async with await SqliteEventStore.open(path) as one, await SqliteEventStore.open(path) as other:
        for n in range(20):
            got = await asyncio.gather(
                one.leases.acquire(f"job-{n}", "one", 30), other.leases.acquire(f"job-{n}", "other", 30)
            )
            assert sum(lease is not None for lease in got) == 1


async def test_accounts_and_schedules_survive_a_restart(path: Path) -> None:  # guarantees 22 and 24
    account = Recovery("x", 2, 5, True, "it kills its process \ud800")
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 2))
        await store.recoveries.put(account._replace(crashes=1, set_aside=None))
        await store.recoveries.put(account)
        schedule = await store.timers.put(ScheduleRow("nightly", b"{}", 5))
        assert schedule == ScheduleRow("nightly", b"{}", 5, 1)
        assert await store.timers.put(ScheduleRow("nightly", b"[]", 6)) is None
    async with await SqliteEventStore.open(path) as store:
        assert await store.recoveries.get("x") == account
        assert await store.recoveries.list() == [account]
        assert await store.timers.due_schedules(5) == [schedule]
        assert await store.timers.due_schedules(4) == []
        assert await store.recoveries.delete("x")
        assert await store.timers.delete("nightly")
        assert (await store.recoveries.list(), await store.timers.list()) == ([], [])


async def test_schedules_of_an_older_database_get_versions_newer_than_all_it_gave(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to schema version 4 each schedule counted by itself, and began at 1 again when it was put anew."""
    monkeypatch.setattr(schema, "MIGRATIONS", MIGRATIONS[:4])
    async with await SqliteEventStore.open(path):
        pass
    connection = foreign(path)
    connection.executemany(
        "INSERT INTO schedules (id, body, next_ms, version) VALUES (?, ?, ?, ?)",
        [(b"often", b"[1]", 5, 7), (ODD.encode("utf-8", "surrogatepass"), b"[2]", None, 1)],
    )
    connection.close()
    monkeypatch.undo()
    async with await SqliteEventStore.open(path) as store:
        often, odd = await store.timers.list()
        assert often == ScheduleRow("often", b"[1]", 5, often.version)
        assert odd == ScheduleRow(ODD, b"[2]", None, odd.version)
        assert often.version > 7
        assert await store.timers.put(odd._replace(version=1)) is None
        assert await store.timers.delete("often")
        assert await store.timers.delete(ODD)
        again = await store.timers.put(ScheduleRow("often", b"[3]", 5))
        assert again is not None
        assert again.version > max(often.version, odd.version)


async def test_ids_of_schedules_sort_by_code_point(path: Path) -> None:
    ids = ["", "a", "a\x00b", "é", ODD, "\ue000", "\U0001f600"]
    async with await SqliteEventStore.open(path) as store:
        for schedule_id in reversed(ids[1:]):
            await store.timers.put(ScheduleRow(schedule_id, b"{}", None))
        assert [s.schedule_id for s in await store.timers.list()] == ids[1:] == sorted(ids[1:])
        for n, schedule_id in enumerate(ids):
            page = await store.timers.list(after=schedule_id, limit=1)
            assert [s.schedule_id for s in page] == ids[n + 1 : n + 2]


async def test_what_is_due_is_read_from_an_index_in_order(path: Path) -> None:  # guarantee 23
    suspended = {"gate": 0, "on": "timer"}
    async with await SqliteEventStore.open(path) as store:
        for n in range(50):
            gate = suspended if n % 2 else {**suspended, "wakeAt": 1_000 - n % 5}
            await store.append_batch([event(f"x{n}", 0), event(f"x{n}", 1, "EXECUTION_SUSPENDED", gate)])
        everything = await store.timers.due_wakes(1_000)
        assert len(everything) == 25
        assert [w.wake_at for w in everything] == sorted(w.wake_at for w in everything)
        paged: list[Wake] = []
        while page := await store.timers.due_wakes(1_000, after=paged[-1] if paged else None, limit=4):
            paged += page
        assert paged == everything
    connection = foreign(path)
    for sql, values in ((timers._WAKES, (0, 0, "x", 1)), (timers._DUE, (0, 0, b"", 1))):
        plan = " ".join(row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + sql, values))
        assert "USING" in plan, plan
        assert "SCAN" not in plan, plan
        assert "INDEX executions_by_wake (wake_at" in plan or "INDEX schedules_by_next ((next_ms" in plan, (
            plan
        )
        assert "TEMP B-TREE" not in plan, plan
    connection.close()


async def test_a_page_of_what_is_due_at_one_instant_costs_the_same_at_the_front_and_at_the_end(
    path: Path,
) -> None:  # guarantee 23
    parked = 2_000
    async with await SqliteEventStore.open(path) as store:
        await park(store, parked, {"gate": 0, "on": "timer", "wakeAt": 1_000})
        assert len(await store.timers.due_wakes(1_000, limit=parked + 1)) == parked
    connection = foreign(path)
    steps = [
        instructions(connection, timers.read_wakes, 1_000, after, 10)
        for after in (Wake("x9", 1_000), Wake(f"x{parked - 20}", 1_000))
    ]
    connection.close()
    assert steps[0] == pytest.approx(steps[1], rel=0.1)


async def test_a_page_of_the_listing_costs_the_same_at_the_front_and_at_the_end(path: Path) -> None:
    parked = 2_000
    async with await SqliteEventStore.open(path) as store:
        await park(store, parked, {"gate": 0, "on": "go"})
        assert len(await store.list_executions(status="suspended", limit=parked + 1)) == parked
    connection = foreign(path)
    for status in (None, "suspended"):
        steps = [
            instructions(connection, reader.list_executions, status, after, 10) for after in (0, parked - 10)
        ]
        assert steps[0] == pytest.approx(steps[1], rel=0.1)
    connection.close()


async def park(store: SqliteEventStore, count: int, gate: dict[str, object]) -> None:
    executions = [f"x{n}" for n in range(count)]
    await store.append_batch([event(name, 0) for name in executions])
    await store.append_batch([event(name, 1, "EXECUTION_SUSPENDED", gate) for name in executions])


def instructions(connection: apsw.Connection, query: Callable[..., Sequence[object]], *values: object) -> int:
    """How many of SQLite's instructions it takes to read a page of 10."""
    count = 0

    def step() -> bool:
        nonlocal count
        count += 1
        return False

    query(connection, *values)  # the first on a connection reads the schema
    connection.set_progress_handler(step, 1)
    assert len(query(connection, *values)) == 10
    connection.set_progress_handler(None)
    return count
