"""`python -m tests.cluster.run`: disturb a cluster, and report what was found.

Exits with 0 when everything held, and 1 when something was broken: then the files stay where it says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from pathlib import Path

from loomfast.testing.postgres import PostgresServer
from tests.cluster.driver import Cluster
from tests.cluster.judge import Verdict

SHOWN = 30


def main() -> int:
    """Play what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.run", description=__doc__)
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="postgres")
    parser.add_argument("--workers", type=int, help="default: 4, and 2 on SQLite")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, help="draws plans and disturbances (default: the time)")
    arguments = parser.parse_args()
    on_server = arguments.store == "postgres"
    seed = time.time_ns() if arguments.seed is None else arguments.seed
    workers = arguments.workers or (4 if on_server else 2)
    folder = Path(tempfile.mkdtemp(prefix="loomfast-cluster-"))
    print(f"seed {seed}, files in {folder}", flush=True)
    with PostgresServer() if on_server else contextlib.nullcontext() as server:
        cluster = Cluster(folder, seed=seed, workers=workers, server=server, restarts=on_server)
        verdict = asyncio.run(cluster.play(arguments.seconds))
    print(f"{cluster.seconds:.0f} s on {arguments.store} with {workers} workers")
    print(text_of(verdict))
    if not verdict.broken:
        shutil.rmtree(folder)
    return 1 if verdict.broken else 0


def text_of(verdict: Verdict) -> str:
    """Say what a cluster did, and what of it must not be."""
    counts = verdict.counts

    def among(prefix: str) -> str:
        found = sorted((what, count) for what, count in counts.items() if what.startswith(prefix))
        return ", ".join(f"{count} {what.removeprefix(prefix)}" for what, count in found) or "none"

    return "\n".join(
        (
            f"{counts['executions']} executions ({counts['completed executions']} completed, "
            f"{counts['cancelled executions']} cancelled) with {counts['events']} events; "
            f"{counts['compared']} held against an undisturbed run",
            f"disturbed: {among('disturbed ')}; {counts['process']} processes started, "
            f"{counts['closed']} ended in order, {counts['lost']} leases lost",
            f"{counts['begin']} effects begun; again after: {among('again after ')}; "
            f"{counts['in doubt']} at-most-once steps in doubt, {counts['released']} of them released",
            f"{counts['committed']} events, {counts['started']} starts, {counts['answered']} answers, "
            f"{counts['cancelled']} cancels and {counts['result']} results acknowledged; "
            f"{counts['failed']} calls refused or failed",
            f"occurrences: {among('occurrences of ')}; left out: {among('left out of ')}",
            *(f"BROKEN: {sentence}" for sentence in verdict.broken[:SHOWN]),
            f"{len(verdict.broken)} broken promises" if verdict.broken else "nothing was broken",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
