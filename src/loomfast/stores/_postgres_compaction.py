"""Cutting and copying logs in a PostgreSQL store.

What lives here: `truncate_prefix` and `CopyPrefix`, performed by the writer in a transaction. What must
not: anything that is not about whole prefixes.

Invariant: `executions.cut` is raised in the transaction that deletes the events below it, so a reader that
sees a log with a hole also sees its cut. A cut holds the lock on its execution's row; a copy gives out
positions, so it holds the log's lock, and other writes wait for it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from loomfast._errors import (
    BeyondLogError,
    PrefixTruncatedError,
    SnapshotNeededError,
    UnknownExecutionError,
)
from loomfast._kernels import Envelope, admit
from loomfast.stores._forking import Copier
from loomfast.stores._postgres_branches import insert_branch, judge_branch
from loomfast.stores._postgres_connections import AnyConnection
from loomfast.stores._postgres_ledger import APPEND, arguments, head_row, load_heads
from loomfast.stores._postgres_rows import READ_COLUMNS, key_and_long, place_of, to_event, to_row
from loomfast.stores._postgres_snapshots import is_covered, lock_head
from loomfast.stores._unreadable import incomplete

# What is copied at a time: in events, and in bytes of their bodies, since a message to the server is bounded.
_CHUNK: Final = 1_000
_CHUNK_BYTES: Final = 4 * 2**20
_LAST_OF_CHUNK: Final = (
    "SELECT coalesce(max(sequence), $2) FROM"
    " (SELECT sequence, sum(octet_length(body)) OVER (ORDER BY sequence) AS size FROM events"
    " WHERE execution = $1 AND sequence BETWEEN $2 AND $3) AS chunk WHERE size <= $4"
)
_RANGE: Final = (
    f"SELECT {READ_COLUMNS} FROM events WHERE execution = $1 AND sequence BETWEEN $2 AND $3 ORDER BY sequence"
)


async def truncate_prefix(connection: AnyConnection, execution_id: str, before: int) -> int:
    """Remove the events with `0 < sequence < before`; return how many were removed."""
    found = await lock_head(connection, execution_id)
    if found is None:
        raise UnknownExecutionError(execution_id)
    number, last_sequence, cut = found
    new_cut = min(before, last_sequence)
    if new_cut <= cut:
        return 0
    if not await is_covered(connection, number, execution_id, new_cut - 1):
        raise SnapshotNeededError(execution_id, new_cut - 1)
    await connection.execute("UPDATE executions SET cut = $2 WHERE number = $1", number, new_cut)
    status = await connection.execute(
        "DELETE FROM events WHERE execution = $1 AND sequence BETWEEN $2 AND $3", number, cut, new_cut - 1
    )
    return int(status.split()[-1])


class CopyPrefix:
    """Copies the events 0 to `through` of one execution into a new one. Called with a connection."""

    def __init__(
        self, source_id: str, target_id: str, through: int, copier: Copier, branch_name: str | None, tag: int
    ) -> None:
        self._source_id = source_id
        self._target_id = target_id
        self._through = through
        self._copier = copier
        self._branch_name = branch_name
        self._tag = tag

    async def __call__(self, connection: AnyConnection) -> None:
        await connection.execute("SELECT lock_log()")
        source = await lock_head(connection, self._source_id)
        if source is None:
            raise UnknownExecutionError(self._source_id)
        number, last_sequence, cut = source
        if self._through > last_sequence:
            raise BeyondLogError(self._source_id, self._through, last_sequence)
        if cut > 1 and self._through > 0:
            raise PrefixTruncatedError(self._source_id, 1, cut)
        before = (await load_heads(connection, (self._target_id,)))[self._target_id]
        head = before.copy()
        head.number = await connection.fetchval("SELECT coalesce(max(number), 0) + 1 FROM executions")
        first = 0
        while first <= self._through:
            limit = min(first + _CHUNK - 1, self._through)
            last = await connection.fetchval(_LAST_OF_CHUNK, number, first, limit, _CHUNK_BYTES)
            stored = await connection.fetch(_RANGE, number, first, last)
            copies = await asyncio.to_thread(self._copies, stored, first, last)
            if first == 0:
                admit({self._target_id: before}.__getitem__, copies[:1])  # an existing target comes first
                await self._judge_branch(connection)
            for event in copies:
                head.advance(event)
            rows = await asyncio.to_thread(self._rows, head.number, copies)
            await connection.fetch(APPEND, *arguments(rows))
            first = last + 1
        target = head_row(*key_and_long(self._target_id), head)
        await connection.fetch(APPEND, *arguments([], [target]))
        if self._branch_name is not None:
            await insert_branch(connection, self._branch_name, head.number, number, self._through)

    async def _judge_branch(self, connection: AnyConnection) -> None:
        if self._branch_name is not None:
            await judge_branch(connection, self._branch_name, self._target_id, self._source_id, self._through)

    def _rows(self, number: int, copies: list[Envelope]) -> list[tuple[Any, ...]]:
        place = place_of(self._target_id)
        return [(number, self._tag, *to_row(place, event)) for event in copies]

    def _copies(self, rows: list[Any], first: int, last: int) -> list[Envelope]:
        """Copies of one chunk. Raises `StoreReadError` for a row that is not as it was written."""
        place = place_of(self._source_id)
        events = [to_event(self._source_id, place, row) for row in rows]
        if len(events) != last - first + 1 or events[0].sequence != first:
            raise incomplete(self._source_id)
        return [self._copier(event) for event in events]
