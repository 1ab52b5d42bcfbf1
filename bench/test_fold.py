"""Live commits, with every older state held, and replays: `pytest bench`.

`loomfast bench` is what judges, since it interleaves variants and compares them. These give the distribution
of one variant, and a history (`--benchmark-autosave`, `--benchmark-compare`).
"""

from __future__ import annotations

import pytest

from loomfast import _kernels
from loomfast.bench import fold, logs

SIZES = (1_000, 50_000)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", logs.PARTS)
def test_one_live_entry_is_folded(benchmark, part, size):
    benchmark.group = f"live {part}"
    log = fold.LiveLog(size, logs.PARTS[part])

    def next_entry():
        events = log.next_events(1)
        log.entries += 1
        log.held.append(log.state)
        return (events,), {}

    def fold_entry(events):
        for event in events:
            log.state = _kernels.fold_events(log.state, (event,))

    benchmark.pedantic(fold_entry, setup=next_entry, rounds=500)
    assert len(getattr(log.state, part)) == log.entries == size + 500


def test_a_mixed_log_is_replayed_from_memory(benchmark):
    events = list(logs.mixed(_kernels, 100_000))
    state = benchmark.pedantic(lambda: _kernels.fold_events(None, events), rounds=5)
    assert state.sequence == len(events) - 1
