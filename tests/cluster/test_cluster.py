"""Real workers, disturbed: a short form of `python -m tests.cluster.run`.

What is done and in which order comes from a seed; whom it hits, and what the machine makes of it, differs
from run to run. Nothing is timed: each kind of disturbance is played once, and then everything has to settle.
What fails keeps the files from which it was judged (pytest's `tmp_path`).
"""

from __future__ import annotations

from pathlib import Path

from loomfast.testing.postgres import PostgresServer
from tests.cluster.disturbances import NETWORK_KINDS
from tests.cluster.driver import Cluster
from tests.cluster.judge import Verdict
from tests.cluster.run import text_of


def check(verdict: Verdict, kinds: tuple[str, ...], processes: int) -> None:
    counts = verdict.counts
    assert not verdict.broken, text_of(verdict)
    assert all(counts[f"disturbed {kind}"] for kind in kinds), text_of(verdict)
    assert counts["process"] > processes, text_of(verdict)
    assert counts["executions"] == counts["completed executions"] + counts["cancelled executions"]
    assert all(counts[word] for word in ("started", "answered", "result", "compared")), text_of(verdict)


async def test_four_workers_on_postgres_killed_stopped_and_cut_off_lose_and_repeat_nothing(
    tmp_path: Path,
) -> None:
    """F18, F41, L12: over proxies that are cut and frozen for longer than a lease lasts."""
    with PostgresServer() as server:
        verdict = await Cluster(tmp_path, seed=7, workers=4, server=server).play(0)
    check(verdict, ("kill", "stop", *NETWORK_KINDS), processes=6)


async def test_two_workers_on_one_file_killed_and_stopped_lose_and_repeat_nothing(tmp_path: Path) -> None:
    verdict = await Cluster(tmp_path, seed=8, workers=2).play(0)
    check(verdict, ("kill", "stop"), processes=4)
