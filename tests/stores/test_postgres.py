"""What only the PostgreSQL store promises: long texts, closing, forks, and what is kept beside the logs."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import pytest

from loomfast._core.snapshots import snapshot_of
from loomfast._errors import BadInputError, StorageWriteError, StoreClosedError, UnknownExecutionError
from loomfast._kernels import fold_events
from loomfast.stores import Lease, PostgresEventStore, Recovery, ScheduleRow, Wake
from loomfast.stores import _postgres_reader as reader
from loomfast.stores import _postgres_timers as timers
from loomfast.stores._postgres_connections import AnyConnection
from loomfast.testing.postgres import PostgresServer

from .conftest import OpenPostgres
from .logs import event, log
from .programs import on_the_server, run_program
from .test_postgres_order import held

LONG = "long \x00\ud800" * 5_000

# --- texts and pages -----------------------------------------------------------------------------


async def test_a_text_longer_than_an_index_takes_is_an_id_like_any_other(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as store:
        other = LONG + "!"
        await store.append_batch([*log(LONG, 3), event(other, 0), event(LONG[:512], 0)])
        assert await store.read(LONG) == log(LONG, 3)
        assert await store.last_sequence(other) == 0
        assert [s.execution_id for s in await store.list_executions()] == [LONG, other, LONG[:512]]
        assert [p.event.execution_id for p in await store.read_all(2)] == [LONG, other, LONG[:512]]
        await store.copy_prefix(LONG, "copy", 1, branch_name=LONG)
        branch = await store.branches.get(LONG, LONG)
        assert branch is not None
        assert (branch.name, branch.origin_id, branch.execution_id) == (LONG, LONG, "copy")
        lease = await store.leases.acquire(LONG, LONG, 60)
        assert await store.leases.get(LONG) == lease
        schedule = await store.timers.put(ScheduleRow(LONG, b"{}", 5))
        assert await store.timers.list() == [schedule]
        await store.recoveries.put(Recovery(LONG, 1, 1, False, LONG))
        assert await store.recoveries.list() == [Recovery(LONG, 1, 1, False, LONG)]


async def test_a_long_log_is_read_in_pages_bounded_in_events_and_bytes(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    weigh = reader.Pages.weigh
    monkeypatch.setattr(
        reader.Pages, "weigh", lambda pages, rows: (sizes.append(len(rows)), weigh(pages, rows))[1]
    )
    async with await open_postgres() as store:
        small = log("small", 6_000)
        large = [event("large", n, payload="x" * 400_000 if n else None) for n in range(30)]
        await store.append_batch(small)
        for one in large:
            await store.append(one)
        assert await store.read("small") == small
        assert sizes == [256, 1_024, 2_000, 2_000, 720]
        sizes.clear()
        assert await store.fold("small", fold_events(None, small[:10])) == fold_events(None, small)
        assert sum(sizes) == 5_990
        monkeypatch.setattr(reader, "FIRST_PAGE", 2)
        sizes.clear()
        assert await store.read("large") == large
        assert max(sizes) <= 10
        sizes.clear()
        assert [p.event for p in await store.read_all(6_000)] == large
        assert max(sizes) <= 10
        assert [p.position for p in await store.read_all(5_990, limit=15)] == list(range(5_991, 6_006))


async def test_a_log_cut_between_two_pages_is_not_read_with_a_hole(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "FIRST_PAGE", 4)
    monkeypatch.setattr(reader, "LARGEST_PAGE", 4)
    async with await open_postgres() as store:
        events = log("x", 40)
        await store.append_batch(events)
        await store.snapshots.save(snapshot_of(fold_events(None, events[:31])))
        page = reader._page

        async def cut_after_the_first(*arguments: Any) -> Any:
            rows = await page(*arguments)
            await store.truncate_prefix("x", 30)
            return rows

        monkeypatch.setattr(reader, "_page", cut_after_the_first)
        with pytest.raises(Exception, match="sequence 4") as caught:
            await store.read("x")
        assert type(caught.value).__name__ == "PrefixTruncatedError"
        assert await store.read_from("x", 30) == events[30:]


async def test_the_event_loop_stays_responsive_while_large_logs_are_written_and_read(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres() as store:
        batch = log("x", 20_000)
        gaps: list[float] = []

        async def tick() -> None:
            last = time.monotonic()
            while True:
                await asyncio.sleep(0.005)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        ticking = asyncio.create_task(tick())
        await store.append_batch(batch)
        await store.fold("x")
        await store.read_all(limit=20_000)
        ticking.cancel()
        assert sorted(gaps)[len(gaps) * 9 // 10] < 0.1


# --- closing and forking -------------------------------------------------------------------------


async def test_closing_finishes_reads_and_writes_of_every_kind(open_postgres: OpenPostgres) -> None:
    store = await open_postgres(pool_size=1)
    await store.append_batch(log("x", 3_000))
    calls = [
        asyncio.create_task(call)
        for call in (
            store.append(event("x", 3_000)),
            store.copy_prefix("x", "y", 2_000),
            store.read("x"),
            store.read_all(limit=3_000),
            store.leases.acquire("k", "o", 60),
            store.fold("x"),
        )
    ]
    await asyncio.sleep(0)
    await asyncio.gather(store.close(), store.close())
    results = await asyncio.gather(*calls)
    assert len(results[2]) >= 3_000
    for call in (store.read("x"), store.leases.get("k"), store.timers.list(), store.snapshots.list("x")):
        with pytest.raises(StoreClosedError):
            await call
    with pytest.raises(StoreClosedError):
        store.watch("x", lambda: None)
    async with await open_postgres() as again:
        assert await again.last_sequence("y") == 2_000


async def test_a_store_whose_event_loop_has_ended_is_closed_for_others(open_postgres: OpenPostgres) -> None:
    opened: list[Any] = []

    async def open_there() -> None:
        opened.append(await open_postgres())
        opened[0]._writer.terminate()  # what else would complain of its loop's end

    thread = threading.Thread(target=lambda: asyncio.run(open_there()))
    thread.start()
    await asyncio.to_thread(thread.join)
    (store,) = opened
    for call in (store.append(event("x", 0)), store.read("x"), store.leases.get("x")):
        with pytest.raises(StoreClosedError, match="event loop"):
            await call
    with pytest.raises(StoreClosedError, match="event loop"):
        store.watch("x", lambda: None)
    await store.close()


@pytest.mark.parametrize("begun", [True, False])
async def test_who_waits_on_another_event_loop_is_told_when_the_stores_ends(
    open_postgres: OpenPostgres, begun: bool
) -> None:
    here = asyncio.get_running_loop()
    opened: asyncio.Future[PostgresEventStore] = here.create_future()
    asked = threading.Event()

    async def open_there() -> None:
        store = await open_postgres()
        await store.last_sequence("x")
        here.call_soon_threadsafe(opened.set_result, store)
        if not begun:
            asked.wait()  # and leave the calls no turn of this loop
        else:
            await asyncio.to_thread(asked.wait)
            while store._writer._queue or not store._writes:
                await asyncio.sleep(0.01)
        store._writer.terminate()  # what else would complain of its loop's end
        store._connections._pool.terminate()

    thread = threading.Thread(target=lambda: asyncio.run(open_there()))
    async with await open_postgres() as other, held(other, event("slow", 0)):
        thread.start()
        store = await opened
        lasting = store._write(None, lambda connection: connection.execute("SELECT lock_log()"), repeat=True)
        calls = [asyncio.create_task(call) for call in (store.append(event("slow", 0)), lasting)]
        await asyncio.sleep(0)
        asked.set()
        appended, written = await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.to_thread(thread.join)
    assert isinstance(written, StoreClosedError)
    if begun:
        assert isinstance(appended, StorageWriteError)
        assert (appended.execution_id, appended.doubtful) == ("slow", True)
    else:
        assert isinstance(appended, StoreClosedError)
    await store.close()


async def test_a_store_that_was_never_closed_is_reported_and_drops_its_connections(
    open_postgres: OpenPostgres, postgres_server: PostgresServer
) -> None:
    store = await open_postgres()
    await store.append(event("x", 0))
    await store.last_sequence("x")
    writer = store._writer
    with pytest.warns(ResourceWarning, match="never closed"):
        del store
    await asyncio.sleep(0)
    assert writer._connection is not None
    assert writer._connection.is_closed()


def test_a_forked_child_is_refused_and_closes_nothing_of_its_parents(
    postgres_server: PostgresServer, new_schema: str
) -> None:
    program = """
        import asyncio, gc, os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from loomfast._errors import StoreClosedError
        from loomfast._kernels import Envelope
        from loomfast.stores import PostgresEventStore

        START = {"flowId": "f", "flowVersion": "1", "input": None}

        async def main(dsn, schema):
            store = await PostgresEventStore.open(dsn, schema=schema)
            await store.append(Envelope.make("x", 0, "EXECUTION_STARTED", START, 1))
            await store.last_sequence("x")
            child = os.fork()
            if child == 0:
                refused = 0
                for call in (store.append(Envelope.make("x", 1, "note", None, 1)), store.read("x"),
                             store.acquire_fence("x"), store.leases.get("x"), store.timers.list()):
                    try:
                        await call
                    except StoreClosedError:
                        refused += 1
                await store.close()
                connections = store._connections, store._writer
                del store, call
                gc.collect()
                del connections
                gc.collect()
                os._exit(refused)
            _, status = os.waitpid(child, 0)
            print("refused", os.waitstatus_to_exitcode(status))
            await store.append(Envelope.make("x", 1, "note", None, 1))
            print("last", await store.last_sequence("x"))
            await store.close()

        asyncio.run(main(*sys.argv[1:]))
    """
    said = run_program(program, postgres_server.dsn, new_schema, timeout_s=60)
    assert said.split() == ["refused", "5", "last", "1"]


# --- leases, recoveries, timers ------------------------------------------------------------------


async def test_leases_are_judged_by_the_servers_clock_whatever_the_holders_say(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await open_postgres() as one, await open_postgres() as two:
        monkeypatch.setattr(time, "time", lambda: 0.0)
        monkeypatch.setattr(time, "time_ns", lambda: 0)
        now = await one._read(None, lambda c: c.fetchval("SELECT now_ms()"))
        lease = await one.leases.acquire("x", "a", 30)
        assert lease is not None
        assert now + 30_000 <= lease.expires_ms < now + 60_000
        assert await two.leases.acquire("x", "b", 30) is None
        assert await two.leases.get("x") == lease
        on_the_server(one, "UPDATE leases SET expires_ms = now_ms() - 1")  # as if 30 s had passed
        assert await one.leases.get("x") is None
        assert await one.leases.renew([lease], 30) == []
        taken = await two.leases.acquire("x", "b", 30)
        assert taken is not None
        assert taken.token > lease.token
        await one.leases.release([lease])
        assert await one.leases.get("x") == taken


async def test_of_many_who_want_a_lease_one_gets_it_and_tokens_never_repeat(
    open_postgres: OpenPostgres,
) -> None:
    stores = [await open_postgres() for _ in range(4)]
    tokens: list[int] = []
    for _ in range(10):
        found = await asyncio.gather(
            *(store.leases.acquire("x", f"o{k}-{n}", 60) for n, store in enumerate(stores) for k in range(5))
        )
        (lease,) = [one for one in found if one is not None]
        tokens.append(lease.token)
        again = await stores[0].leases.acquire("x", lease.owner, 60)
        assert again is not None
        tokens.append(again.token)
        assert await stores[1].leases.renew([lease], 60) == []  # its older token is void
        (renewed,) = await stores[1].leases.renew([again, Lease("y", "o", 1, 0)], 600)
        assert renewed.expires_ms > again.expires_ms + 300_000
        await stores[2].leases.release([again, lease])
    assert tokens == sorted(set(tokens))
    for key, owner, ttl_s in (("", "o", 1.0), ("k", "", 1.0), ("k", "o", 0.0), ("k", "o", float("nan"))):
        with pytest.raises(BadInputError):
            await stores[0].leases.acquire(key, owner, ttl_s)
    for store in stores:
        await store.close()


async def test_accounts_of_crashes_are_replaced_whole_and_listed_when_set_aside(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres() as store:
        await store.acquire_fence("fenced")
        await store.append_batch([event(f"x{n}", 0) for n in range(6)])
        for unknown in ("nobody", "fenced"):
            with pytest.raises(UnknownExecutionError):
                await store.recoveries.put(Recovery(unknown, 1, 1, False, None))
            with pytest.raises(UnknownExecutionError):
                await store.recoveries.list(after=unknown)
        accounts = [
            Recovery(f"x{n}", n, n + 1, n % 2 == 0, None if n == 3 else f"w\x00{n}") for n in range(6)
        ]
        for account in reversed(accounts):
            await store.recoveries.put(account._replace(crashes=99))
            await store.recoveries.put(account)
            assert await store.recoveries.get(account.execution_id) == account
        aside = [account for account in accounts if account.set_aside is not None]
        assert await store.recoveries.list(limit=2) == aside[:2]
        assert await store.recoveries.list(after="x1") == aside[2:]
        assert await store.recoveries.delete("x4")
        assert not await store.recoveries.delete("x4")
        assert await store.recoveries.get("x4") is None


async def test_gates_with_a_time_are_due_from_their_suspension_until_their_answer_or_the_end(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres() as store:
        for n in range(6):
            gate = {"gate": 0, "on": "go", **({"wakeAt": 100 * (n // 2)} if n < 5 else {})}
            await store.append_batch([event(f"x{n}", 0), event(f"x{n}", 1, "EXECUTION_SUSPENDED", gate)])
        due = [Wake("x0", 0), Wake("x1", 0), Wake("x2", 100), Wake("x3", 100), Wake("x4", 200)]
        assert await store.timers.due_wakes(2**70) == due
        assert await store.timers.due_wakes(100) == due[:4]
        assert await store.timers.due_wakes(200, after=due[2], limit=1) == due[3:4]
        assert await store.timers.due_wakes(-1) == []
        await store.append(event("x1", 2, "EXECUTION_RESUMED", {"gate": 0, "on": "go"}))
        await store.append(event("x2", 2, "EXECUTION_CANCELLED", {"reason": None}))
        assert await store.timers.due_wakes(200) == [due[0], *due[3:]]
        await store.copy_prefix("x4", "copy", 1)
        assert await store.timers.due_wakes(200, after=due[3]) == [due[4], Wake("copy", 200)]


async def test_what_is_due_and_what_is_parked_are_pages_of_an_index(
    open_postgres: OpenPostgres,
) -> None:  # guarantee 23
    parked = [f"x{n}" for n in range(2_000)]
    gate = {"gate": 0, "on": "timer", "wakeAt": 1_000}
    async with await open_postgres() as store:
        await store.append_batch([event(execution_id, 0) for execution_id in parked])
        await store.append_batch([event(name, 1, "EXECUTION_SUSPENDED", gate) for name in parked])
        await store._read(None, lambda connection: connection.execute("ANALYZE executions"))
        for index, sql, values in (
            ("executions_by_wake", timers._WAKES, (1_000, 1_000, 1_500, 10)),
            ("executions_by_status", reader._LIST_STATUS, (1_500, 10, "suspended")),
        ):
            lines = await store._read(None, partial(explained, sql=sql, values=values))
            plan = "\n".join(line[0] for line in lines)
            assert f"Index Scan using {index}" in plan, plan
            assert "Filter" not in plan, plan
            assert "Sort" not in plan, plan


async def explained(connection: AnyConnection, sql: str, values: tuple[object, ...]) -> list[Any]:
    """The lines of a query's plan, with what it came to."""
    lines: list[Any] = await connection.fetch("EXPLAIN ANALYZE " + sql, *values)
    return lines


async def test_of_two_that_change_one_version_of_a_schedule_one_succeeds(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as one, await open_postgres() as two:
        first = ScheduleRow("s\x00", b"{}", 100)
        results = await asyncio.gather(*(store.timers.put(first) for store in (one, two) * 5))
        (kept,) = [result for result in results if result is not None]
        assert kept == first._replace(version=kept.version)
        results = await asyncio.gather(
            *(store.timers.put(kept._replace(next_ms=n)) for n, store in enumerate((one, two) * 5))
        )
        (changed,) = [result for result in results if result is not None]
        assert changed.version > kept.version
        assert await one.timers.get("s\x00") == changed
        for n, name in enumerate(("b", "\ud800", "é", "a")):
            await one.timers.put(ScheduleRow(name, b"\x00\xff", None if name == "b" else n))
        names = [schedule.schedule_id for schedule in await two.timers.list()]
        assert names == sorted(names)
        assert [s.schedule_id for s in await two.timers.list(after="a", limit=2)] == names[1:3]
        assert [s.schedule_id for s in await two.timers.due_schedules(2)][-1] == "é"
        assert await two.timers.delete("a")
        assert not await two.timers.delete("a")
        with pytest.raises(BadInputError):
            await one.timers.put(ScheduleRow("", b"{}", None))
