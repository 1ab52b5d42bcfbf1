"""What the processes of a soak say of what they did and were promised: lines of JSON, in one order.

What lives here: how a line is written and read. What must not: what a line means to the driver or the judge.

A line is an array: a word, mostly the execution it is about, and what there is to say of it. Every process
that may be killed writes to one pipe, or appends to one file, each line with a single unbuffered write,
shorter than what a pipe takes whole. So a line is there as a whole or not at all, survives its writer, and
lines of several threads and processes stand in the order in which they were said. Nothing is said before it
is true: an effect says `begin` before it acts and `end` once it has; `committed`, `started` and `result`
follow the durable write.

    asked id plan             the driver wants this execution
    started id, existed id    its start returned, or was refused as a repeat
    committed id sequence type checksum payload     an event is durable (`on_commit`)
    begin id key attempt pid  an effect begins, in this process
    end id key output pid     it has acted
    answered id gate answer   an answer was accepted
    result id output          a handle gave the result
    forked id child           a fork was made
    released id key           a step in doubt is about to be released
    repeated id               the driver's own repeat of a start was refused
    broken sentence           what must not happen has happened
    round n                   the driver begins a round; `killed` follows

Other words are for the driver (`ready`, `state`, `absent`, `failed`) or for whoever reads the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

# What POSIX promises to write to a pipe as a whole, and Linux does: 4,096 bytes.
LONGEST = 4096


def say(said: int, *line: Any) -> None:
    """Write one line, whole, to a pipe or to a file that is open for appending."""
    text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    if len(text) > LONGEST:
        raise ValueError(f"too long to be written whole: {text[:100]!r}")
    os.write(said, text)


def lines(texts: Iterable[bytes]) -> Iterator[list[Any]]:
    """Read lines."""
    for text in texts:
        yield json.loads(text)
