"""A guard for schema migrations: look, judge, ask a person if it is risky, then change the table once.

The flow is `migration_guard`, at the end of this file; above it are its three steps. `loomfast demo` kills a
process while it waits for the person and lets another one finish; `examples/migration_guard.py` runs it on a
database of yours.

Everything the flow does is an event in its log. A change that needs a person leaves this log, and rests at
sequence 10, whichever process runs it and however often:

     0  EXECUTION_STARTED
     1  SURFACE_PATCH        phase: inspecting
     2  STEP_STARTED         inspect
     3  STEP_COMPLETED       inspect
     4  SURFACE_PATCH        the facts
     5  SURFACE_PATCH        phase: assessing
     6  STEP_STARTED         assess
     7  STEP_COMPLETED       assess
     8  SURFACE_PATCH        the verdict
     9  SURFACE_PATCH        phase: waiting for approval
    10  EXECUTION_SUSPENDED  approval
        --- hours, restarts and crashes may pass here ---
    11  approval             the person's answer
    12  EXECUTION_RESUMED
    13  STEP_STARTED         apply
    14  STEP_COMPLETED       apply
    15  SURFACE_PATCH        phase: applied
    16  EXECUTION_COMPLETED
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import loomfast

logger = logging.getLogger(__name__)

Json = dict[str, Any]


class MigrationRefused(Exception):
    """The change cannot be made as it was asked for. Trying again would not help."""


# --- what comes from outside, checked before anything is logged ------------------------------------


def check_change(change: Any) -> None:
    """Accept `{database, table, action: "add" or "drop", column, type?}`; `type` is for `add`."""
    if not isinstance(change, dict):
        raise ValueError("must be an object")
    wanted = ["database", "table", "column"] + ["type"] * (change.get("action") == "add")
    if missing := [name for name in wanted if not isinstance(change.get(name), str) or not change[name]]:
        raise ValueError(f"must have the texts {', '.join(missing)}")
    if change.get("action") not in ("add", "drop"):
        raise ValueError("action must be add or drop")


def check_answer(answer: Any) -> None:
    """Accept `{approved: true or false, by: name}`."""
    if not isinstance(answer, dict) or not isinstance(answer.get("approved"), bool):
        raise ValueError("must hold approved, true or false")
    if not isinstance(answer.get("by"), str) or not answer["by"]:
        raise ValueError("must hold by, the name of who decided")


# --- the steps: the only places that touch the database ---------------------------------------------


@loomfast.step(failures=(MigrationRefused,))
def inspect(change: Json) -> Json:
    """Read what the table holds now, and refuse a change that makes no sense for it."""
    logger.info("inspecting table %s", change["table"])
    with connect(change["database"]) as db:
        columns = columns_of(db, change["table"])
        if not columns:
            raise MigrationRefused(f"{change['database']} has no table {change['table']!r}")
        present = change["column"] in columns
        if present == (change["action"] == "add"):
            raise MigrationRefused(f"column {change['column']!r} is {'already' if present else 'not'} there")
        rows = db.execute(f"SELECT count(*) FROM {quoted(change['table'])}").fetchone()[0]
        values = count_values(db, change) if change["action"] == "drop" else 0
    return {"columns": columns, "rows": rows, "values": values}


@loomfast.step
def assess(question: Json) -> Json:
    """Judge the change: losing values is risky, and so is rewriting nothing but a very long table."""
    change, facts = question["change"], question["facts"]
    logger.info("assessing %s of column %s", change["action"], change["column"])
    if facts["values"]:
        return {"risky": True, "reason": f"{facts['values']} of {facts['rows']} rows lose a value"}
    if change["action"] == "add" and "NOT NULL" in change["type"].upper() and facts["rows"]:
        return {"risky": True, "reason": f"{facts['rows']} rows have no value for it"}
    return {"risky": False, "reason": "no row loses a value"}


@loomfast.step(failures=(MigrationRefused,))
def apply(fx: loomfast.EffectContext, order: Json) -> Json:
    """Change the table, once.

    The process may die after the change and before the log knows of it; then this runs again. So the change
    and a row that names this execution are one transaction: whoever finds the row has nothing left to do.
    """
    change = order["change"]
    logger.info("applying %s of column %s", change["action"], change["column"])
    table, column = quoted(change["table"]), quoted(change["column"])
    if change["action"] == "add":
        statement = f"ALTER TABLE {table} ADD COLUMN {column} {change['type']}"
    else:
        statement = f"ALTER TABLE {table} DROP COLUMN {column}"
    with connect(change["database"]) as db:
        db.execute("BEGIN IMMEDIATE")
        db.execute("CREATE TABLE IF NOT EXISTS schema_changes (execution TEXT PRIMARY KEY, statement TEXT)")
        done = db.execute("SELECT 1 FROM schema_changes WHERE execution = ?", (fx.execution_id,)).fetchone()
        if not done:
            if change["action"] == "drop" and count_values(db, change) > order["values"]:
                raise MigrationRefused("the column has gained values since the change was assessed")
            try:
                db.execute(statement)
            except sqlite3.Error as error:
                raise MigrationRefused(f"{statement}: {error}") from error
            db.execute("INSERT INTO schema_changes VALUES (?, ?)", (fx.execution_id, statement))
        db.execute("COMMIT")
    return {"statement": statement}


# --- the flow ---------------------------------------------------------------------------------------


@loomfast.flow(input=check_change, gates={"approval": check_answer})
async def migration_guard(ctx: loomfast.WorkflowContext, change: Json) -> Json:
    """Guard one change of one table. It runs again from the top whenever it is resumed or recovered:
    what the log already holds is served from there, and neither executed nor logged again."""
    try:
        ctx.ui.set("phase", "inspecting")
        facts = await ctx.run(inspect, change)
        ctx.ui.set("facts", facts)

        ctx.ui.set("phase", "assessing")
        verdict = await ctx.run(assess, {"change": change, "facts": facts})
        ctx.ui.set("verdict", verdict)

        if verdict["risky"]:
            ctx.ui.set("phase", "waiting for approval")
            answer = await ctx.suspend("approval")
            if not answer["approved"]:
                ctx.ui.set("phase", "rejected")
                return {"outcome": "rejected", "by": answer["by"]}
        else:
            ctx.ui.set("phase", "applying")

        done = await ctx.run(apply, {"change": change, "values": facts["values"]})
        ctx.ui.set("phase", "applied")
        return {"outcome": "applied", **done}
    except MigrationRefused as refusal:
        ctx.ui.set("phase", "refused")
        return {"outcome": "refused", "reason": str(refusal)}


# --- SQLite -----------------------------------------------------------------------------------------


@contextmanager
def connect(database: str) -> Iterator[sqlite3.Connection]:
    """Open a database that exists; transactions are the caller's, and one left open is rolled back."""
    try:
        db = sqlite3.connect(
            Path(database).absolute().as_uri() + "?mode=rw", uri=True, isolation_level=None, timeout=10
        )
    except sqlite3.OperationalError as error:
        raise MigrationRefused(f"{database}: {error}") from error
    try:
        yield db
    finally:
        db.close()


def quoted(name: str) -> str:
    """Return an identifier as SQL writes it, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def columns_of(db: sqlite3.Connection, table: str) -> list[str]:
    """Return the names of a table's columns; none if there is no such table."""
    return [name for (name,) in db.execute("SELECT name FROM pragma_table_info(?)", (table,))]


def count_values(db: sqlite3.Connection, change: Json) -> int:
    """Return how many rows hold a value that dropping the column would lose."""
    count: int = db.execute(
        f"SELECT count({quoted(change['column'])}) FROM {quoted(change['table'])}"
    ).fetchone()[0]
    return count


def create_sample(database: str) -> None:
    """Make a small shop database to try this on: `customers`, of whom some still have a fax number."""
    db = sqlite3.connect(database)
    try:
        with db:
            db.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, fax TEXT)")
            db.executemany(
                "INSERT INTO customers (name, fax) VALUES (?, ?)",
                [(f"customer {n}", f"+49 30 {5550000 + n}" if n % 4 == 0 else None) for n in range(1, 241)],
            )
    finally:
        db.close()
