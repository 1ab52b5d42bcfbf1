"""Live commits, with every older state held, and replays."""

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
    state = log.state

    def next_entry():
        return (state, log.next_events(1)), {}

    def fold_entry(state, events):
        for event in events:
            state = _kernels.fold_events(state, (event,))
        return state

    after = benchmark.pedantic(fold_entry, setup=next_entry, rounds=500)
    assert len(getattr(after, part)) == size + 1


def test_a_mixed_log_is_replayed_from_memory(benchmark):
    events = list(logs.mixed(_kernels, 100_000))
    state = benchmark.pedantic(lambda: _kernels.fold_events(None, events), rounds=5)
    assert state.sequence == len(events) - 1
