"""What a store of rows says of a log that it cannot give back as it was written: one wording for every store.

What lives here: the errors that name a damaged row and a log with a part missing. What must not: rows.
"""

from __future__ import annotations

from loomfast._errors import StoreReadError


def damaged(execution_id: str, sequence: int) -> StoreReadError:
    return StoreReadError(
        execution_id, f"execution {execution_id!r}, sequence {sequence}: the row is not as it was written"
    )


def incomplete(execution_id: str) -> StoreReadError:
    return StoreReadError(
        execution_id, f"execution {execution_id!r}: the database holds a part of its log only"
    )
