"""Benchmarks of the fold as a live execution uses it: one event at a time, every older state still held.

A new version costs the same however many entries its state has, or these cases fail. Each round goes on from
the newest state, as an execution does, and a small log is made anew before it has grown by half.

The states of the last rounds are held, and the first one for good. Logs of all sizes let go of theirs after
as many rounds: a log that only ever takes memory would also be measured by how fast the system hands it out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any

from loomfast import _kernels
from loomfast.bench import logs
from loomfast.bench.timing import interleaved_timers

# Events, or entries of several events, folded per round.
NUMBER = 100
# Rounds after which held states are let go.
HELD_ROUNDS = 5


class LiveLog:
    """A log of `size` entries that is folded on, entry by entry.

    `first` is the state it began with, `held` are the states it went through lately.
    """

    def __init__(self, size: int, entry: logs.Entry) -> None:
        self._size = size
        self._entry = entry
        self._kernel = _kernels
        self._begin()

    def _begin(self) -> None:
        events = [logs.started(self._kernel)]
        for n in range(self._size):
            events += self._entry(self._kernel, n, len(events))
        self.state = _kernels.fold_events(None, events)
        self.first = self.state
        self.entries = self._size
        self.held = [self.state]
        self._rounds = 0

    def next_events(self, number: int) -> list[Any]:
        """Return the events of the next `number` entries."""
        events: list[Any] = []
        for n in range(self.entries, self.entries + number):
            events += self._entry(self._kernel, n, self.state.sequence + 1 + len(events))
        return events

    def fold(self, number: int) -> float:
        """Fold `number` further entries, one event at a time, and return the seconds it took."""
        self._rounds += 1
        if self._rounds % HELD_ROUNDS == 0:
            self.held.clear()
            if self.entries >= self._size * 1.5:
                self._begin()
        events = self.next_events(number)
        fold_events, state, keep = _kernels.fold_events, self.state, self.held.append
        gc.disable()
        try:
            begun = perf_counter()
            for event in events:
                state = fold_events(state, (event,))
                keep(state)
            taken = perf_counter() - begun
        finally:
            gc.enable()
        self.state = state
        self.entries += number
        return taken


def live_cost(part: str, sizes: tuple[int, ...], rounds: int) -> dict[str, float]:
    """One entry of a part (`emits`, `steps`, `decisions`, `gates`), per size of that part."""
    live = {f"k={size}": LiveLog(size, logs.PARTS[part]) for size in sizes}
    best = interleaved_timers({name: log.fold for name, log in live.items()}, rounds, NUMBER)
    for log in live.values():
        _check_held(log, part)
    return best


def crowded_cost(size: int, rounds: int) -> dict[str, float]:
    """One stamped emit where all digests share a leaf of the record's trie, and where they are spread."""
    live = {"spread": LiveLog(size, logs.emit()), "crowded": LiveLog(size, logs.emit(logs.crowded))}
    best = interleaved_timers({name: log.fold for name, log in live.items()}, rounds, NUMBER)
    for log in live.values():
        _check_held(log, "emits")
    return best


def _check_held(log: LiveLog, part: str) -> None:
    """The states that were held still say what they said, and the newest has everything."""
    for state, entries in ((log.first, log._size), (log.state, log.entries)):
        if len(getattr(state, part)) != entries:
            raise AssertionError(f"a state of {entries} {part} says it has {len(getattr(state, part))}")


def emit_and_peer(size: int, rounds: int) -> dict[str, float]:
    """One stamped emit folded, and one `immutables.Map.set` of the same key; every older version is held."""
    import immutables

    log = LiveLog(size, logs.emit())
    peer: Any = immutables.Map({logs.spread(n): 1 for n in range(size)})
    peers = [peer]

    def set_peer(number: int) -> float:
        nonlocal peer
        first = len(peers) - 1 + size
        keys = [logs.spread(n) for n in range(first, first + number)]
        current, keep = peer, peers.append
        gc.disable()
        try:
            begun = perf_counter()
            for key in keys:
                current = current.set(key, 1)
                keep(current)
            taken = perf_counter() - begun
        finally:
            gc.enable()
        peer = current
        return taken

    best = interleaved_timers({"loomfast": log.fold, "immutables": set_peer}, rounds, NUMBER)
    if dict(log.state.emits.items()) != dict(peer):
        raise AssertionError("the fold and the peer hold different digests")
    return best


def longest_bump(size: int, passes: int) -> dict[str, float]:
    """The longest of 20,000 emits folded with the collector on, in the calmest of several passes.

    The calmest pass, since a pass in which the machine took the processor away says nothing about the fold.
    """
    log = LiveLog(size, logs.emit())
    fold: Callable[..., Any] = _kernels.fold_events
    calmest = float("inf")
    for _ in range(passes):
        events = log.next_events(20_000)
        longest, state, keep = 0.0, log.state, log.held.append
        for event in events:
            begun = perf_counter()
            state = fold(state, (event,))
            taken = perf_counter() - begun
            keep(state)
            if taken > longest:
                longest = taken
        log.state = state
        log.entries += len(events)
        calmest = min(calmest, longest)
    _check_held(log, "emits")
    return {"loomfast": calmest}
