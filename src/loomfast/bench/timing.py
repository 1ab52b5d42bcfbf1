"""How the benchmarks measure: variants take turns, and each is reported by its fastest round.

Other work on the machine only ever adds time, so the minimum of many rounds is the steadiest estimate; taking
turns makes a slow minute hit every variant alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from timeit import Timer


def interleaved(variants: Mapping[str, Callable[[], object]], rounds: int, number: int) -> dict[str, float]:
    """Return, per variant, the seconds per call in the fastest of `rounds` rounds of `number` calls each."""
    timers = {name: Timer(variant).timeit for name, variant in variants.items()}
    return interleaved_timers(timers, rounds, number)


def interleaved_timers(
    timers: Mapping[str, Callable[[int], float]], rounds: int, number: int
) -> dict[str, float]:
    """Do the same with functions that time `number` calls themselves and return the seconds of all."""
    best = dict.fromkeys(timers, float("inf"))
    for _ in range(rounds):
        for name, timer in timers.items():
            best[name] = min(best[name], timer(number) / number)
    return best
