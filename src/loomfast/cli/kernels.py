"""`loomfast fold` and `loomfast digest`: the kernels as filters over JSON lines, of any Loom kernel."""

from __future__ import annotations

import click

import loomfast
from loomfast.cli.lines import Line, fold_line, read_event, read_lines
from loomfast.cli.output import CommandError, Whole, print_json


@click.command()
@click.argument("log", metavar="LOG.jsonl|-")
def fold(log: str) -> None:
    """Fold one log and print its state as JSON.

    LOG.jsonl holds the events of one execution, one per line, as `loomfast export` writes them.
    """
    state: loomfast.State | None = None
    for line in read_lines(log):
        state = fold_line(line, state, read_event(line))
    if state is None:
        raise CommandError(f"{log}: holds no event")
    print_json(state.to_json())


@click.command()
@click.argument("file", default="-", metavar="[FILE|-]")
def digest(file: str) -> None:
    """Print the emit digest of each line of JSON: {"segment", "eventType", "payload"}.

    Other members of a line are passed over. Nothing is printed unless every line is good.
    """
    with Whole() as out:
        for line in read_lines(file):
            out.line(_digest_of(line).encode())


def _digest_of(line: Line) -> str:
    for name in ("segment", "eventType", "payload"):
        if name not in line.value:
            raise line.bad(f"{name}: is missing")
    segment, event_type = line.value["segment"], line.value["eventType"]
    if not isinstance(segment, int) or isinstance(segment, bool) or segment < 0:
        raise line.bad("segment: must be a whole number, 0 or more")
    if not isinstance(event_type, str):
        raise line.bad("eventType: must be text")
    try:
        return loomfast.format_digest(loomfast.digest(segment, event_type, line.value["payload"]))
    except loomfast.BadInputError as error:
        raise line.bad(str(error)) from error
