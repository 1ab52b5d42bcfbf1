"""`python -m tests.soak.kill`: play a soak and report what it found.

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
from tests.soak.driver import Report, Soak
from tests.soak.told import PROMISES

SHOWN = 20


def main() -> int:
    """Play what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kill", description=__doc__)
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, help="draws plans, moments and kills (default: the time)")
    parser.add_argument(
        "--lease-ttl-s", type=float, help="two workers at once, with leases of so many seconds"
    )
    arguments = parser.parse_args()
    seed = time.time_ns() if arguments.seed is None else arguments.seed
    folder = Path(tempfile.mkdtemp(prefix="loomfast-soak-"))
    print(f"seed {seed}, files in {folder}", flush=True)
    with PostgresServer() if arguments.store == "postgres" else contextlib.nullcontext() as server:
        db = str(folder / "soak.db") if server is None else server.dsn
        soak = Soak(db, folder, seed=seed, server=server, lease_ttl_s=arguments.lease_ttl_s)
        report = asyncio.run(soak.play(arguments.rounds))
    print(text_of(report))
    if not report.broken:
        shutil.rmtree(folder)
    return 1 if report.broken else 0


def text_of(report: Report) -> str:
    """Say what a soak did and found."""
    counts = report.counts
    promises = sum(counts.get(word, 0) for word in PROMISES)
    kills = ", ".join(f"{count} of the {what}" for what, count in sorted(report.kills.items()))
    return "\n".join(
        (
            f"seed {report.seed}: {report.rounds} rounds in {report.seconds:.0f} s; kills: {kills}",
            f"{counts.get('executions', 0)} executions ({counts.get('forked', 0)} forks) with "
            f"{counts.get('events', 0)} events; {counts.get('begin', 0)} effects begun; "
            f"{counts.get('repeated', 0)} repeated starts refused",
            f"{promises} acknowledgements held against the store; "
            f"{counts.get('compared', 0)} logs against an undisturbed run",
            *(f"BROKEN: {sentence}" for sentence in report.broken[:SHOWN]),
            f"{len(report.broken)} broken promises" if report.broken else "nothing was broken",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
