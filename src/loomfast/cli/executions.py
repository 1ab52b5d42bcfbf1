"""`loomfast list`: which executions a store holds, and where each stands."""

from __future__ import annotations

import asyncio

import click

import loomfast
from loomfast._events import STATUSES
from loomfast.cli.output import Whole

# Executions read at a time.
PAGE = 500


@click.command("list")
@click.argument("db")
@click.option("--status", type=click.Choice(STATUSES), help="Only those of this status.")
@click.option("--flow", "flow_id", metavar="FLOW_ID", help="Only those of this flow.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many.")
@click.option(
    "--after", type=click.IntRange(min=0), default=0, help="Only those behind this position of the listing."
)
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON.")
def list_executions(
    db: str, *, status: str | None, flow_id: str | None, limit: int | None, after: int, as_json: bool
) -> None:
    """List the executions of a store, oldest first: id, flow, status, last sequence, position.

    DB is the path of a SQLite file, or a postgresql:// URL. To go on behind a line, give its position to
    --after.
    """
    with Whole() as out:
        asyncio.run(_list(db, out, status, flow_id, limit, after, as_json=as_json))


async def _list(
    db: str,
    out: Whole,
    status: str | None,
    flow_id: str | None,
    limit: int | None,
    after: int,
    *,
    as_json: bool,
) -> None:
    listed = 0
    async with await loomfast.open_store(db, create=False) as store:
        while page := await store.list_executions(status=status, after=after, limit=PAGE):
            for execution in page:
                if flow_id is not None and execution.flow_id != flow_id:
                    continue
                out.line(_json(execution)) if as_json else out.text(_text(execution))
                listed += 1
                if listed == limit:
                    return
            after = page[-1].position


def _text(execution: loomfast.ExecutionSummary) -> str:
    return (
        f"{execution.execution_id}  {execution.flow_id}  {execution.status}"
        f"  sequence {execution.last_sequence}  position {execution.position}"
    )


def _json(execution: loomfast.ExecutionSummary) -> bytes:
    return loomfast.encode(
        {
            "executionId": execution.execution_id,
            "flowId": execution.flow_id,
            "status": execution.status,
            "lastSequence": execution.last_sequence,
            "position": execution.position,
        }
    )
