"""`loomfast verify`: is a store whole?"""

from __future__ import annotations

import asyncio
import sys
from time import monotonic

import click

import loomfast
from loomfast.cli.output import Whole

# Between two lines of progress.
_EVERY_S = 0.2


@click.command("verify")
@click.argument("db")
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON.")
def verify(db: str, *, as_json: bool) -> None:
    """Read all of a store, check it, and report each fault.

    Every event is read by its checksum and every log folded; heads, snapshots, branches, timers and the total
    order are held against that, and the database against itself. Exits 1 when a fault was found.
    """
    with Whole() as out:
        verified = asyncio.run(_verify(db, out, as_json=as_json))
        counts = {
            "executions": verified.executions,
            "events": verified.events,
            "snapshots": verified.snapshots,
            "branches": verified.branches,
            "faults": verified.faults,
        }
        if as_json:
            out.line(loomfast.encode(counts))
        else:
            out.text(", ".join(f"{number} {name}" for name, number in counts.items()))
    if verified.faults:
        raise click.exceptions.Exit(1)


async def _verify(db: str, out: Whole, *, as_json: bool) -> loomfast.Verified:
    def report(fault: loomfast.Fault) -> None:
        if as_json:
            fields = {"executionId": fault.execution_id, "sequence": fault.sequence, "through": fault.through}
            out.line(loomfast.encode({**fields, "reason": fault.reason}))
        else:
            out.text(str(fault))

    progress = _Progress()
    async with await loomfast.open_store(db, create=False) as store:
        try:
            return await loomfast.verify_store(store, report, progress=progress)
        finally:
            progress.clear()


class _Progress:
    """Says on a terminal how far it has come, and nothing anywhere else."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._next = monotonic() + _EVERY_S

    def __call__(self, counts: loomfast.Verified) -> None:
        if self._shown and monotonic() >= self._next:
            self._next = monotonic() + _EVERY_S
            said = f"{counts.executions} executions, {counts.events} events, {counts.faults} faults"
            click.echo(f"\r{said}\x1b[K", err=True, nl=False)

    def clear(self) -> None:
        if self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)
