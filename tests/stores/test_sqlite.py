"""What only the SQLite store promises: its file, its errors, its threads."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import apsw
import pytest

from loomfast._errors import (
    DuplicateSequenceError,
    StaleFenceError,
    StorageWriteError,
    StoreBusyError,
    StoreClosedError,
    StoreReadError,
)
from loomfast._kernels import Envelope, fold_events
from loomfast.stores import SqliteEventStore

from .logs import GATED, event, log
from .programs import foreign, run_program

# --- locks ---------------------------------------------------------------------------------------


async def test_an_append_waits_for_a_foreign_lock_and_the_loop_does_not(path: Path) -> None:
    async with (
        await SqliteEventStore.open(path) as store,
        await SqliteEventStore.open(path.with_name("other.db")) as other,
    ):
        await store.append(event("x", 0))
        holder = foreign(path)
        holder.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(store.append(event("x", 1)))
        gaps: list[float] = []
        last = start = time.monotonic()
        while time.monotonic() - start < 1:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            gaps.append(now - last)
            last = now
            assert len(await store.read("x")) == 1
        await other.append(event("elsewhere", 0))
        assert not waiting.done()
        holder.execute("ROLLBACK")
        holder.close()
        await waiting
        assert await store.last_sequence("x") == 1
        assert sorted(gaps)[len(gaps) * 95 // 100] < 0.05
        assert max(gaps) < 0.25


async def test_a_lock_held_too_long_is_an_error_that_names_the_write_and_can_be_repeated(path: Path) -> None:
    async with await SqliteEventStore.open(path, busy_timeout_ms=30) as store:
        await store.append_batch(log("x", 3))
        holder = foreign(path)
        holder.execute("BEGIN IMMEDIATE")
        results = await asyncio.gather(
            store.append_batch(log("x", 2, first=3)),
            store.append(event("y", 0)),
            store.acquire_fence("z"),
            return_exceptions=True,
        )
        assert all(isinstance(result, StoreBusyError) for result in results)
        named = [(r.execution_id, r.sequence) for r in results if isinstance(r, StoreBusyError)]
        assert named == [("x", 3), ("y", 0), ("z", None)]
        assert "locked" in str(results[0])
        assert len(await store.read_all()) == 3
        holder.execute("ROLLBACK")
        holder.close()
        await store.append_batch(log("x", 2, first=3))
        assert await store.acquire_fence("z") == 1


async def test_opening_a_locked_database_that_must_be_migrated_gives_up_in_time(path: Path) -> None:
    holder = foreign(path)
    holder.execute("PRAGMA journal_mode=WAL")
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusyError):
        await SqliteEventStore.open(path, busy_timeout_ms=20)
    holder.close()
    await (await SqliteEventStore.open(path)).close()


async def test_a_caller_cancelled_while_the_store_is_locked_returns_at_once(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append(event("x", 0))
        holder = foreign(path)
        holder.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(store.append_batch(log("x", 4, first=1)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(waiting), 1)
        holder.execute("ROLLBACK")
        holder.close()
        await store.append(event("y", 0))  # queued behind it, so the cancelled write is over now
        assert len(await store.read("x")) in (1, 5)


async def test_what_another_connection_writes_is_respected(path: Path) -> None:
    async with await SqliteEventStore.open(path) as one, await SqliteEventStore.open(path) as two:
        await one.append(event("x", 0))
        await two.append(event("x", 1))
        with pytest.raises(DuplicateSequenceError):
            await one.append(event("x", 1))
        token = await two.acquire_fence("x")
        with pytest.raises(StaleFenceError):
            await one.append(event("x", 2))
        await one.append(event("x", 2, fence=token))
        await two.append(event("y", 0))
        await one.append(event("z", 0))
        assert [p.position for p in await two.read_all()] == [1, 2, 3, 4, 5]
        assert [s.execution_id for s in await two.list_executions()] == ["x", "y", "z"]


# --- failing writes and damaged rows -------------------------------------------------------------


async def test_a_full_disk_is_reported_to_those_it_hits_and_the_rest_goes_on(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 3))
        pages = foreign(path).execute("PRAGMA page_count").fetchone()[0]
        await _on_the_writer(store, f"PRAGMA max_page_count={pages + 60}")
        big = event(
            "big", 0, "EXECUTION_STARTED", {"flowId": "f", "flowVersion": "1", "input": "x" * 900_000}
        )
        results = await asyncio.gather(
            store.append(event("before", 0)),
            store.append(big),
            store.append_batch(log("after", 2)),
            return_exceptions=True,
        )
        assert results[0] is None
        assert results[2] is None
        error = results[1]
        assert isinstance(error, StorageWriteError)
        assert not isinstance(error, StoreBusyError)
        assert (error.execution_id, error.sequence) == ("big", 0)
        assert isinstance(error.__cause__, apsw.FullError)
        assert await store.read("big") == []
        assert [p.position for p in await store.read_all()] == list(range(1, 7))


async def test_a_value_that_sqlite_cannot_hold_fails_its_caller_alone(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        impossible = Envelope("bad", 0, "note", b"null", 2**70)
        results = await asyncio.gather(
            store.append(event("x", 0)),
            store.append(impossible),
            store.append(event("y", 0)),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [type(None), StorageWriteError, type(None)]
        assert (await store.list_executions())[-1].execution_id == "y"


async def test_a_file_that_cannot_be_written_is_a_write_error_and_reads_go_on(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append(event("x", 0))
        await _on_the_writer(store, "PRAGMA query_only=ON")
        with pytest.raises(StorageWriteError) as caught:
            await store.append(event("x", 1))
        assert isinstance(caught.value.__cause__, apsw.ReadOnlyError)
        assert (caught.value.execution_id, caught.value.sequence) == ("x", 1)
        assert len(await store.read("x")) == 1


async def _on_the_writer(store: SqliteEventStore, sql: str) -> None:
    """Run a statement on the writer's own connection, in its thread."""
    from loomfast.stores import _sqlite_writer as writer

    class Judged(writer.AcquireFence):
        __slots__ = ()

    original = writer.Ledger.commit

    def commit(ledger: Any, calls: list[Any], deadline: float) -> list[tuple[Any, Any]]:
        if isinstance(calls[0], Judged):
            ledger.connection.execute(sql)
            return [(calls[0], None)]
        return original(ledger, calls, deadline)

    writer.Ledger.commit = commit  # type: ignore[method-assign]  # undone below
    try:
        await store._ask(store._writer, None, Judged(""))
    finally:
        writer.Ledger.commit = original  # type: ignore[method-assign]  # as it was


@pytest.mark.parametrize(
    "change",
    [
        "body = CAST(replace(CAST(body AS TEXT), '1', '2') AS BLOB)",
        "body = 'text'",
        "body = 5",
        "coded = coded + (1 << 32)",
        "coded = coded + 1",
        "coded = ~coded",
        "coded = 'x'",
        "timestamp = timestamp + 1",
        "stamp = 5",
        "subject = 'other'",
        "subject = NULL",
        "subject = 5",
        "fence = 9",
        "extra = x'7b7d'",
        "checksum = checksum + 1",
    ],
)
async def test_a_row_that_is_not_as_it_was_written_is_found_and_named(path: Path, change: str) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch([*log("x", 3), *log("sound", 3)])
        connection = foreign(path)
        connection.execute(f"UPDATE events SET {change} WHERE id = (1 << 32) + 1")
        connection.close()
        with pytest.raises(StoreReadError, match=r"'x', sequence 1") as caught:
            await store.read("x")
        assert caught.value.execution_id == "x"
        assert await store.read("sound") == log("sound", 3)
        assert await store.fold("sound") == fold_events(None, log("sound", 3))


@pytest.mark.parametrize(
    "change",
    [
        "coded = coded + (1 << 32)",
        "coded = coded + 1",
        "coded = ~coded",
        "coded = 'x'",
        "stamp = 5",
        "subject = 'b'",
        "subject = 5",
        "body = body || ' '",
        "body = 5",
    ],
)
@pytest.mark.parametrize("sequence", [1, 2, 3, 7])
async def test_a_fold_finds_damage_of_what_it_reads_and_names_it(
    path: Path, change: str, sequence: int
) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch([*GATED, *log("sound", 3)])
        connection = foreign(path)
        connection.execute(f"UPDATE events SET {change} WHERE id = (1 << 32) + ?", (sequence,))
        connection.close()
        unread = GATED[sequence].stamp is not None and change.startswith(("subject", "body"))
        if unread:  # a stamped emit counts by its stamp alone
            assert await store.fold("s") == fold_events(None, GATED)
        with pytest.raises(StoreReadError, match=f"'s', sequence {sequence}") as caught:
            await (store.read("s") if unread else store.fold("s"))
        assert caught.value.execution_id == "s"
        assert await store.fold("sound") == fold_events(None, log("sound", 3))


async def test_a_log_that_lost_its_newest_rows_does_not_fold_to_an_older_state(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 5))
        state = await store.fold("x")
        connection = foreign(path)
        connection.execute("DELETE FROM events WHERE id >= (1 << 32) + 3")
        for known in (None, fold_events(None, log("x", 2)), fold_events(None, log("x", 4))):
            with pytest.raises(StoreReadError, match="'x'"):
                await store.fold("x", known)
        connection.execute("DELETE FROM events")
        connection.close()
        with pytest.raises(StoreReadError, match="'x'"):
            await store.fold("x")
        assert await store.fold("x", state) == state


async def test_a_damaged_page_is_a_read_error_that_names_the_execution(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 2_000))
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * 20_000)
    async with await SqliteEventStore.open(path) as store:
        with pytest.raises(StoreReadError) as caught:
            await store.read("x")
        assert caught.value.execution_id == "x"
        with pytest.raises(StoreReadError):
            await store.fold("x")
        await store.append(event("y", 0))


# --- threads, processes, memory ------------------------------------------------------------------


async def test_a_store_that_is_never_closed_warns_and_leaves_no_threads(path: Path) -> None:
    store = await SqliteEventStore.open(path)
    await store.append(event("x", 0))
    threads = [*store._writer._threads, *store._reader._threads]
    stores = [store]
    del store
    with pytest.warns(ResourceWarning, match="was never closed"):
        stores.clear()
    for thread in threads:
        await asyncio.to_thread(thread.join)


async def test_a_closed_store_has_ended_its_threads_and_removed_the_log_beside_the_file(path: Path) -> None:
    before = threading.active_count()
    store = await SqliteEventStore.open(path)
    await store.append(event("x", 0))
    await store.read("x")
    await store.close()
    assert not any(thread.is_alive() for thread in (*store._writer._threads, *store._reader._threads))
    assert threading.active_count() <= before + 2  # the exit watcher, and a thread that is just ending
    assert not path.with_name("events.db-wal").exists()


async def test_answers_and_requests_are_not_kept(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        body = b'"a body of its own"'
        held = sys.getrefcount(body)
        await store.append(event("x", 0))
        await store.append(Envelope("x", 1, "note", body, 5))
        await store.append(event("x", 2))  # the writer is past the one before when this returns
        await asyncio.sleep(0)
        assert sys.getrefcount(body) == held


async def test_a_forked_child_is_refused_and_does_not_disturb_its_parent(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append(event("x", 0))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = _in_the_child(store)
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await store.append(event("x", 1))
        assert len(await store.read("x")) == 3 - 1


def _in_the_child(store: SqliteEventStore) -> int:
    warnings.simplefilter("error")
    for coroutine in (store.append(event("x", 1)), store.read("x")):
        try:
            coroutine.send(None)
        except StoreClosedError:
            continue
        return 2
    try:
        store.close().send(None)
    except StopIteration:
        store.__del__()
        return 0
    return 3


def test_a_program_that_never_closes_its_store_still_ends(path: Path) -> None:
    program = """
        import asyncio, sys
        from loomfast.stores import SqliteEventStore
        keep = []
        async def main():
            keep.append(await SqliteEventStore.open(sys.argv[1]))
        asyncio.run(main())
        print("ended")
    """
    assert run_program(program, path, timeout_s=20).strip() == "ended"


def test_importing_the_stores_does_not_import_sqlite() -> None:
    program = "import sys, loomfast.stores; print('apsw' in sys.modules)"
    assert run_program(program, Path(sys.executable), timeout_s=20).strip() == "False"


async def test_opening_can_be_cancelled_and_leaves_nothing_behind(path: Path) -> None:
    opening = asyncio.create_task(SqliteEventStore.open(path))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    for thread in threading.enumerate():
        if thread.name.startswith("loomfast-sqlite"):
            await asyncio.to_thread(thread.join)
    async with await SqliteEventStore.open(path) as store:
        await store.append(event("x", 0))


def test_a_loop_that_is_closed_under_a_waiting_caller_does_not_disturb_the_others(path: Path) -> None:
    store = asyncio.run(SqliteEventStore.open(path))
    loop = asyncio.new_event_loop()
    writing = store.append(event("x", 0))
    loop.call_soon(lambda: (writing.send(None), loop.stop()))
    loop.run_forever()
    loop.close()

    async def go_on() -> None:
        async with store:
            await store.append(event("y", 0))
            assert [p.event.id for p in await store.read_all()] == ["x-0", "y-0"]

    asyncio.run(go_on())
    writing.close()


async def test_a_store_in_use_keeps_nothing_of_what_passed_through_it(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:

        async def use(first: int) -> None:
            for n in range(first, first + 100):
                await store.append(event("x", n))
                await store.read_from("x", n)
                with pytest.raises(DuplicateSequenceError):
                    await store.append(event("x", n))

        await use(0)
        gc.collect()
        before = len(gc.get_objects())
        await use(100)
        gc.collect()
        assert len(gc.get_objects()) - before < 50
