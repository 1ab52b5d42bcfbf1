"""What PostgreSQL itself, and the relations between the tables, say about the state of a schema.

What lives here: `check_storage`, a query for a connection of the pool. What must not: what a log should hold
(`loomfast/verification.py`).

PostgreSQL looks into its indexes by the extension `amcheck`, where the database has it and lets us use it.
"""

from __future__ import annotations

from typing import Final

import asyncpg

from loomfast.stores._postgres_connections import CORRUPT, AnyConnection
from loomfast.stores._postgres_schema import quoted

# All of a table, or of an index, may have to be read: as good as no limit.
_NO_LIMIT_S: Final = 7 * 24 * 3600.0

# Which columns name an execution by its number.
_NAMING: Final = (
    ("events", "execution"),
    ("snapshots", "execution"),
    ("branches", "execution"),
    ("branches", "origin"),
    ("branches", "parent"),
    ("recoveries", "execution"),
)
_NAMELESS: Final = (
    "SELECT count(*), min({column}) FROM {table} t WHERE {column} IS NOT NULL"
    " AND NOT EXISTS (SELECT 1 FROM executions x WHERE x.number = t.{column})"
)
_AMCHECK: Final = (
    "SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace"
    " JOIN pg_proc p ON p.pronamespace = n.oid AND p.proname = 'bt_index_check' AND p.pronargs = 2"
    " WHERE e.extname = 'amcheck' AND has_schema_privilege(n.oid, 'USAGE')"
    " AND has_function_privilege(p.oid, 'EXECUTE')"
)
_INDEXES: Final = (
    "SELECT c.oid, c.relname FROM pg_class c JOIN pg_am a ON a.oid = c.relam"
    " WHERE c.relkind = 'i' AND a.amname = 'btree' AND c.relnamespace = current_schema()::regnamespace"
    " ORDER BY c.relname"
)


async def check_storage(connection: AnyConnection) -> list[str]:
    """Does every row belong to an execution, and does every index hold all of its table, in order?"""
    return await _nameless(connection) + await _indexes(connection)


async def _nameless(connection: AnyConnection) -> list[str]:
    complaints: list[str] = []
    for table, column in _NAMING:
        query = _NAMELESS.format(table=table, column=column)
        try:
            found = await connection.fetchrow(query, timeout=_NO_LIMIT_S)
        except CORRUPT as error:
            complaints.append(f"table {table}: {error}")
            continue
        assert found is not None  # an aggregate has one row
        count, first = found
        if count:
            complaints.append(f"table {table}: {count} rows name no execution, the first of them {first}")
    return complaints


async def _indexes(connection: AnyConnection) -> list[str]:
    where = await connection.fetchval(_AMCHECK)
    if where is None:
        return []
    complaints: list[str] = []
    check = f"SELECT {quoted(where)}.bt_index_check($1::oid::regclass, true)"
    for oid, name in await connection.fetch(_INDEXES):
        try:
            await connection.execute(check, oid, timeout=_NO_LIMIT_S)
        except CORRUPT as error:
            complaints.append(f"index {name}: {error}")
        except asyncpg.UndefinedObjectError:
            pass  # dropped meanwhile
    return complaints
