"""Two ways to run a command: in this process (`invoke`), and as a process of its own (`spawn`)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result

import loomfast as lf
from loomfast.cli.app import app


class Ended(NamedTuple):
    """What a process left."""

    code: int
    out: bytes
    err: str


@pytest.fixture
def invoke() -> Callable[..., Result]:
    """Run a command in this process: `invoke("fold", "-", input=b"...")`."""

    def run(*args: object, input: bytes = b"") -> Result:
        result = CliRunner().invoke(app, [str(arg) for arg in args], input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def spawn() -> Callable[..., Ended]:
    """Run a command as a process of its own."""

    def run(*args: object, input: bytes = b"") -> Ended:
        command = [sys.executable, "-m", "loomfast", *(str(arg) for arg in args)]
        done = subprocess.run(command, input=input, capture_output=True, timeout=120)
        return Ended(done.returncode, done.stdout, done.stderr.decode())

    return run


# Everything that a careless writer of JSON loses.
HARD = {"z": -0.0, "a": "\ud800 é 😀 \x00", "big": 2**70, "e": 1e21, "": [None, True, {}]}


def log_of(execution_id: str, notes: int = 1) -> list[lf.Envelope]:
    """Return a whole log: a start, some stamped notes, an end."""
    events: list[tuple[str, Any, dict[str, object] | None]] = [
        ("EXECUTION_STARTED", {"flowId": "f", "flowVersion": "1", "input": HARD}, {"computeTarget": "gpu"})
    ]
    events += [("note", {"n": n, **HARD}, {"flowEmit": f"{n:016x}"}) for n in range(notes)]
    events.append(("EXECUTION_COMPLETED", {"output": HARD}, None))
    return [
        lf.Envelope.make(execution_id, place, *event[:2], place, event[2])
        for place, event in enumerate(events)
    ]


def lines_of(events: list[lf.Envelope]) -> bytes:
    """Return the events as JSON lines."""
    return b"".join(lf.encode(event.to_json()) + b"\n" for event in events)


def write_log(path: Path, events: list[lf.Envelope]) -> None:
    """Append events to a store."""

    async def write() -> None:
        async with await lf.SqliteEventStore.open(path) as store:
            await store.append_batch(events)

    asyncio.run(write())


def read_log(path: Path, execution_id: str) -> list[lf.Envelope]:
    """Return the log of an execution."""

    async def read() -> list[lf.Envelope]:
        async with await lf.SqliteEventStore.open(path) as store:
            return await store.read(execution_id)

    return asyncio.run(read())
