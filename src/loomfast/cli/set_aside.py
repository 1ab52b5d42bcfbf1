"""`loomfast set-aside` and `loomfast release`: executions that crashed too often, listed and put back."""

from __future__ import annotations

import asyncio

import click

import loomfast
from loomfast.cli.output import Whole, printable

# Accounts read at a time.
PAGE = 500


@click.command("set-aside")
@click.argument("db")
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON.")
def set_aside(db: str, *, as_json: bool) -> None:
    """List the executions that crashed too often, and that no worker runs until they are released."""
    with Whole() as out:
        asyncio.run(_list(db, out, as_json=as_json))


async def _list(db: str, out: Whole, *, as_json: bool) -> None:
    async with await loomfast.open_store(db, create=False) as store:
        after: str | None = None
        while page := await store.recoveries.list(after=after, limit=PAGE):
            for account in page:
                if as_json:
                    out.line(_json(account))
                else:
                    out.text(f"{account.execution_id}  {account.crashes} crashes  {account.set_aside}")
            after = page[-1].execution_id


def _json(account: loomfast.Recovery) -> bytes:
    return loomfast.encode(
        {
            "executionId": account.execution_id,
            "crashes": account.crashes,
            "reason": account.set_aside,
        }
    )


@click.command("release")
@click.argument("db")
@click.argument("execution_id")
def release(db: str, execution_id: str) -> None:
    """Put an execution back that was set aside: the next sweep of a worker runs it. Exits 1 if it was not."""
    if asyncio.run(_release(db, execution_id)):
        click.echo(printable(f"released {execution_id}"))
    else:
        click.echo(printable(f"{execution_id} is not set aside"))
        raise click.exceptions.Exit(1)


async def _release(db: str, execution_id: str) -> bool:
    store = await loomfast.open_store(db, create=False)
    async with store, loomfast.WorkflowRuntime(store) as runtime:
        return await runtime.release(execution_id)
