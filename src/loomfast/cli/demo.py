"""`loomfast demo`: a flow whose process is killed at its gate, and another process that finishes it.

What lives here: the two real processes, the kill, and what is printed. What must not: the flow (it is
`loomfast.examples.migration_guard`) and the judgement of what happened (`demo_proof`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import click

import loomfast
from loomfast.cli.demo_proof import Evidence, Notes, claims, describe
from loomfast.cli.output import CommandError
from loomfast.examples.migration_guard import create_sample

# How long a process may take to say where it is; far beyond what it needs.
PATIENCE_S = 60.0


@click.command()
@click.option("--db", type=click.Path(path_type=Path), help="Keep the log in this SQLite file.")
@click.option("--keep", is_flag=True, help="Keep all files, also without --db, and say where they are.")
def demo(*, db: Path | None, keep: bool) -> None:
    """Kill a process at its gate, finish its flow in another, and prove what ran how often.

    Exits 1 if anything the demo claims does not hold.
    """
    with contextlib.ExitStack() as stack:
        if keep:
            folder = Path(tempfile.mkdtemp(prefix="loomfast-demo-"))
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loomfast-demo-")))
        log = db or folder / "log.db"
        execution_id = f"demo-{secrets.token_hex(4)}"
        evidence = asyncio.run(_perform(log, execution_id, folder / "shop.db", folder / "notes.jsonl"))
        _print_timeline(evidence, execution_id)
        whole = _print_claims(evidence)
        if keep:
            click.echo(f"\nfiles: {folder}")
        if keep or db is not None:
            click.echo(f"try:   loomfast export {log} {execution_id}")
    if not whole:
        click.get_current_context().exit(1)


async def _perform(log: Path, execution_id: str, shop: Path, notes: Path) -> Evidence:
    """Run both processes to where each is meant to get, and collect what they left."""
    create_sample(str(shop))
    async with await loomfast.SqliteEventStore.open(log):
        pass
    async with _process("start", log, execution_id, shop, notes) as (first, says):
        await says("suspended")
        at_the_kill = await _read(log, execution_id)
        first.kill()
        await first.wait()
    async with _process("resume", log, execution_id, shop, notes) as (second, says):
        await says("completed")
        if await asyncio.wait_for(second.wait(), PATIENCE_S):
            raise CommandError(f"process 2 ended with {second.returncode}")
    return Evidence(
        events=await _read(log, execution_id),
        at_the_kill=at_the_kill,
        notes=Notes.read(notes),
        pids=(first.pid, second.pid),
        killed_by=first.returncode or 0,
        shop=shop,
    )


@asynccontextmanager
async def _process(
    role: str, *paths: object
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Callable[[str], Awaitable[None]]]]:
    """Start one of the demo's processes; it does not outlive the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loomfast.cli.demo_process",
        role,
        *map(str, paths),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )

    async def says(word: str) -> None:
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
        except TimeoutError:
            line = b"nothing"
        said = line.decode(errors="replace").strip() or "nothing, and ended"
        if said != word:
            raise CommandError(f"the process that should {role} the flow said {said}, not {word}")

    try:
        yield process, says
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _read(log: Path, execution_id: str) -> list[loomfast.Envelope]:
    async with await loomfast.SqliteEventStore.open(log, create=False) as store:
        return await store.read(execution_id)


def _print_timeline(evidence: Evidence, execution_id: str) -> None:
    """Print the log, with the process that wrote each event and the effect that ran inside each step."""
    first, second = evidence.pids
    judged = loomfast.fold_events(None, evidence.events).steps.get("assess").output
    click.echo(f"execution {execution_id}: drop the column customers.fax ({judged['reason']})\n")
    click.secho(f"{'seq':>4}  {'event':<20} {'process':<8} what", bold=True)
    for event in evidence.events:
        if event.sequence == len(evidence.at_the_kill):
            click.secho(
                f"      -- process 1 (pid {first}) killed: {_signal_name(evidence.killed_by)};"
                f" process 2 (pid {second}) resumes --",
                fg="red",
            )
        writers = [evidence.pids.index(pid) + 1 for pid in evidence.notes.durable.get(event.sequence, ())]
        who = ",".join(map(str, writers)) or "?"
        click.echo(f"{event.sequence:>4}  {event.event_type:<20} {who:<8} {describe(event)}")
    click.echo()


def _signal_name(returncode: int) -> str:
    return signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"


def _print_claims(evidence: Evidence) -> bool:
    found = claims(evidence)
    for claim in found:
        mark = click.style("ok  ", fg="green") if claim.holds else click.style("FAIL", fg="red", bold=True)
        click.echo(f"{mark} {claim.text}")
    return all(claim.holds for claim in found)
