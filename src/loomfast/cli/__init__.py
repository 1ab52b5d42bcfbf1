"""The command line. Here: the entry point, which works without click to say that click is missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `loomfast`. Exits 0; 1 if something did not hold; 2 for bad input; 141 if its reader went away."""
    try:
        import click  # noqa: F401  # only to find out whether it is there
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        print("loomfast: the command line needs click; run: pip install 'loomfast[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    from loomfast.cli.app import app

    app()
