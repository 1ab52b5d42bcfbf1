"""What SQLite itself, and the relations between the tables, say about the state of a database.

What lives here: `check_storage`, a query for a reader thread. What must not: what a log should hold
(`loomfast/verification.py`).
"""

from __future__ import annotations

from typing import Any, Final

import apsw

# How many complaints SQLite makes before it gives up.
_MOST: Final = 100
# Which columns name an execution by its number.
_NAMING: Final = (
    ("events", "t.id >> 32"),
    ("snapshots", "t.id >> 32"),
    ("branches", "t.execution"),
    ("branches", "t.origin"),
    ("branches", "t.parent"),
    ("recoveries", "t.execution"),
)


def check_storage(connection: apsw.Connection) -> list[str]:
    """Read every page: are trees, records and indexes as they should be, and does every row belong to one?"""
    complaints: list[str] = []
    try:
        for (said,) in connection.execute(f"PRAGMA integrity_check({_MOST})"):
            lines = str(said).splitlines()
            complaints += [line for line in lines if line != "ok" and not line.startswith("***")]
    except apsw.CorruptError as error:
        complaints.append(f"the check ended early: {error}")
    for table, number in _NAMING:
        try:
            found: Any = connection.execute(
                f"SELECT count(*), min({number}) FROM {table} t WHERE {number} IS NOT NULL"
                f" AND NOT EXISTS (SELECT 1 FROM executions x WHERE x.number = {number})"
            ).fetchone()
        except apsw.CorruptError:
            continue  # the check above has said so
        count, first = found
        if count:
            complaints.append(f"table {table}: {count} rows name no execution, the first of them {first}")
    return complaints
