"""What commands write and how they fail: bytes in UTF-8 on stdout, one line on stderr.

Output that another program may read is whole or absent: `Whole` holds it back until the last line is known to
be good. Nothing here knows any command.
"""

from __future__ import annotations

import shutil
import sys
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import Any, Self

import click

import loomfast

# Held in memory up to this size, and in a temporary file beyond it.
SPOOL_BYTES = 16 * 1024 * 1024


class CommandError(click.ClickException):
    """Bad input or an unusable store: `loomfast: message (hint)` on stderr, exit code 2."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: Any = None) -> None:
        line = f"loomfast: {self.message}" + (f" ({self.hint})" if self.hint else "")
        click.echo(printable(line), file=file or sys.stderr)


def printable(text: str) -> str:
    """Return a text as one line that any terminal can show, whatever stood in the input that it quotes."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class Whole:
    """Collects bytes, and writes them to stdout when its block ends without an error."""

    def __init__(self) -> None:
        self._held = SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115  # closed by __exit__

    def line(self, data: bytes) -> None:
        """Add one line."""
        self._held.write(data + b"\n")

    def text(self, text: str) -> None:
        """Add one line for a person to read."""
        self.line(printable(text).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._held:
            if exc_type is None:
                stdout = sys.stdout.buffer
                self._held.seek(0)
                shutil.copyfileobj(self._held, stdout)
                stdout.flush()


def print_json(value: object) -> None:
    """Write a value as one line of JSON."""
    with Whole() as out:
        out.line(loomfast.encode(value))
