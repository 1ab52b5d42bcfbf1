"""Benchmarks of the trie kernel: one write with every older version held, at three sizes and in odd shapes.

Caveats first. The peer is `immutables.Map`, which maps any hashable to anything; ours knows what it counts.
Digests repeat, so that a trie stays at its size: each bump also keeps the old count for the older versions.
The collector is off except for the longest bump: it would slow the peer's, whose nodes it has to walk, and
not ours. At a million digests most of the time is the machine's: fresh memory and cache misses.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, perf_counter_ns
from typing import Any, TypeAlias

from loomfast._native.trie import Table, Trie
from loomfast.bench.timing import interleaved_timers

Timer: TypeAlias = Callable[[int], float]

DISTRIBUTIONS: dict[str, Callable[[int], int]] = {
    "sequential": lambda i: i,
    "equal_low_bits": lambda i: i << 44,
    "equal_high_bits": lambda i: (2**64 - 1) ^ i,
}


def live_bump(rounds: int = 10, number: int = 5_000) -> dict[str, float]:
    """One bump at 1,000, 50,000 and 1,000,000 digests, and the peer at 50,000 of the same digests."""
    timers: dict[str, Timer] = {}
    for k in (1_000, 50_000, 1_000_000):
        timers[f"loomfast_{k}"] = _bumps(_random_digests(k))
    return interleaved_timers(timers | _peer(_random_digests(50_000)), rounds, number)


def distributions(rounds: int = 10, number: int = 5_000) -> dict[str, float]:
    """One bump at 50,000 digests that agree in most of their bits."""
    timers = {name: _bumps([of(i) for i in range(50_000)]) for name, of in DISTRIBUTIONS.items()}
    return interleaved_timers(timers | {"random": _bumps(_random_digests(50_000))}, rounds, number)


def branching_bump(rounds: int = 10, number: int = 5_000) -> dict[str, float]:
    """One bump of a version that has a successor, always the same version, at 50,000 digests."""
    digests = _random_digests(50_000)
    return interleaved_timers(
        {"loomfast": _bumps(digests, branching=True)} | _peer(digests), rounds, number
    )


def live_set(rounds: int = 10, number: int = 5_000) -> dict[str, float]:
    """One `Table.set` at 1,000 and 50,000 keys, and the peer at 50,000 of the same keys."""
    timers: dict[str, Timer] = {}
    keys: list[Any] = []
    for k in (1_000, 50_000):
        keys = [f"step#{i}" for i in range(k)]
        table = Table().draft()
        for key in keys:
            table.set_in_place(key, 1)
        if dict(table.items()) != dict.fromkeys(keys, 1):
            raise AssertionError("a table of the benchmark holds something else")
        timers[f"loomfast_{k}"] = _sets(table, keys)
    return interleaved_timers(timers | _peer(keys), rounds, number)


def longest_bump(repeats: int = 3, k: int = 1_000_000, number: int = 200_000) -> dict[str, float]:
    """The longest of `number` single bumps from `k` digests on, new digests, the collector on.

    The same bumps are made `repeats` times, and each counts with its fastest time: what the machine did
    meanwhile rarely hits one bump every time, what the trie does to it always hits.
    """
    digests = _random_digests(k)
    more = [digest ^ 0x5555555555555555 for digest in digests[:number]]
    fastest = [2**63] * len(more)
    for _ in range(repeats):
        trie, held = _trie_of(digests), [Trie()] * len(more)
        for at, digest in enumerate(more):
            begun = perf_counter_ns()
            trie = trie.bump(digest)
            fastest[at] = min(fastest[at], perf_counter_ns() - begun)
            held[at] = trie
        if len(trie) != len(set(digests) | set(more)):
            raise AssertionError("the trie of the benchmark lost a digest")
    return {"longest": max(fastest) / 1e9, "median": sorted(fastest)[len(fastest) // 2] / 1e9}


def _random_digests(k: int) -> list[Any]:
    rnd = random.Random(1)
    return [rnd.getrandbits(64) for _ in range(k)]


def _trie_of(digests: list[int]) -> Trie:
    trie = Trie().draft()
    for digest in digests:
        trie.bump_in_place(digest)
    return trie


def _drawn(keys: list[Any], number: int) -> list[Any]:
    """Draw keys and copy them in order: else the time would go to reading them from all over memory."""
    return [key + 0 if isinstance(key, int) else str(key) for key in random.choices(keys, k=number)]


def _bumps(digests: list[int], *, branching: bool = False) -> Timer:
    newest = _trie_of(digests)
    if dict(newest.items()) != dict.fromkeys(digests, 1):
        raise AssertionError("a trie of the benchmark counts something else")
    successor = newest.bump(0) if branching else None

    def timer(number: int) -> float:
        nonlocal newest
        drawn, held, trie = _drawn(digests, number), [newest] * number, newest
        with _collector_off():
            begun = perf_counter()
            if successor is None:
                for at, digest in enumerate(drawn):
                    trie = trie.bump(digest)
                    held[at] = trie
            else:
                for at, digest in enumerate(drawn):
                    held[at] = trie.bump(digest)
                    len(held[at])  # else the branch would not be taken yet
            seconds = perf_counter() - begun
        newest = trie
        return seconds

    return timer


def _sets(newest: Any, keys: list[Any]) -> Timer:
    def timer(number: int) -> float:
        nonlocal newest
        drawn, held, table = _drawn(keys, number), [newest] * number, newest
        with _collector_off():
            begun = perf_counter()
            for at, key in enumerate(drawn):
                table = table.set(key, 2)
                held[at] = table
            seconds = perf_counter() - begun
        newest = table
        return seconds

    return timer


def _peer(keys: list[Any]) -> dict[str, Timer]:
    try:
        import immutables
    except ImportError:
        return {}
    return {"immutables": _sets(immutables.Map(dict.fromkeys(keys, 1)), keys)}


@contextmanager
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
