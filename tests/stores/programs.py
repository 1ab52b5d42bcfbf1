"""Who else may be at the database: another connection, and programs in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import apsw


def start_program(source: str, *arguments: Path | str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


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
