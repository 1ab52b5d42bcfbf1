"""Who else may be at the database: another connection, and programs in processes of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import apsw

from loomfast.stores import PostgresEventStore


def start_program(source: str, *arguments: Path | str, stdin: bool = False) -> subprocess.Popen[str]:
    """Start a program of its own; `stdin` gives it a pipe to read from."""
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]
    asked = subprocess.PIPE if stdin else None
    return subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_program(source: str, *arguments: Path | str, timeout_s: float) -> str:
    """Return what it printed. Fails on a non-zero exit, or on anything said on stderr."""
    process = start_program(source, *arguments)
    try:
        printed, complaints = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert (process.returncode, complaints) == (0, ""), complaints
    return printed


def foreign(path: Path) -> apsw.Connection:
    """Open a connection that is not the store's, of the same SQLite."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(5000)
    return connection


def on_the_server(store: PostgresEventStore, sql: str, *arguments: Any) -> None:
    """Run a statement behind a store's back, in its schema."""

    async def run() -> None:
        connection = await store._connections.connect()
        await connection.execute(sql, *arguments)
        await connection.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    thread.join()


def damage_kept(path: Path, snapshot: Any) -> None:
    """Put a bad snapshot where a good one is, behind the store's back."""
    with foreign(path) as connection:
        connection.execute(
            "UPDATE snapshots SET body = ? WHERE id & 4294967295 = ?", (snapshot.body, snapshot.sequence)
        )


async def on_the_writer(store: Any, sql: str) -> None:
    """Run a statement on the writer's own connection, in its thread."""
    from loomfast.stores import _sqlite_writer as writer

    class Judged(writer.AcquireFence):
        __slots__ = ()

    original = writer.Ledger.commit

    def commit(ledger: Any, calls: list[Any], deadline: float) -> list[tuple[Any, Any]]:
        if isinstance(calls[0], Judged):
            ledger.connection.execute(sql)
            return [(calls[0], None)]
        return original(ledger, calls, deadline)

    writer.Ledger.commit = commit  # type: ignore[method-assign]  # undone below
    try:
        await store._ask(store._writer, None, Judged("", None))
    finally:
        writer.Ledger.commit = original  # type: ignore[method-assign]  # as it was
