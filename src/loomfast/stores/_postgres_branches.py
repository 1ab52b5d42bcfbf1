"""The branches of a PostgreSQL store.

What lives here: `PostgresBranchRegistry`, and what writes and reads branches. What must not: events. Rows
name executions by their numbers, which never change once an execution has events. Whoever changes branches
holds the log's lock, so that two cannot take one name, and that they are numbered as they were added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loomfast._errors import BeyondLogError, UnknownBranchError, UnknownExecutionError
from loomfast.stores._forking import check_branch, there_already
from loomfast.stores._postgres_connections import AnyConnection
from loomfast.stores._postgres_rows import key_and_long, key_of, load_text
from loomfast.stores._postgres_snapshots import lock_head
from loomfast.stores._spi_branches import ORIGIN, Branch, BranchRegistry, Tip

if TYPE_CHECKING:
    from loomfast.stores._postgres import PostgresEventStore

_BRANCH: Final = (
    "SELECT coalesce(o.long_id, o.key), coalesce(b.long_name, b.key), coalesce(x.long_id, x.key),"
    " coalesce(p.long_id, p.key), b.cut, b.main FROM branches b"
    " JOIN executions o ON o.number = b.origin JOIN executions x ON x.number = b.execution"
    " LEFT JOIN executions p ON p.number = b.parent WHERE "
)
_BY_NAME: Final = _BRANCH + "o.key = $1 AND b.key = $2"
_BY_EXECUTION: Final = _BRANCH + "x.key = $1"
_REFS: Final = _BRANCH + "o.key = $1 ORDER BY b.number"
_CHILDREN: Final = _BRANCH + "p.key = $1 ORDER BY b.number"
_TIPS: Final = (
    "SELECT coalesce(b.long_name, b.key), coalesce(x.long_id, x.key), x.last_sequence, x.status"
    " FROM branches b"
    " JOIN executions o ON o.number = b.origin JOIN executions x ON x.number = b.execution"
    " WHERE o.key = $1 ORDER BY b.number"
)
_INSERT: Final = (
    "INSERT INTO branches (origin, key, long_name, execution, parent, cut, main)"
    " VALUES ($1, $2, $3, $4, $5, $6, $7)"
)
_PROMOTE: Final = (
    "UPDATE branches SET main = (key = $2) WHERE origin = (SELECT number FROM executions WHERE key = $1)"
)


class PostgresBranchRegistry(BranchRegistry):
    """Branches in the schema of a `PostgresEventStore`."""

    def __init__(self, store: PostgresEventStore) -> None:
        """Not for callers: use `store.branches`."""
        self._store = store

    async def add(self, name: str, execution_id: str, *, parent_id: str, cut: int) -> Branch:
        check_branch(name, execution_id, parent_id, cut)

        async def add(connection: AnyConnection) -> Branch:
            await connection.execute("SELECT lock_log()")
            known = await judge_branch(connection, name, execution_id, parent_id, cut)
            parent = await lock_head(connection, parent_id)
            execution = await lock_head(connection, execution_id)
            if parent is None or execution is None:
                raise UnknownExecutionError(parent_id if parent is None else execution_id)
            if cut > parent[1]:
                raise BeyondLogError(parent_id, cut, parent[1])
            if known is not None:
                return known
            await insert_branch(connection, name, execution[0], parent[0], cut)
            return (await _branches(connection, _BY_EXECUTION, execution_id))[0]

        branch: Branch = await self._store._change(execution_id, add, repeat=True)
        return branch

    async def get(self, origin_id: str, name: str) -> Branch | None:
        found = await self._read(origin_id, _BY_NAME, origin_id, name)
        return found[0] if found else None

    async def refs(self, origin_id: str) -> list[Branch]:
        return await self._read(origin_id, _REFS, origin_id)

    async def tips(self, origin_id: str) -> list[Tip]:
        rows: Any = await self._store._read(
            origin_id, lambda connection: connection.fetch(_TIPS, key_of(origin_id))
        )
        return [
            Tip(load_text(name), load_text(execution), last, status) for name, execution, last, status in rows
        ]

    async def children(self, execution_id: str) -> list[Branch]:
        return await self._read(execution_id, _CHILDREN, execution_id)

    async def branch_of(self, execution_id: str) -> Branch | None:
        found = await self._read(execution_id, _BY_EXECUTION, execution_id)
        return found[0] if found else None

    async def promote(self, origin_id: str, name: str) -> Branch:
        async def promote(connection: AnyConnection) -> Branch:
            await connection.execute("SELECT lock_log()")
            if not await _branches(connection, _BY_NAME, origin_id, name):
                raise UnknownBranchError(origin_id, name)
            await connection.execute(_PROMOTE, key_of(origin_id), key_of(name))
            return (await _branches(connection, _BY_NAME, origin_id, name))[0]

        branch: Branch = await self._store._change(origin_id, promote, repeat=True)
        return branch

    async def _read(self, execution_id: str, sql: str, *texts: str) -> list[Branch]:
        branches: list[Branch] = await self._store._read(
            execution_id, lambda connection: _branches(connection, sql, *texts)
        )
        return branches


async def judge_branch(
    connection: AnyConnection, name: str, execution_id: str, parent_id: str, cut: int
) -> Branch | None:
    """Return the branch if it is there word for word. Raises `BranchExistsError` if it may not be added."""
    parent = await _branches(connection, _BY_EXECUTION, parent_id)
    origin_id = parent[0].origin_id if parent else parent_id
    in_the_way = [
        *await _branches(connection, _BY_EXECUTION, execution_id),
        *await _branches(connection, _BY_NAME, origin_id, name),
    ]
    return there_already(in_the_way, name, execution_id, parent_id, cut)


async def insert_branch(connection: AnyConnection, name: str, execution: int, parent: int, cut: int) -> None:
    """Write a branch that `judge_branch` had nothing against. Executions are given by their numbers."""
    origin = await connection.fetchval("SELECT origin FROM branches WHERE execution = $1", parent)
    if origin is None:
        origin = parent
        await connection.execute(_INSERT, parent, *key_and_long(ORIGIN), parent, None, None, True)
    await connection.execute(_INSERT, origin, *key_and_long(name), execution, parent, cut, False)


async def _branches(connection: AnyConnection, sql: str, *texts: str) -> list[Branch]:
    return [
        Branch(
            load_text(origin),
            load_text(name),
            load_text(execution),
            None if parent is None else load_text(parent),
            cut,
            main,
        )
        for origin, name, execution, parent, cut, main in await connection.fetch(sql, *map(key_of, texts))
    ]
