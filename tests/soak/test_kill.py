"""Real processes, killed under load: a short form of `python -m tests.soak.kill`, and a test of the harness.

The plans and the moments come from a seed; what the machine makes of it differs from run to
run. What fails says its seed and keeps the files from which it was judged (pytest's `tmp_path`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from loomfast.testing.postgres import PostgresServer
from tests import breakages
from tests.soak.driver import Soak
from tests.soak.kill import text_of
from tests.soak.told import PROMISES


async def test_workers_killed_on_sqlite_lose_repeat_and_double_nothing(tmp_path: Path) -> None:
    report = await Soak(str(tmp_path / "soak.db"), tmp_path, seed=41).play(6)
    assert not report.broken, text_of(report)
    assert (report.rounds, report.kills["worker"]) == (6, 6)
    assert report.counts["compared"] == report.counts["executions"] > 24, text_of(report)
    assert all(report.counts[word] for word in PROMISES if word not in ("existed", "forked")), text_of(report)


async def test_workers_and_servers_killed_on_postgres_lose_repeat_and_double_nothing(tmp_path: Path) -> None:
    with PostgresServer() as server:
        report = await Soak(server.dsn, tmp_path, seed=6, server=server).play(4)
    assert not report.broken, text_of(report)
    assert report.kills == {"worker": 4, "server": 1, "connections": 1}
    assert report.counts["compared"] == report.counts["executions"] > 24, text_of(report)


async def test_of_two_workers_with_leases_one_takes_over_what_the_killed_one_drove(tmp_path: Path) -> None:
    """F18: at no moment do both drive the same execution."""
    report = await Soak(str(tmp_path / "soak.db"), tmp_path, seed=43, lease_ttl_s=0.6).play(2)
    assert not report.broken, text_of(report)
    assert report.kills["worker"] == 4
    assert report.counts["recovered"] > 0, text_of(report)


# The harness itself: a worker that is broken in one place must be caught, and by the right sentence.
CAUGHT = {
    "acknowledges-early": "was acknowledged and is lost",
    "executes-steps-again": "was executed again",
    "appends-every-emit": "stamped more often than a run makes it",
    "serves-every-emit": "is lost: 0 of",
    "pays-twice": "at most once, ran 2 times",
}


@pytest.mark.parametrize("name", breakages.BY_NAME)
async def test_a_broken_worker_is_caught(name: str, tmp_path: Path) -> None:
    report = await Soak(str(tmp_path / "soak.db"), tmp_path, seed=5, broken=name).play(8)
    assert any(CAUGHT[name] in sentence for sentence in report.broken), text_of(report)
