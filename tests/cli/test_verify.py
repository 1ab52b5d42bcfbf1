"""`loomfast verify`, run as its users run it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from loomfast import SqliteEventStore
from tests.stores.programs import foreign
from tests.stores.whole import fill


async def filled(path: Path) -> Path:
    async with await SqliteEventStore.open(path) as store:
        await fill(store)
    return path


def damage(path: Path, sql: str) -> None:
    connection = foreign(path)
    connection.execute(sql)
    connection.close()


def verify(*arguments: str | Path) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "loomfast", "verify", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


COUNTS = "8 executions, 51 events, 6 snapshots, 3 branches, 0 faults\n"


async def test_a_whole_store_passes_and_nothing_is_said_on_stderr(tmp_path: Path) -> None:
    assert verify(await filled(tmp_path / "a.db")) == (0, COUNTS, "")


async def test_each_fault_is_a_line_and_the_exit_code_tells(tmp_path: Path) -> None:
    path = await filled(tmp_path / "a.db")
    damage(path, "UPDATE events SET timestamp = 0 WHERE position IN (11, 12)")
    code, out, _ = verify(path)
    assert code == 1
    assert out.splitlines() == [
        "execution 'x', sequences 6 to 7: the row is not as it was written",
        "8 executions, 49 events, 6 snapshots, 3 branches, 1 faults",
    ]


async def test_faults_as_json_are_lines_with_the_same_facts(tmp_path: Path) -> None:
    path = await filled(tmp_path / "a.db")
    damage(path, "UPDATE events SET timestamp = 0 WHERE position = 11")
    code, out, _ = verify("--json", path)
    assert code == 1
    assert [json.loads(line) for line in out.splitlines()] == [
        {"executionId": "x", "sequence": 6, "through": 6, "reason": "the row is not as it was written"},
        {"executions": 8, "events": 50, "snapshots": 6, "branches": 3, "faults": 1},
    ]


@pytest.mark.parametrize("content", [None, b"", b"no database"])
def test_what_cannot_be_checked_is_neither_whole_nor_faulty(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.db"
    if content is not None:
        path.write_bytes(content)
    code, out, complaint = verify(path)
    assert (code, out) == (2, "")
    assert complaint.startswith(f"loomfast: {path}: ")
    assert not path.exists() or path.read_bytes() == content


async def test_progress_is_for_a_terminal_and_is_wiped_off(tmp_path: Path) -> None:
    code, out, shown = _on_a_terminal(await filled(tmp_path / "a.db"))
    assert (code, out) == (0, COUNTS.encode())
    assert shown.endswith(b"\r\x1b[K")


def _on_a_terminal(path: Path) -> tuple[int, bytes, bytes]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "loomfast", "verify", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, timeout=60, check=False)
    shown = os.read(ours, 65_536)
    os.close(theirs)
    os.close(ours)
    return done.returncode, done.stdout, shown
