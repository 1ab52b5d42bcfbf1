"""Opening a PostgreSQL store: what is made, what is found, and what is refused and left alone."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from loomfast._errors import (
    BadInputError,
    NotAStoreError,
    StaleFenceError,
    StorageError,
    StoreMissingError,
    StoreTooNewError,
)
from loomfast.stores import PostgresEventStore, ScheduleRow, SqliteEventStore, open_store
from loomfast.stores import _postgres_schema as schemas
from loomfast.testing.postgres import PostgresServer

from .conftest import OpenPostgres
from .logs import event, log
from .programs import run_program, start_program

OPENER = """
    import asyncio, sys
    from loomfast.stores import PostgresEventStore

    async def main(dsn, schema):
        async with await PostgresEventStore.open(dsn, schema=schema):
            pass

    asyncio.run(main(*sys.argv[1:]))
"""


async def run_sql(server: PostgresServer, sql: str, *arguments: object) -> list[Any]:
    connection = await asyncpg.connect(server.dsn)
    try:
        return await connection.fetch(sql, *arguments)
    finally:
        await connection.close()


async def test_logs_fences_positions_and_tokens_survive_a_restart_of_store_and_server(
    postgres_server: PostgresServer, open_postgres: OpenPostgres
) -> None:
    async with await open_postgres() as store:
        await store.append_batch(log("x", 3))
        token = await store.acquire_fence("x")
        await store.acquire_fence("unborn")
        first = await store.leases.acquire("x", "a", 60)
        assert first is not None
    await asyncio.to_thread(postgres_server.kill)
    await asyncio.to_thread(postgres_server.start)
    async with await open_postgres(synchronous_commit="off") as store:
        assert await store.read("x") == log("x", 3)
        with pytest.raises(StaleFenceError):
            await store.append(event("x", 3))
        assert await store.acquire_fence("x") == token + 1
        assert await store.acquire_fence("unborn") == 2
        await store.append(event("y", 0))
        assert (await store.read_all(3))[0].position == 4
        assert await store.leases.get("x") == first
        second = await store.leases.acquire("y", "a", 60)
        assert second is not None
        assert second.token > first.token


async def test_a_schema_that_is_not_there_may_be_opened_by_many_at_once(
    postgres_server: PostgresServer, new_schema: str, open_postgres: OpenPostgres
) -> None:
    processes = [start_program(OPENER, postgres_server.dsn, new_schema) for _ in range(3)]
    stores = await asyncio.gather(*(open_postgres() for _ in range(10)))
    for process in processes:
        _, complaints = await asyncio.to_thread(process.communicate)
        assert (process.returncode, complaints) == (0, "")
    for n, store in enumerate(stores):
        await store.append(event(f"x{n}", 0))
    assert len(await stores[0].read_all()) == 10
    for store in stores:
        await store.close()


async def test_an_older_schema_is_brought_up_to_date_once_and_keeps_its_logs(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await open_postgres() as store:
        await store.append_batch(log("x", 3))
    newer = (*schemas.MIGRATIONS, ("CREATE TABLE added (n integer)",))
    monkeypatch.setattr(schemas, "MIGRATIONS", newer)
    stores = await asyncio.gather(*(open_postgres() for _ in range(5)))
    assert await stores[0].read("x") == log("x", 3)
    for store in stores:
        await store.close()
    monkeypatch.undo()
    with pytest.raises(
        StoreTooNewError,
        match=rf"version {len(newer)}, this loomfast knows {len(newer) - 1} only: upgrade loomfast",
    ):
        await open_postgres()


async def test_schedules_of_an_older_schema_go_on_to_versions_that_none_of_them_had(
    postgres_server: PostgresServer,
    new_schema: str,
    open_postgres: OpenPostgres,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In schema version 1 each schedule counted by itself, and began at 1 again when it was put anew."""
    monkeypatch.setattr(schemas, "MIGRATIONS", schemas.MIGRATIONS[:1])
    async with await open_postgres():
        pass
    table = f"{schemas.quoted(new_schema)}.schedules"
    await run_sql(
        postgres_server,
        f"INSERT INTO {table} (key, body, next_ms, version)"
        " VALUES ('often', '[1]', 5, 7), ('s', '[2]', NULL, 1)",
    )
    monkeypatch.undo()
    async with await open_postgres() as store:
        often, other = ScheduleRow("often", b"[1]", 5, 7), ScheduleRow("s", b"[2]", None, 1)
        assert await store.timers.list() == [often, other]
        assert await store.timers.delete("s")
        again = await store.timers.put(ScheduleRow("s", b"[3]", 5))
        assert again is not None
        assert again.version > 7
        changed = await store.timers.put(often._replace(next_ms=6))
        assert changed is not None
        assert changed.version > again.version
    async with await open_postgres() as store:
        assert await store.timers.list() == [changed, again]


async def test_an_older_schema_learns_to_fence_under_leases(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schema version 2 had `append` only; a store that has it open goes on by that."""
    monkeypatch.setattr(schemas, "MIGRATIONS", schemas.MIGRATIONS[:2])
    async with await open_postgres() as older:
        lease = await older.leases.acquire("x", "a", 60)
        assert await older.acquire_fence("x") == 1
        monkeypatch.undo()
        async with await open_postgres() as store:
            assert await store.acquire_fence("x", lease=lease) == 2
        assert await older.acquire_fence("x") == 3


async def test_a_migration_that_fails_leaves_the_schema_as_it_was(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (*schemas.MIGRATIONS, ("CREATE TABLE added (n integer)", "SELECT 1 / 0"))
    monkeypatch.setattr(schemas, "MIGRATIONS", broken)
    with pytest.raises(StorageError) as caught:
        await open_postgres()
    assert isinstance(caught.value.__cause__, asyncpg.DivisionByZeroError)
    with pytest.raises(StoreMissingError):
        await open_postgres(create=False)
    monkeypatch.undo()
    async with await open_postgres() as store:
        await store.append(event("x", 0))


@pytest.mark.parametrize(
    "table",
    ["events (id integer)", "about (application integer)", "about (application text, version integer)"],
)
async def test_a_schema_of_somebody_elses_is_refused_and_left_alone(
    postgres_server: PostgresServer, new_schema: str, open_postgres: OpenPostgres, table: str
) -> None:
    await run_sql(postgres_server, f"CREATE SCHEMA {new_schema}")
    await run_sql(postgres_server, f"CREATE TABLE {new_schema}.{table}")
    for create in (True, False):
        with pytest.raises(NotAStoreError):
            await open_postgres(create=create)
    found = await run_sql(
        postgres_server, "SELECT tablename FROM pg_tables WHERE schemaname = $1", new_schema
    )
    assert [row[0] for row in found] == [table.split()[0]]


async def test_an_empty_schema_is_filled_and_a_missing_one_is_not_made_for_a_program_that_only_looks(
    postgres_server: PostgresServer, new_schema: str, open_postgres: OpenPostgres
) -> None:
    with pytest.raises(StoreMissingError, match=new_schema):
        await open_postgres(create=False)
    await run_sql(postgres_server, f"CREATE SCHEMA {new_schema}")
    with pytest.raises(StoreMissingError):
        await open_postgres(create=False)
    async with await open_postgres() as store, await open_postgres(create=False) as looking:
        await store.append(event("x", 0))
        assert await looking.last_sequence("x") == 0


async def test_two_schemas_of_one_database_do_not_meet(open_postgres: OpenPostgres, new_schema: str) -> None:
    other = f'{new_schema}"; DROP SCHEMA É'
    async with await open_postgres() as one, await open_postgres(schema=other) as two:
        await one.append_batch(log("x", 2))
        await two.append_batch(log("x", 3))
        assert (len(await one.read("x")), len(await two.read("x"))) == (2, 3)
        assert [p.position for p in await two.read_all()] == [1, 2, 3]
    async with await open_postgres(schema=other, create=False) as two:
        assert await two.last_sequence("x") == 2


async def test_a_missing_database_and_a_server_that_is_not_there_are_typed_errors_without_the_password(
    postgres_server: PostgresServer,
) -> None:
    elsewhere = postgres_server.dsn.replace("/postgres?", "/nowhere?")
    with pytest.raises(StoreMissingError):
        await PostgresEventStore.open(elsewhere)
    with pytest.raises(StorageError) as caught:
        await PostgresEventStore.open("postgresql://me:secret@127.0.0.1:1/db", reconnect_timeout_ms=0)
    assert isinstance(caught.value.__cause__, OSError)
    assert "127.0.0.1:1/db" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"schema": ""},
        {"schema": "pg_mine"},
        {"schema": "a\x00b"},
        {"schema": "\ud800"},
        {"schema": "x" * 64},
        {"synchronous_commit": "maybe"},
        {"pool_size": 0},
        {"busy_timeout_ms": 0},
        {"reconnect_timeout_ms": -1},
        {"timeout_ms": 0},
    ],
    ids=repr,
)
async def test_an_option_that_cannot_be_is_refused(
    open_postgres: OpenPostgres, options: dict[str, Any]
) -> None:
    with pytest.raises(BadInputError):
        await open_postgres(**options)


@pytest.mark.parametrize("level", ["on", "off", "local", "remote_write", "remote_apply"])
async def test_every_connection_commits_as_asked(open_postgres: OpenPostgres, level: Any) -> None:
    async with await open_postgres(synchronous_commit=level) as store:
        assert store._writer._connection is not None
        assert await store._writer._connection.fetchval("SHOW synchronous_commit") == level
        assert await store._read(None, lambda c: c.fetchval("SHOW synchronous_commit")) == level


async def test_the_server_flushes_what_it_acknowledges(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as store:
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            assert await store._read(None, lambda c, s=setting: c.fetchval(f"SHOW {s}")) == "on"


async def test_a_url_opens_the_store_it_names(
    postgres_server: PostgresServer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await open_store(str(tmp_path / "a.db")) as store:
        assert isinstance(store, SqliteEventStore)
    with pytest.raises(StoreMissingError):
        await open_store(str(tmp_path / "b.db"), create=False)
    with pytest.raises(BadInputError, match="as a text"):
        await open_store(tmp_path / "c.db")
    async with await open_store(postgres_server.dsn) as store:
        assert isinstance(store, PostgresEventStore)
        assert "schema 'loomfast'" in repr(store)
    async with await open_store(postgres_server.dsn, create=False) as store:
        assert isinstance(store, PostgresEventStore)


def test_without_the_driver_the_error_says_what_to_install_and_all_else_works() -> None:
    program = """
        import sys
        sys.modules["asyncpg"] = None
        import importlib.util
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name: None if name == "asyncpg" else find_spec(name)
        from loomfast import *
        import loomfast
        assert "PostgresEventStore" not in loomfast.__all__
        try:
            loomfast.PostgresEventStore
        except loomfast.InstallError as error:
            print(error)
    """
    assert "pip install 'loomfast[postgres]'" in run_program(program, timeout_s=60)


def test_the_driver_is_imported_by_those_only_who_ask_for_the_store() -> None:
    program = """
        import sys, loomfast
        loomfast.SqliteEventStore
        print("asyncpg" in sys.modules)
        loomfast.PostgresEventStore
        print("asyncpg" in sys.modules)
    """
    assert run_program(program, timeout_s=60).split() == ["False", "True"]
