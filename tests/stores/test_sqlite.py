"""What only the SQLite store promises: its file, its errors, its threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loomfast._errors import (
    DuplicateSequenceError,
    StaleFenceError,
    StoreBusyError,
    StoreClosedError,
)
from loomfast._kernels import Envelope
from loomfast.stores import Recovery, ScheduleRow, SqliteEventStore

from .logs import event, log
from .programs import foreign, run_program

# --- locks ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[None]:
    """Have a task of the loop wake up 500 times a second, and judge how late it was: F21."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.monotonic() + 0.002
            await asyncio.sleep(0.002)
            late.append(time.monotonic() - due)

    ticker = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticker.cancel()
    assert len(late) > 20
    assert sorted(late)[len(late) * 99 // 100] < 0.05


async def test_an_append_waits_for_a_foreign_lock_and_the_loop_does_not(path: Path) -> None:  # F21
    async with (
        await SqliteEventStore.open(path) as store,
        await SqliteEventStore.open(path.with_name("other.db")) as other,
    ):
        await store.append(event("x", 0))
        holder = foreign(path)
        holder.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(store.append(event("x", 1)))
        async with ticking():
            start = time.monotonic()
            while time.monotonic() - start < 1:
                await asyncio.sleep(0.01)
                assert len(await store.read("x")) == 1
        await other.append(event("elsewhere", 0))
        assert not waiting.done()
        holder.execute("ROLLBACK")
        holder.close()
        await waiting
        assert await store.last_sequence("x") == 1


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
        assert "busy" in str(results[0])  # F20
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


async def test_opening_migrating_and_closing_wait_for_a_lock_and_the_loop_does_not(
    path: Path,
) -> None:
    shutil.copy(Path(__file__).parent / "data" / "schema-2.sqlite", path)
    holder = foreign(path)
    holder.execute("BEGIN IMMEDIATE")
    async with ticking():  # F21
        opening = asyncio.create_task(SqliteEventStore.open(path))
        await asyncio.sleep(0.3)
        assert not opening.done()
        holder.execute("ROLLBACK")
        store = await opening
        holder.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(store.append(event("new", 0)))
        await asyncio.sleep(0)
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0.3)
        assert not closing.done()
        holder.execute("ROLLBACK")
        holder.close()
        await closing
        await waiting


async def test_leases_accounts_and_schedules_say_when_a_lock_is_held_too_long(
    path: Path,
) -> None:
    async with await SqliteEventStore.open(path, busy_timeout_ms=30) as store:
        await store.append(event("x", 0))
        lease = await store.leases.acquire("x", "node-a", 30)
        assert lease is not None
        holder = foreign(path)
        holder.execute("BEGIN IMMEDIATE")
        results = await asyncio.gather(
            store.leases.acquire("y", "node-a", 30),
            store.leases.renew([lease], 30),
            store.recoveries.put(Recovery("x", 1, 0, False, None)),
            store.timers.put(ScheduleRow("nightly", b"{}", None)),
            return_exceptions=True,
        )
        assert [r.execution_id for r in results if isinstance(r, StoreBusyError)] == ["y", "x", "x", None]
        assert await store.leases.get("x") == lease
        holder.execute("ROLLBACK")
        holder.close()
        assert await store.leases.renew([lease], 30) != []


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


async def test_a_close_that_is_cancelled_while_a_read_goes_on_still_closes(path: Path) -> None:
    store = await SqliteEventStore.open(path)
    await store.append(event("x", 0))
    begun, go_on = threading.Event(), threading.Event()

    def lasting(connection: object) -> None:
        begun.set()
        go_on.wait()

    reading = asyncio.create_task(store._read(None, lasting))
    await asyncio.to_thread(begun.wait)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    go_on.set()
    await reading
    for thread in (*store._reader._threads, *store._writer._threads):
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()
    assert not Path(f"{path}-wal").exists()


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
        from loomfast.stores import Recovery, ScheduleRow, SqliteEventStore
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
