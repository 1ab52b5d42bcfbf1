"""Cutting and copying logs in a SQLite store.

What lives here: the tasks `TruncatePrefix` and `CopyPrefix`, performed on the writer thread. What must not:
anything that runs elsewhere.

Invariant: `executions.cut` is raised in the transaction that deletes the events below it, so a reader that
sees a log with a hole also sees its cut.
"""

from __future__ import annotations

from typing import Any, Final

from loomfast._errors import (
    BeyondLogError,
    PrefixTruncatedError,
    SnapshotNeededError,
)
from loomfast._kernels import admit, event_rows
from loomfast.stores._forking import Copier
from loomfast.stores._sqlite_branches import insert_branch, judge_branch
from loomfast.stores._sqlite_rows import READ_COLUMNS, to_event
from loomfast.stores._sqlite_snapshots import cut_of, is_covered
from loomfast.stores._sqlite_writer import Ledger, Task
from loomfast.stores._unreadable import incomplete

_CHUNK: Final = 1_000
_RANGE: Final = f"SELECT {READ_COLUMNS} FROM events WHERE id BETWEEN ? AND ? ORDER BY id"


class TruncatePrefix(Task):
    """Remove the events with `0 < sequence < before`; answered with how many were removed."""

    __slots__ = ("before",)

    def __init__(self, execution_id: str, before: int) -> None:
        super().__init__(execution_id)
        self.before = before

    def perform(self, ledger: Ledger) -> int:
        (execution_id,) = self.execution_ids
        head = ledger.existing(execution_id)
        cut = cut_of(ledger.connection, head.number)
        new_cut = min(self.before, head.last_sequence)
        if new_cut <= cut:
            return 0
        if not is_covered(ledger.connection, head.number, execution_id, new_cut - 1):
            raise SnapshotNeededError(execution_id, new_cut - 1)
        first = head.number << 32
        ledger.connection.execute("UPDATE executions SET cut = ? WHERE number = ?", (new_cut, head.number))
        ledger.connection.execute(
            "DELETE FROM events WHERE id BETWEEN ? AND ?", (first + cut, first + new_cut - 1)
        )
        return ledger.connection.changes()


class CopyPrefix(Task):
    """Copy the events 0 to `through`; answered with None."""

    __slots__ = ("branch_name", "copier", "through")

    def __init__(
        self, source_id: str, target_id: str, through: int, copier: Copier, branch_name: str | None
    ) -> None:
        super().__init__(target_id, source_id)
        self.through = through
        self.copier = copier
        self.branch_name = branch_name

    def perform(self, ledger: Ledger) -> None:
        target_id, source_id = self.execution_ids
        source = ledger.existing(source_id)
        if self.through > source.last_sequence:
            raise BeyondLogError(source_id, self.through, source.last_sequence)
        cut = cut_of(ledger.connection, source.number)
        if cut > 1 and self.through > 0:
            raise PrefixTruncatedError(source_id, 1, cut)
        head = ledger.head(target_id).copy()
        position = ledger.position
        for first in range(0, self.through + 1, _CHUNK):
            copies = self._read(ledger, source_id, source.number, first)
            if first == 0:
                admit(ledger.head, copies[:1])  # an existing target comes before a taken name
                if self.branch_name is not None:
                    judge_branch(ledger, self.branch_name, target_id, source_id, self.through)
                head.number = ledger.number + 1
            for event in copies:
                head.advance(event)
            ledger.write_events(event_rows(head.number, position + 1, copies))
            position += len(copies)
        ledger.write_head(target_id, head)
        if self.branch_name is not None:
            insert_branch(ledger, self.branch_name, head.number, source.number, self.through)
        ledger.adopt(target_id, head, position)

    def _read(self, ledger: Ledger, source_id: str, number: int, first: int) -> list[Any]:
        """Copies of one chunk. Raises `StoreReadError` for a row that is not as it was written."""
        low = (number << 32) + first
        high = (number << 32) + min(first + _CHUNK - 1, self.through)
        rows: list[Any] = ledger.connection.execute(_RANGE, (low, high)).fetchall()
        events = [to_event(source_id, row) for row in rows]
        if len(events) != high - low + 1:
            raise incomplete(source_id)
        return [self.copier(event) for event in events]
