"""Every flow of `flows.py`, stopped after every write, on each store, with each implementation, under seeds.

Where the time goes, and why so: the memory store is cheap, so it carries the seeds (other interleavings, slow
writes) and the second crashes; SQLite adds that a process comes back to what is really in the file. Which
kernels run is decided once per process, so the other implementation has a process of its own: the flows and
the harness are the same there, and that it runs what it says is checked inside.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import loomfast as lf
from loomfast.testing import Crash, Scenario, crash_matrix, play_case
from tests.crash.flows import SCENARIOS
from tests.crash.stores import memory, sqlite

NAMES = [scenario.name for scenario in SCENARIOS]
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)


@pytest.mark.parametrize("seed", [0, 1, 2])
@each_scenario
def test_every_event_boundary_survives_a_crash_and_a_second_one(scenario: Scenario, seed: int) -> None:
    report = crash_matrix(scenario, memory(), seed=seed, batch_events=1)
    assert report.cases >= 4 * report.writes


@pytest.mark.parametrize("seed", [4])
@each_scenario
def test_every_batch_as_the_journal_makes_them_survives_a_crash(scenario: Scenario, seed: int) -> None:
    crash_matrix(scenario, memory(), seed=seed, batch_events=512)


@each_scenario
def test_a_process_that_comes_back_to_its_sqlite_file_goes_on(scenario: Scenario, tmp_path: Path) -> None:
    crash_matrix(scenario, sqlite(tmp_path / "log.db"), seed=5, batch_events=1, second_crashes=0)


def test_the_other_implementation_goes_through_the_same_crashes() -> None:
    other = "pure" if lf.implementation() == "native" else "native"
    script = f"""
import loomfast
from loomfast.testing import crash_matrix
from tests.crash.flows import SCENARIOS
from tests.crash.stores import memory
assert loomfast.implementation() == {other!r}
print(sum(crash_matrix(scenario, memory(), seed=6).cases for scenario in SCENARIOS))
"""
    outcome = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "LOOMFAST_IMPL": other},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert int(outcome.stdout) > 1_000


@pytest.mark.parametrize("seed", [0, 7])
@each_scenario
def test_the_same_seed_writes_the_same_log(scenario: Scenario, seed: int, tmp_path: Path) -> None:
    """To the millisecond; with threads in it too, since outside work takes turns and no virtual time."""
    crashes = [Crash(4, acknowledged=True)]
    for stores in ((memory(), memory()), (sqlite(tmp_path / "1.db"), sqlite(tmp_path / "2.db"))):
        first, again = (play_case(scenario, store, seed=seed, crashes=crashes) for store in stores)
        assert [_line(event) for event in first.log] == [_line(event) for event in again.log]
        assert first.world.calls == again.world.calls


def _line(event: lf.Envelope) -> tuple[Any, ...]:
    return event.sequence, event.event_type, event.timestamp, event.stamp, repr(event.payload)


def test_between_them_the_flows_use_every_verb_of_a_context() -> None:
    files = Path(__file__).parent.glob("flows_of_*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    verbs = [name for name in vars(lf.WorkflowContext) if not name.startswith("_")]
    surface = ["set", "merge", "append", "increment", "remove"]
    kernel_side = {"ui", "end", "close", "settle", "cancel", "execute", "execution_id", "segment"}
    for verb in sorted({*verbs} - kernel_side):
        assert f"ctx.{verb}(" in source
    for verb in surface:
        assert f"ctx.ui.{verb}(" in source
    assert len(SCENARIOS) >= 20
