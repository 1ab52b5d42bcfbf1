"""Reading JSON lines from a file or from stdin, strictly: every fault has a file, a line and a reason.

Lines are UTF-8, end in LF or CRLF and hold one JSON object each; empty lines are passed over, and so is the
byte order mark some editors put in front. What the objects mean is for the commands.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import loomfast
from loomfast.cli.output import CommandError
from loomfast.stores import POSTGRES_SCHEMES

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# How a SQLite file begins.
_SQLITE_HEADER = b"SQLite format 3\0"


class Line(NamedTuple):
    """One object and where it stood; `number` counts from 1."""

    source: str
    number: int
    value: dict[str, Any]

    def bad(self, reason: str) -> CommandError:
        """Return the error that says what is wrong with this line."""
        return CommandError(f"{self.source}:{self.number}: {reason}")


def read_lines(path: str) -> Iterator[Line]:
    """Yield the objects of a file, or of stdin for `-`. Raises `CommandError` with file, line and reason."""
    if path.startswith(POSTGRES_SCHEMES):
        raise _database("postgresql://…")
    if path == "-":
        yield from _parse("<stdin>", sys.stdin.buffer)
    else:
        with open(path, "rb") as file:
            yield from _parse(path, file)


def _parse(source: str, file: BinaryIO) -> Iterator[Line]:
    for number, text in enumerate(file, 1):
        if number == 1:
            if text.startswith(_SQLITE_HEADER):
                raise _database(source)
            text = text.removeprefix(_BYTE_ORDER_MARK)
        text = text.strip(b" \t\r\n")
        if not text:
            continue
        line = Line(source, number, {})
        try:
            value = loomfast.decode(text)
        except loomfast.BadInputError as error:
            raise line.bad(str(error)) from error
        if not isinstance(value, dict):
            raise line.bad("must be a JSON object")
        yield line._replace(value=value)


def _database(source: str) -> CommandError:
    return CommandError(
        f"{source}: is a database, not JSON lines", "print a log of it first: loomfast export DB EXECUTION_ID"
    )


def read_event(line: Line) -> loomfast.Envelope:
    """Read the line as an event in its language-neutral form. Raises `CommandError`."""
    try:
        return loomfast.Envelope.from_json(line.value)
    except loomfast.MalformedEventError as error:
        raise line.bad(f"{error.field}: {error.reason}") from error
    except loomfast.BadInputError as error:
        raise line.bad(str(error)) from error


def fold_line(line: Line, state: loomfast.State | None, event: loomfast.Envelope) -> loomfast.State:
    """Fold the event of a line onto a state. Raises `CommandError` where the log does not fold."""
    try:
        return loomfast.fold_events(state, [event])
    except loomfast.MalformedEventError as error:
        raise line.bad(f"{error.field}: {error.reason}") from error
