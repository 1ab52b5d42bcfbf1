"""Benchmarks under pytest-benchmark: `pytest bench`. They time what `loomfast bench` times, one variant each.

`loomfast bench` is what judges: it interleaves the variants and compares them. These give the distribution of
one variant, and a history (`--benchmark-autosave`, `--benchmark-compare`).
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _collector_as_usual(benchmark):
    """Use the benchmark fixture in every case, so that none is left out by `--benchmark-only`."""
    return benchmark
