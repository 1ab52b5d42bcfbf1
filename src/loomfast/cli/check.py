"""`loomfast check`: would today's code keep to a recorded log?"""

from __future__ import annotations

import asyncio

import click

import loomfast
from loomfast._runtime.replay import Divergence, check_log
from loomfast.cli.lines import read_event, read_lines
from loomfast.cli.named import load_named
from loomfast.cli.output import CommandError, Whole


@click.command("check")
@click.argument("file", metavar="LOG|-")
@click.option("--flow", "name", required=True, metavar="MODULE:FLOW", help="Where the flow is.")
def check(file: str, name: str) -> None:
    """Run a flow over recorded logs, executing and writing nothing, and report where it leaves them.

    LOG holds JSON lines as `export` prints them, of one or several executions. Exits 1 at a divergence.
    """
    flow = _import_flow(name)
    logs: dict[str, list[loomfast.Envelope]] = {}
    for line in read_lines(file):
        event = read_event(line)
        logs.setdefault(event.execution_id, []).append(event)
    if not logs:
        raise CommandError(f"{file}: holds no event")
    found = [divergence for events in logs.values() if (divergence := _check(flow, events)) is not None]
    with Whole() as out:
        for divergence in found:
            out.text(str(divergence))
        out.text(f"{len(logs)} checked, {len(found)} diverge")
    if found:
        raise click.exceptions.Exit(1)


def _check(flow: loomfast.FlowDefinition, events: list[loomfast.Envelope]) -> Divergence | None:
    state = loomfast.fold_events(None, events)
    if state.flow_id != flow.id:
        raise CommandError(f"execution {state.execution_id!r} is of flow {state.flow_id!r}, not {flow.id!r}")
    return asyncio.run(check_log(flow, events))


def _import_flow(name: str) -> loomfast.FlowDefinition:
    flow = load_named(name, "--flow")
    if not isinstance(flow, loomfast.FlowDefinition):
        raise CommandError(f"--flow {name}: is no flow; declare it with @flow")
    return flow
