"""`loomfast bench`: runs the cases of `loomfast.bench.cases` and prints ratios, limits and verdicts.

Nothing is measured here. Figures are seconds (or bytes) by variant; the ratio is what counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import click

from loomfast.bench import cases
from loomfast.cli.info import facts
from loomfast.cli.output import CommandError, print_json

# How often --check measures a case before it believes that the ratio is broken.
CHECK_ATTEMPTS = 3

_WIDTH = max(len(case.name) for case in cases.CASES)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON, with versions and CPU.")
@click.option("--quick", is_flag=True, help="Fewer rounds and smaller logs; ratios are coarser.")
@click.option(
    "--check", is_flag=True, help="Run only the quick checks that live commits are flat in history."
)
@click.option("--list", "only_list", is_flag=True, help="List the cases and measure nothing.")
def bench(*, names: tuple[str, ...], as_json: bool, quick: bool, check: bool, only_list: bool) -> None:
    """Measure the kernels against their limits and their peers, all in this run.

    Without names it measures all cases but the long ones, those with a million parked executions.

    Exits 1 if a measured ratio is over its limit or an answer is wrong.
    """
    chosen = list(cases.CASES) if only_list and not names else _choose(names)
    if check:
        chosen = [case for case in chosen if case.gate]
    if not chosen:
        raise CommandError("none of these cases is part of --check")
    if only_list:
        for case in chosen:
            click.echo(f"{case.name:<{_WIDTH}}  {case.what}")
        return
    shown = None if as_json else _print_row
    outcomes = _run(chosen, quick=quick or check, attempts=CHECK_ATTEMPTS if check else 1, shown=shown)
    if as_json:
        print_json({**facts(), "quick": quick or check, "cases": [asdict(outcome) for outcome in outcomes]})
    missed = any(outcome.ok is False or (check and outcome.ok is None) for outcome in outcomes)
    click.get_current_context().exit(1 if missed else 0)


def _choose(names: tuple[str, ...]) -> list[cases.Case]:
    try:
        return cases.choose(names)
    except KeyError as error:
        known = ", ".join(case.name for case in cases.CASES)
        raise CommandError(f"no case {error}", f"choose from {known}") from None


def _run(
    chosen: list[cases.Case], *, quick: bool, attempts: int, shown: Callable[[cases.Outcome], None] | None
) -> list[cases.Outcome]:
    if shown is not None:
        head = facts()
        click.echo(f"loomfast {head['version']} ({head['implementation']}), {head['python']}, {head['cpu']}")
        click.secho(f"{'case':<{_WIDTH}}  {'ratio':>8} {'limit':>8}       figures", bold=True)
    outcomes = []
    for case in chosen:
        outcomes.append(cases.run(case, quick=quick, attempts=attempts))
        if shown is not None:
            shown(outcomes[-1])
    return outcomes


def _print_row(outcome: cases.Outcome) -> None:
    ratio = "-" if outcome.ratio is None else f"{outcome.ratio:.3f}"
    verdict = {True: ("ok  ", "green"), False: ("OVER", "red"), None: ("-   ", "yellow")}[outcome.ok]
    if outcome.answers_equal is False:
        verdict = ("BAD ", "red")
    figures = ", ".join(f"{name} {figure(value, outcome.unit)}" for name, value in outcome.measured.items())
    mark = click.style(verdict[0], fg=verdict[1])
    click.echo(
        f"{outcome.name:<{_WIDTH}}  {ratio:>8} {outcome.limit:>8.3f}  {mark} {figures or outcome.reason}"
    )
    click.secho(f"{'':<{_WIDTH}}  {outcome.what}", dim=True)


def figure(value: float, unit: str) -> str:
    """Return a figure as a person reads it: `1.23 us`, `4.5 KB`."""
    scales = (
        ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
        if unit == "s"
        else ((1e6, "MB"), (1e3, "KB"), (1.0, "B"))
    )
    for scale, name in scales:
        if abs(value) >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value / scales[-1][0]:.3g} {scales[-1][1]}"
