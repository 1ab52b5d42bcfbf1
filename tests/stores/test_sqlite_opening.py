"""Opening a SQLite store: what is made, what is found, and what is refused and left alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import apsw
import pytest

from loomfast._errors import (
    BadInputError,
    NotAStoreError,
    StaleFenceError,
    StoreMissingError,
    StoreTooNewError,
)
from loomfast.stores import EventStore, PostgresEventStore, SqliteEventStore
from loomfast.stores import _sqlite_schema as schema
from loomfast.stores._sqlite_migrations import MIGRATIONS

from .logs import event, log
from .programs import foreign, run_program


async def test_logs_fences_and_positions_survive_a_restart(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 3))
        token = await store.acquire_fence("x")
        await store.acquire_fence("unborn")
    async with await SqliteEventStore.open(str(path), synchronous="NORMAL") as store:
        assert await store.read("x") == log("x", 3)
        with pytest.raises(StaleFenceError):
            await store.append(event("x", 3))
        assert await store.acquire_fence("x") == token + 1
        assert await store.acquire_fence("unborn") == 2
        await store.append(event("y", 0))
        assert (await store.read_all(3))[0].position == 4


@pytest.mark.parametrize("synchronous", ["FULL", "NORMAL"])
async def test_the_writer_flushes_as_asked_and_logs_ahead(path: Path, synchronous: Any) -> None:
    connection = schema.open_writer(str(path), synchronous, 1000)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == ({"FULL": 2, "NORMAL": 1}[synchronous],)
    connection.close()


LONG = 1000 * 4096  # as SQLite lets its log become by default


async def test_a_store_that_is_written_to_has_a_long_log_once_and_for_all(path: Path) -> None:
    wal = Path(f"{path}-wal")
    async with await SqliteEventStore.open(path) as store:
        await store.append(event("first", 0))
        assert wal.stat().st_size < LONG
        for n in range(12):
            await store.append(event(f"x{n}", 0))
        length = wal.stat().st_size
        assert length > LONG
        for n in range(100):
            await store.append_batch(log(f"y{n}", 5))
        async with await SqliteEventStore.open(path) as other:
            for n in range(12):
                await other.append(event(f"z{n}", 0))
        assert wal.stat().st_size == length
        assert await store.snapshots.list("x7") == []
        assert len(await store.read_all(limit=1000)) == 1 + 12 + 500 + 12


async def test_what_made_the_log_long_is_nothing_to_who_comes_after_a_crash(path: Path) -> None:
    dies = """
        import asyncio, os, sys
        from loomfast.stores import SqliteEventStore
        from tests.stores.logs import event

        async def main():
            store = await SqliteEventStore.open(sys.argv[1])
            for n in range(12):
                await store.append(event(f"x{n}", 0))
            os._exit(0)

        asyncio.run(main())
    """
    run_program(dies, path, timeout_s=60)
    assert Path(f"{path}-wal").stat().st_size > LONG
    async with await SqliteEventStore.open(path) as store:
        assert [found.execution_id for found in await store.list_executions()] == [f"x{n}" for n in range(12)]
        await store.append_batch(log("x", 5))
    connection = foreign(path)
    assert connection.execute("SELECT count(*) FROM snapshots").get == 0
    assert connection.execute("PRAGMA integrity_check").get == "ok"
    connection.close()


async def test_many_stores_may_be_opened_at_once_on_a_file_that_is_not_there_yet(path: Path) -> None:
    stores = await asyncio.gather(*(SqliteEventStore.open(path) for _ in range(12)))
    for n, store in enumerate(stores):
        await store.append(event(f"x{n}", 0))
    assert len(await stores[0].read_all()) == 12
    for store in stores:
        await store.close()


@pytest.mark.parametrize("bad", ["", ":memory:", "a\x00b"])
async def test_a_path_that_names_no_file_is_refused(bad: str) -> None:
    with pytest.raises(BadInputError):
        await SqliteEventStore.open(bad)


async def test_options_are_checked(path: Path) -> None:
    with pytest.raises(BadInputError):
        await SqliteEventStore.open(path, synchronous="OFF")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(BadInputError):
        await SqliteEventStore.open(path, busy_timeout_ms=-1)
    assert not path.exists()


async def test_what_is_no_database_of_ours_is_refused_and_left_alone(path: Path, tmp_path: Path) -> None:
    path.write_bytes(b"no database at all, but long enough to be taken for one" * 50)
    with pytest.raises(NotAStoreError, match="not a database") as caught:
        await SqliteEventStore.open(path)
    assert isinstance(caught.value.__cause__, apsw.NotADBError)
    with pytest.raises(NotAStoreError, match="folder"):
        await SqliteEventStore.open(tmp_path)


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize(
    "made_by",
    [
        "CREATE TABLE customers (id)",
        "PRAGMA user_version=7",
        "PRAGMA application_id=7",
        "CREATE TABLE events (id); PRAGMA user_version=1",
        f"CREATE TABLE events (id); PRAGMA application_id={schema.APPLICATION_ID}",
        "PRAGMA journal_mode=WAL; CREATE TABLE customers (id)",
    ],
)
async def test_a_database_of_another_application_is_refused_and_left_as_it_was(
    path: Path, made_by: str, create: bool
) -> None:
    other = foreign(path)
    list(other.execute(made_by))
    other.close()
    before = path.read_bytes()
    with pytest.raises(NotAStoreError, match="is not a loomfast database") as caught:
        await SqliteEventStore.open(path, create=create)
    assert caught.value.path == str(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


async def test_the_log_another_application_left_beside_its_file_is_not_folded_into_it(path: Path) -> None:
    run_program(
        """
        import os, sys, apsw
        connection = apsw.Connection(sys.argv[1])
        list(connection.execute("PRAGMA journal_mode=WAL; CREATE TABLE customers (id)"))
        os._exit(0)
        """,
        path,
        timeout_s=30,
    )
    beside = path.with_name(path.name + "-wal")
    before = path.read_bytes(), beside.read_bytes()
    with pytest.raises(NotAStoreError):
        await SqliteEventStore.open(path)
    assert (path.read_bytes(), beside.read_bytes()) == before


async def test_a_file_without_content_is_filled_or_refused_as_asked(path: Path) -> None:
    path.touch()
    with pytest.raises(NotAStoreError, match="empty"):
        await SqliteEventStore.open(path, create=False)
    assert path.read_bytes() == b""
    async with await SqliteEventStore.open(path) as store:
        await store.append(event("x", 0))


async def test_opening_without_creating_finds_what_is_there_and_makes_nothing(path: Path) -> None:
    with pytest.raises(StoreMissingError) as caught:
        await SqliteEventStore.open(path, create=False)
    assert caught.value.path == str(path)
    assert list(path.parent.iterdir()) == []
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 3))
    async with await SqliteEventStore.open(path, create=False) as store:
        assert await store.read("x") == log("x", 3)
        await store.append(event("x", 3))


@pytest.mark.parametrize("create", [True, False])
async def test_a_folder_that_is_missing_is_said_to_be_and_is_not_made(tmp_path: Path, create: bool) -> None:
    path = tmp_path / "none" / "deeper" / "a.db"
    with pytest.raises(StoreMissingError) as caught:
        await SqliteEventStore.open(path, create=create)
    assert str(caught.value) == f"{path}: there is no folder {path.parent}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file/a.db", "file/deeper/a.db"])
async def test_a_folder_that_is_a_file_is_said_to_be_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("content")
    with pytest.raises(StoreMissingError) as caught:
        await SqliteEventStore.open(tmp_path / name)
    assert str(caught.value) == f"{tmp_path / name}: {(tmp_path / name).parent} is no folder"
    assert (tmp_path / "file").read_text() == "content"


@pytest.mark.parametrize("store", [SqliteEventStore, PostgresEventStore])
@pytest.mark.parametrize(("given", "options"), [((), {}), (("a.db",), {}), (("a.db",), {"create": False})])
def test_a_store_that_is_constructed_instead_of_opened_says_how_to_open_it(
    store: type[EventStore], given: tuple[str, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(BadInputError, match=rf"use await {store.__name__}\.open\("):
        store(*given, **options)


async def test_a_name_that_is_not_utf8_is_refused_before_anything_happens(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="UTF-8"):
        await SqliteEventStore.open(tmp_path / "caf\udce9.db")
    assert list(tmp_path.iterdir()) == []


async def test_a_newer_schema_is_refused_by_its_number(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append(event("x", 0))
    connection = foreign(path)
    connection.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(
        StoreTooNewError, match=f"schema version {len(MIGRATIONS) + 1}, .* upgrade loomfast"
    ) as caught:
        await SqliteEventStore.open(path)
    assert (caught.value.place, caught.value.known) == (str(path), len(MIGRATIONS))


async def test_a_path_with_odd_characters_works(tmp_path: Path) -> None:
    async with await SqliteEventStore.open(tmp_path / "a ?mode=ro#%41&é.db") as store:
        await store.append(event("x", 0))
        assert len(await store.read("x")) == 1
    assert (tmp_path / "a ?mode=ro#%41&é.db").exists()


async def test_a_relative_path_keeps_its_meaning_when_the_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with await SqliteEventStore.open("events.db") as store:
        monkeypatch.chdir("/")
        await store.append(event("x", 0))
        assert len(await store.read("x")) == 1
