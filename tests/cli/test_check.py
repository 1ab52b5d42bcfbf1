"""`loomfast check`, run as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import loomfast as lf
from tests.runtime.harness import runtime

FLOW = """
import loomfast as lf

@lf.flow
async def guarded(ctx, input):
    first = await ctx.run(lf.step(id="echo")(lambda value: value), {value})
    return [first, await ctx.suspend("go")]
"""


async def exported(directory: Path) -> None:
    """Write `flows.py`, and the log of one execution of it to `log.jsonl`."""
    (directory / "flows.py").write_text(FLOW.replace("{value}", "1"))
    scope: dict[str, lf.FlowDefinition] = {}
    exec((directory / "flows.py").read_text(), scope)
    store = lf.MemoryEventStore()
    async with runtime(store) as rt:
        handle = await rt.start(scope["guarded"], execution_id="x")
        await handle.rest()
    lines = [json.dumps(event.to_json()) for event in await store.read("x")]
    (directory / "log.jsonl").write_text("\n".join(lines) + "\n")


def check(directory: Path, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "loomfast", "check", *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


async def test_code_that_keeps_to_its_log_passes(tmp_path: Path) -> None:
    await exported(tmp_path)
    assert check(tmp_path, "log.jsonl", "--flow", "flows:guarded") == (0, "1 checked, 0 diverge\n", "")


async def test_code_that_leaves_its_log_is_told_where(tmp_path: Path) -> None:
    await exported(tmp_path)
    (tmp_path / "flows.py").write_text(FLOW.replace("{value}", "2"))
    code, out, _ = check(tmp_path, "log.jsonl", "--flow", "flows:guarded")
    assert code == 1
    assert "execution 'x' at sequence 2: the log has input" in out
    assert out.endswith("1 checked, 1 diverge\n")


async def test_what_cannot_be_checked_is_said_in_one_line(tmp_path: Path) -> None:
    await exported(tmp_path)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    for arguments, said in (
        (("log.jsonl", "--flow", "flows"), "must be MODULE:NAME"),
        (("log.jsonl", "--flow", "nowhere:guarded"), "No module named 'nowhere'"),
        (("log.jsonl", "--flow", "flows:lf"), "flows:lf: is no flow"),
        (("bad.jsonl", "--flow", "flows:guarded"), "bad.jsonl:1: "),
    ):
        code, out, err = check(tmp_path, *arguments)
        assert (code, out) == (2, "")
        assert said in err
        assert "Traceback" not in err
