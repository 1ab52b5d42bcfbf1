"""What the SQLite store says when its disk or its file fails it: no room, no right to write, no file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from loomfast._errors import (
    StorageWriteError,
    StoreFullError,
    StoreLostError,
    StoreReadError,
    StoreReadOnlyError,
)
from loomfast._kernels import Envelope
from loomfast.stores import SqliteEventStore

from .logs import event, log
from .programs import foreign, on_the_writer, run_program

# --- no room -------------------------------------------------------------------------------------


async def test_a_full_disk_is_reported_to_those_it_hits_and_the_rest_goes_on(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 3))
        pages = foreign(path).execute("PRAGMA page_count").fetchone()[0]
        await on_the_writer(store, f"PRAGMA max_page_count={pages + 60}")
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
        assert isinstance(error, StoreFullError)
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


async def test_a_connection_that_may_not_write_is_a_write_error_and_reads_go_on(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append(event("x", 0))
        await on_the_writer(store, "PRAGMA query_only=ON")
        with pytest.raises(StoreReadOnlyError) as caught:
            await store.append(event("x", 1))
        assert isinstance(caught.value.__cause__, apsw.ReadOnlyError)
        assert (caught.value.execution_id, caught.value.sequence) == ("x", 1)
        assert len(await store.read("x")) == 1


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Callable[[], None] | None]:
    """Make `folder` a disk of 1 MB and yield what enlarges it; None where this process may not mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        yield None
        return
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=16m", str(folder)], check=True) and None
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_a_disk_that_is_full_loses_nothing_and_writes_go_on_once_there_is_room(tmp_path: Path) -> None:
    def fat(sequence: int) -> Envelope:
        return event("x", sequence, payload={"text": "t" * 10_000})

    with _small_disk(tmp_path) as enlarge:
        async with await SqliteEventStore.open(tmp_path / "events.db") as store:
            if enlarge is None:
                await on_the_writer(store, "PRAGMA max_page_count=200")
            await store.append(event("x", 0))
            last, failure = 0, None
            while failure is None:
                try:
                    await store.append(fat(last + 1))
                    last += 1
                except StoreFullError as error:
                    failure = error
            assert 0 < last < 500
            assert (failure.execution_id, failure.sequence, failure.code) == ("x", last + 1, "store-full")
            assert isinstance(failure.__cause__, apsw.FullError)
            whole = [event("x", 0), *(fat(n) for n in range(1, last + 1))]
            assert await store.read("x") == whole
            with pytest.raises(StoreFullError):
                await store.append_batch([fat(last + n) for n in range(1, 9)])
            if enlarge is None:
                await on_the_writer(store, "PRAGMA max_page_count=2000")
            else:
                enlarge()
            await store.append(fat(last + 1))
            assert await store.read("x") == [*whole, fat(last + 1)]
            assert len(await store.read_all()) == last + 2


FILE_LIMIT = """
    import asyncio, resource, sys
    from loomfast import StoreFullError
    from loomfast.stores import SqliteEventStore
    from tests.stores.logs import event

    async def main(path):
        async with await SqliteEventStore.open(path) as store:
            await store.append(event("x", 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
            last = 0
            try:
                while True:
                    await store.append(event("x", last + 1, payload={"text": "t" * 10_000}))
                    last += 1
            except StoreFullError as error:
                assert (error.execution_id, error.sequence) == ("x", last + 1), error
            assert await store.last_sequence("x") == last > 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            await store.append(event("x", last + 1))
            assert await store.last_sequence("x") == last + 1
            print(last > 0)

    asyncio.run(main(sys.argv[1]))
"""


def test_the_greatest_size_of_a_file_is_a_full_disk_too(path: Path) -> None:
    assert run_program(FILE_LIMIT, path, timeout_s=60) == "True\n"


# --- no right to write ---------------------------------------------------------------------------

# Whoever may write everything is somebody else first.
WITHOUT_RIGHTS = """
    import asyncio, os, sys
    from loomfast import StoreReadError, StoreReadOnlyError, StorageError
    from loomfast.stores import SqliteEventStore
    from tests.stores.logs import event, log

    async def main(path):
        try:
            store = await SqliteEventStore.open(path)
        except StoreReadOnlyError as error:
            assert str(path) in str(error), error
            print("refused to open")
            return
        async with store:
            assert await store.read("x") == log("x", 3)
            assert await store.fold("x") is not None
            try:
                await store.append(event("x", 3))
            except StoreReadOnlyError as error:
                assert (error.execution_id, error.sequence) == ("x", 3), error
                print("refused to write")

    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that everybody may enter."""
    opened = []
    for folder in (tmp_path, *tmp_path.parents):
        seen = folder.stat()
        if seen.st_mode & 0o005 != 0o005 and seen.st_uid == os.geteuid():
            opened.append((folder, seen.st_mode))
            folder.chmod(seen.st_mode | 0o055)
    yield tmp_path
    for folder, mode in opened:
        folder.chmod(mode)


async def test_a_file_that_may_only_be_read_is_read_and_refuses_writes(open_folder: Path) -> None:
    path = open_folder / "events.db"
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 3))
        open_folder.chmod(0o777)
        for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
            name.chmod(0o444)
        assert run_program(WITHOUT_RIGHTS, path, timeout_s=60) == "refused to write\n"


async def test_a_folder_that_may_only_be_read_is_refused_by_its_name(open_folder: Path) -> None:
    path = open_folder / "events.db"
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 3))
    open_folder.chmod(0o555)
    try:
        assert run_program(WITHOUT_RIGHTS, path, timeout_s=60) == "refused to open\n"
        assert run_program(WITHOUT_RIGHTS, path.parent / "none.db", timeout_s=60) == "refused to open\n"
    finally:
        open_folder.chmod(0o755)


# --- no file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["events.db", "events.db-wal"])
async def test_nothing_is_acknowledged_once_the_file_was_deleted(path: Path, name: str) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append(event("x", 0))
        os.unlink(path.parent / name)
        results = await asyncio.gather(
            store.append(event("x", 1)), store.append(event("y", 0)), return_exceptions=True
        )
        for result, subject in zip(results, [("x", 1), ("y", 0)], strict=True):
            assert type(result) is StorageWriteError
            assert (result.execution_id, result.sequence) == subject
            assert isinstance(result.__cause__, StoreLostError)
        with pytest.raises(StoreReadError) as caught:
            await store.read("x")
        assert isinstance(caught.value.__cause__, StoreLostError)


async def test_a_file_that_is_put_back_is_the_same_again(path: Path, tmp_path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append(event("x", 0))
        path.rename(tmp_path / "away")
        with pytest.raises(StorageWriteError):
            await store.append(event("y", 0))
        (tmp_path / "away").rename(path)
        await store.append(event("x", 1))
        assert await store.last_sequence("x") == 1


async def test_closing_does_not_touch_the_file_that_took_its_place(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    async with await SqliteEventStore.open(other) as living:
        await living.append_batch(log("other", 3))
        store = await SqliteEventStore.open(path)
        await store.append_batch(log("x", 3))
        for ending in ("", "-wal", "-shm"):
            os.replace(f"{other}{ending}", f"{path}{ending}")
        with pytest.raises(StorageWriteError) as caught:
            await store.append(event("x", 3))
        assert isinstance(caught.value.__cause__, StoreLostError)
        await store.close()
        kept = tmp_path / "kept.db"
        for ending in ("", "-wal"):
            shutil.copy(f"{path}{ending}", f"{kept}{ending}")
    async with await SqliteEventStore.open(kept) as store:
        assert await store.read("other") == log("other", 3)
