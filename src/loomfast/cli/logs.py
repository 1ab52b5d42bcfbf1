"""`loomfast export` and `loomfast import`: one log as JSON lines, out of a store and into one."""

from __future__ import annotations

import asyncio
import os

import click

import loomfast
from loomfast.cli.lines import Line, fold_line, read_event, read_lines
from loomfast.cli.output import CommandError, Whole
from loomfast.stores import POSTGRES_SCHEMES

# Events read from the store at a time.
PAGE_EVENTS = 2_000

Entry = tuple[Line, loomfast.Envelope]


@click.command("export")
@click.argument("db")
@click.argument("execution_id")
def export_log(db: str, execution_id: str) -> None:
    """Print the log of an execution as JSON lines, one event each, in the language-neutral form.

    DB is the path of a SQLite file, or a postgresql:// URL.
    """
    with Whole() as out:
        asyncio.run(_export(db, execution_id, out))


async def _export(db: str, execution_id: str, out: Whole) -> None:
    async with await loomfast.open_store(db, create=False) as store:
        last = await store.last_sequence(execution_id)
        if last is None:
            raise loomfast.UnknownExecutionError(execution_id)
        for first in range(0, last + 1, PAGE_EVENTS):
            for event in await store.read_range(execution_id, first, min(first + PAGE_EVENTS - 1, last)):
                out.line(loomfast.encode(event.to_json()))


@click.command("import")
@click.argument("db")
@click.argument("file", metavar="FILE|-")
def import_log(db: str, file: str) -> None:
    """Append exported logs to a store, making its file, or its schema on PostgreSQL, if need be.

    FILE may hold the logs of several executions. Every line is checked, and every log is folded, before
    anything is written; each log is then written whole or not at all. A log may go on where the store's ends.
    """
    logs: dict[str, list[Entry]] = {}
    for line in read_lines(file):
        event = read_event(line)
        logs.setdefault(event.execution_id, []).append((line, event))
    if not logs:
        raise CommandError(f"{file}: holds no event")
    if not db.startswith(POSTGRES_SCHEMES) and not os.path.exists(db):
        for entries in logs.values():
            _check(None, entries)  # before the file is made
    asyncio.run(_import(db, logs))


async def _import(db: str, logs: dict[str, list[Entry]]) -> None:
    async with await loomfast.open_store(db) as store:
        for execution_id, entries in logs.items():
            _check(await store.fold(execution_id), entries)
        for execution_id, entries in logs.items():
            await store.append_batch([event for _, event in entries])
            click.echo(f"imported {len(entries)} events of execution {execution_id!a}")


def _check(state: loomfast.State | None, entries: list[Entry]) -> None:
    """Fold a log onto what the store holds of it. Raises `CommandError` for the first event not to fit."""
    for line, event in entries:
        if state is not None and event.sequence <= state.sequence:
            raise line.bad(f"execution {event.execution_id!a} has sequence {event.sequence} already")
        state = fold_line(line, state, event)
