"""Guard a schema change of a SQLite database, with a log that survives this process.

    python examples/migration_guard.py sample shop.db
    python examples/migration_guard.py change shop.db customers drop fax
    python examples/migration_guard.py answer shop.db EXECUTION yes --by ada

The second command parks a risky change and ends; the third, a process of its own and perhaps a week later,
goes on from there. The flow itself is in `loomfast.examples.migration_guard`. The log is `<database>.loom`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3

from loomfast import ExecutionHandle, LoomError, SqliteEventStore, WorkflowRuntime
from loomfast.examples.migration_guard import create_sample, migration_guard


async def change(args: argparse.Namespace) -> None:
    """Start the flow on one change, and say where it came to rest."""
    order = {name: getattr(args, name) for name in ("database", "table", "action", "column", "type")}
    async with (
        await SqliteEventStore.open(args.database + ".loom") as store,
        WorkflowRuntime(store) as runtime,
    ):
        await report(await runtime.start(migration_guard, order), args.database)


async def answer(args: argparse.Namespace) -> None:
    """Give a parked change its answer and let it run to its end."""
    async with (
        await SqliteEventStore.open(args.database + ".loom") as store,
        WorkflowRuntime(store, flows=[migration_guard]) as runtime,
    ):
        payload = {"approved": args.word == "yes", "by": args.by}
        await report(await runtime.resume(args.execution, "approval", payload), args.database)


async def report(handle: ExecutionHandle, database: str) -> None:
    """Print where an execution rests."""
    state = await handle.rest()
    if state.status == "suspended":
        verdict = state.steps.get("assess").output
        print(f"risky: {verdict['reason']}. Answer it with:")
        print(f"  python examples/migration_guard.py answer {database} {handle.execution_id} yes --by NAME")
    else:
        print(await handle.result())


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    sample = commands.add_parser("sample", help="make a database to try this on")
    sample.set_defaults(run=None)
    start = commands.add_parser("change", help="ask for a change")
    start.set_defaults(run=change)
    reply = commands.add_parser("answer", help="answer a change that waits")
    reply.set_defaults(run=answer)
    for command in (sample, start, reply):
        command.add_argument("database", type=os.path.abspath)
    start.add_argument("table")
    start.add_argument("action", choices=("add", "drop"))
    start.add_argument("column")
    start.add_argument("type", nargs="?", default="TEXT", help="of the column to add")
    reply.add_argument("execution")
    reply.add_argument("word", choices=("yes", "no"))
    reply.add_argument("--by", required=True, help="who decided")
    args = parser.parse_args()
    try:
        if args.run is None:
            create_sample(args.database)
        else:
            asyncio.run(args.run(args))
    except LoomError as error:
        parser.exit(2, f"{error}\n{error.hint}\n")
    except sqlite3.Error as error:
        parser.exit(2, f"{args.database}: {error}\n")


if __name__ == "__main__":
    main()
