"""The branches of a SQLite store.

What lives here: `SqliteBranchRegistry`, the tasks that write branches, and the queries that read them. What
must not: events. Rows name executions by their numbers, which never change once an execution has events.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import apsw

from loomfast._errors import BeyondLogError, UnknownBranchError
from loomfast.stores._forking import check_branch, there_already
from loomfast.stores._spi_branches import ORIGIN, Branch, BranchRegistry, Tip
from loomfast.stores._sqlite_rows import load_text, store_text
from loomfast.stores._sqlite_writer import Ledger, Task

if TYPE_CHECKING:
    from loomfast.stores._sqlite import SqliteEventStore

_BRANCH: Final = (
    "SELECT o.id, b.name, x.id, p.id, b.cut, b.main FROM branches b"
    " JOIN executions o ON o.number = b.origin JOIN executions x ON x.number = b.execution"
    " LEFT JOIN executions p ON p.number = b.parent WHERE "
)
_BY_NAME: Final = _BRANCH + "o.id = ? AND b.name = ?"
_BY_EXECUTION: Final = _BRANCH + "x.id = ?"
_REFS: Final = _BRANCH + "o.id = ? ORDER BY b.number"
_CHILDREN: Final = _BRANCH + "p.id = ? ORDER BY b.number"
_TIPS: Final = (
    "SELECT b.name, x.id, x.last_sequence, x.status FROM branches b"
    " JOIN executions o ON o.number = b.origin JOIN executions x ON x.number = b.execution"
    " WHERE o.id = ? ORDER BY b.number"
)
_INSERT: Final = "INSERT INTO branches (origin, name, execution, parent, cut, main) VALUES (?, ?, ?, ?, ?, ?)"


class SqliteBranchRegistry(BranchRegistry):
    """Branches in the database of a `SqliteEventStore`, written by its writer thread."""

    def __init__(self, store: SqliteEventStore) -> None:
        """Not for callers: use `store.branches`."""
        self._store = store

    async def add(self, name: str, execution_id: str, *, parent_id: str, cut: int) -> Branch:
        check_branch(name, execution_id, parent_id, cut)
        branch: Branch = await self._store._write(execution_id, AddBranch(name, execution_id, parent_id, cut))
        return branch

    async def get(self, origin_id: str, name: str) -> Branch | None:
        found = await self._branches(origin_id, _BY_NAME, origin_id, name)
        return found[0] if found else None

    async def refs(self, origin_id: str) -> list[Branch]:
        return await self._branches(origin_id, _REFS, origin_id)

    async def tips(self, origin_id: str) -> list[Tip]:
        tips: list[Tip] = await self._store._read(origin_id, partial(read_tips, origin_id=origin_id))
        return tips

    async def children(self, execution_id: str) -> list[Branch]:
        return await self._branches(execution_id, _CHILDREN, execution_id)

    async def branch_of(self, execution_id: str) -> Branch | None:
        found = await self._branches(execution_id, _BY_EXECUTION, execution_id)
        return found[0] if found else None

    async def promote(self, origin_id: str, name: str) -> Branch:
        branch: Branch = await self._store._write(origin_id, Promote(origin_id, name))
        return branch

    async def _branches(self, execution_id: str, sql: str, *texts: str) -> list[Branch]:
        query = partial(read_branches, sql=sql, texts=texts)
        branches: list[Branch] = await self._store._read(execution_id, query)
        return branches


class AddBranch(Task):
    """Register a branch whose name and executions have been checked; answered with it."""

    __slots__ = ("cut", "name")

    def __init__(self, name: str, execution_id: str, parent_id: str, cut: int) -> None:
        super().__init__(execution_id, parent_id)
        self.name = name
        self.cut = cut

    def perform(self, ledger: Ledger) -> Branch:
        execution_id, parent_id = self.execution_ids
        known = judge_branch(ledger, self.name, execution_id, parent_id, self.cut)
        parent = ledger.existing(parent_id)
        execution = ledger.existing(execution_id)
        if self.cut > parent.last_sequence:
            raise BeyondLogError(parent_id, self.cut, parent.last_sequence)
        if known is not None:
            return known
        insert_branch(ledger, self.name, execution.number, parent.number, self.cut)
        return read_branches(ledger.connection, _BY_EXECUTION, (execution_id,))[0]


class Promote(Task):
    """Make one branch of a lineage its main one; answered with it."""

    __slots__ = ("name",)

    def __init__(self, origin_id: str, name: str) -> None:
        super().__init__(origin_id)
        self.name = name

    def perform(self, ledger: Ledger) -> Branch:
        (origin_id,) = self.execution_ids
        if not read_branches(ledger.connection, _BY_NAME, (origin_id, self.name)):
            raise UnknownBranchError(origin_id, self.name)
        ledger.connection.execute(
            "UPDATE branches SET main = (name = ?) WHERE origin = ?",
            (store_text(self.name), ledger.head(origin_id).number),
        )
        return read_branches(ledger.connection, _BY_NAME, (origin_id, self.name))[0]


def judge_branch(ledger: Ledger, name: str, execution_id: str, parent_id: str, cut: int) -> Branch | None:
    """Return the branch if it is there word for word. Raises `BranchExistsError` if it may not be added."""
    parent = read_branches(ledger.connection, _BY_EXECUTION, (parent_id,))
    origin_id = parent[0].origin_id if parent else parent_id
    in_the_way = [
        *read_branches(ledger.connection, _BY_EXECUTION, (execution_id,)),
        *read_branches(ledger.connection, _BY_NAME, (origin_id, name)),
    ]
    return there_already(in_the_way, name, execution_id, parent_id, cut)


def insert_branch(ledger: Ledger, name: str, execution: int, parent: int, cut: int) -> None:
    """Write a branch that `judge_branch` had nothing against. Executions are given by their numbers."""
    origin = ledger.connection.execute("SELECT origin FROM branches WHERE execution = ?", (parent,)).get
    if origin is None:
        origin = parent
        ledger.connection.execute(_INSERT, (parent, ORIGIN, parent, None, None, True))
    ledger.connection.execute(_INSERT, (origin, store_text(name), execution, parent, cut, False))


def read_branches(connection: apsw.Connection, sql: str, texts: tuple[str, ...]) -> list[Branch]:
    rows: Any = connection.execute(sql, tuple(store_text(text) for text in texts))
    return [
        Branch(
            load_text(origin),
            load_text(name),
            load_text(execution),
            None if parent is None else load_text(parent),
            cut,
            bool(main),
        )
        for origin, name, execution, parent, cut, main in rows
    ]


def read_tips(connection: apsw.Connection, origin_id: str) -> list[Tip]:
    rows = connection.execute(_TIPS, (store_text(origin_id),))
    return [
        Tip(load_text(name), load_text(execution), last, status) for name, execution, last, status in rows
    ]
