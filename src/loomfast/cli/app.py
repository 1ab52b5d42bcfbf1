"""The group of all commands, and what becomes of an error in any of them.

A command raises; this file decides what the terminal sees. Errors of loomfast and of the file system are one
line on stderr with the error's hint, and exit code 2. Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import os
from typing import Any

import click

import loomfast
from loomfast.cli.bench import bench
from loomfast.cli.check import check
from loomfast.cli.demo import demo
from loomfast.cli.executions import list_executions
from loomfast.cli.info import info
from loomfast.cli.kernels import digest, fold
from loomfast.cli.logs import export_log, import_log
from loomfast.cli.output import CommandError
from loomfast.cli.set_aside import release, set_aside
from loomfast.cli.show import show
from loomfast.cli.verify import verify
from loomfast.cli.worker import worker

# What a shell reports for a program that a closed pipe ended: 128 + SIGPIPE.
CLOSED_PIPE = 141


class Commands(click.Group):
    """A click group that reports errors as this file's opening says."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _point_stdout_nowhere()
            ctx.exit(CLOSED_PIPE)
        except loomfast.LoomError as error:
            raise CommandError(str(error), error.hint) from error
        except OSError as error:
            if error.filename is None:
                _point_stdout_nowhere()  # it was a write: a full disk, say
            raise CommandError(f"{error.filename or 'input/output'}: {error.strerror or error}") from error


def _point_stdout_nowhere() -> None:
    """Keep the interpreter's own flush at exit from complaining about an output that cannot be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(loomfast.__version__, prog_name="loomfast")
def app() -> None:
    """Durable execution for Python: try it, look into its logs, measure it."""


for command in (
    demo,
    bench,
    info,
    list_executions,
    show,
    export_log,
    import_log,
    fold,
    digest,
    check,
    verify,
    worker,
    set_aside,
    release,
):
    app.add_command(command)
