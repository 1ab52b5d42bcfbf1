"""`verify_store` on PostgreSQL schemas that were damaged behind the store's back."""

from __future__ import annotations

import pytest

from loomfast.stores._postgres_check import check_storage

from .conftest import OpenPostgres
from .programs import on_the_server
from .whole import fill, verify

OF = "(SELECT number FROM executions WHERE key = convert_to('{0}', 'UTF8'))"
ROW = f"WHERE execution = {OF} AND sequence = {{1}}"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            "UPDATE events SET timestamp = 1 " + ROW.format("x", 7),
            ["execution 'x', sequence 7: the row is not as it was written"],
        ),
        (
            "DELETE FROM events " + ROW.format("x", 5),
            ["execution 'x', sequence 5: the database holds a part of its log only"],
        ),
        (
            "UPDATE executions SET status = 'completed' WHERE key = 'x'",
            ["execution 'x': its status is listed as 'completed', its log says 'running'"],
        ),
        (
            "UPDATE executions SET wake_at = NULL WHERE key = 'first'",
            ["execution 'first': its gate wakes at 1000, and is not among those that are due then"],
        ),
        (
            "UPDATE snapshots SET body = '{}' " + ROW.format("x", 8),
            ["execution 'x', sequence 8: bad snapshot: checksum: "],
        ),
        (
            "UPDATE branches SET parent = 77 WHERE key = 'deeper'",
            ["the store: table branches: 1 rows name no execution, the first of them 77"],
        ),
        (
            "INSERT INTO snapshots SELECT execution + 90, sequence, schema_version, checksum, body"
            " FROM snapshots",
            ["the store: table snapshots: 6 rows name no execution, the first of them 92"],
        ),
    ],
)
async def test_damage_to_a_schema_is_found_and_named(
    open_postgres: OpenPostgres, damage: str, expected: list[str]
) -> None:
    async with await open_postgres() as store:
        await fill(store)
        assert (await verify(store))[0] == []
        on_the_server(store, damage)
        faults, counts = await verify(store)
        assert len(faults) == len(expected), faults
        for fault, start in zip(faults, expected, strict=True):
            assert fault.startswith(start)
        assert counts.executions == 8


async def test_an_index_that_misses_a_row_is_found_also_by_the_server_where_it_can_look(
    open_postgres: OpenPostgres,
) -> None:
    """`amcheck` comes with PostgreSQL, but not with every package of it."""
    async with await open_postgres() as store:
        await fill(store)
        connection = await store._connections.connect()
        index = "'events_by_position'::regclass"
        await connection.execute(f"UPDATE pg_index SET indisready = false WHERE indexrelid = {index}")
        await connection.execute(
            "UPDATE events SET position = position + 500 WHERE position = (SELECT max(position) FROM events)"
        )
        await connection.execute(f"UPDATE pg_index SET indisready = true WHERE indexrelid = {index}")
        unindexed = ["the store: 1 events of the logs are missing from the total order"]
        assert (await verify(store))[0] == unindexed
        offered = await connection.fetchval("SELECT 1 FROM pg_available_extensions WHERE name = 'amcheck'")
        if offered:
            await connection.execute("CREATE EXTENSION IF NOT EXISTS amcheck SCHEMA public")
            faults, _ = await verify(store)
            assert faults[1:] == unindexed
            assert faults[0].startswith("the store: index events_by_position: heap tuple ")
            # A role that may not use it is not told that the store cannot be read.
            schema = await connection.fetchval("SELECT current_schema()")
            await connection.execute(
                "CREATE SCHEMA hidden; ALTER EXTENSION amcheck SET SCHEMA hidden; CREATE ROLE onlooker;"
                f' GRANT USAGE ON SCHEMA "{schema}" TO onlooker;'
                f' GRANT SELECT ON ALL TABLES IN SCHEMA "{schema}" TO onlooker;'
                " GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA hidden TO onlooker; SET ROLE onlooker"
            )
            assert await check_storage(connection) == []
            await connection.execute(
                "RESET ROLE; DROP EXTENSION amcheck; DROP SCHEMA hidden;"
                " DROP OWNED BY onlooker; DROP ROLE onlooker"
            )
        await connection.close()
