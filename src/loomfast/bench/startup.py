"""What importing loomfast costs, in processes that have imported nothing else."""

from __future__ import annotations

import subprocess
import sys

from loomfast.bench.timing import interleaved


def import_cost(rounds: int) -> dict[str, float]:
    """A process that imports asyncio, one that imports loomfast, and what the second takes beyond it."""

    def process(module: str) -> None:
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    variants = {name: lambda name=name: process(name) for name in ("asyncio", "loomfast")}
    best = interleaved(variants, rounds, 1)
    return best | {"beyond": best["loomfast"] - best["asyncio"]}
