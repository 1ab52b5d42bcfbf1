"""Logs to measure with: events of each kind by number, for either kernel. Nothing is timed here.

Digests are spread as FNV's are, by a multiplication that is one-to-one on 64 bits, so that no two collide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from loomfast._kernels import encode

EXECUTION = "bench"
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF
_STARTED = encode({"flowId": "bench", "flowVersion": "1", "input": None})
_PATCH = encode({"surface": "main", "op": "set", "path": "progress.done", "value": {"rows": 17, "of": 240}})
_ANSWER = encode({"approved": True})

# The events of the n-th entry of a part, from a sequence on.
Entry = Callable[[ModuleType, int, int], list[Any]]


def spread(n: int) -> int:
    """Return the n-th of 2^64 different digests, evenly spread."""
    return n * _GOLDEN & _MASK


def crowded(n: int) -> int:
    """Return a digest that shares its last three hex digits, and so its leaf, with all others of these."""
    return (spread(n) & ~0xFFFF & _MASK | 0x1A70) + (n >> 48 & 0xF)


def started(kernel: ModuleType) -> Any:
    """Return the event every log begins with."""
    return kernel.Envelope(EXECUTION, 0, "EXECUTION_STARTED", _STARTED, 0)


def emit(digest_of: Callable[[int], int] = spread) -> Entry:
    """Return what makes stamped emits with these digests."""

    def events(kernel: ModuleType, n: int, sequence: int) -> list[Any]:
        return [kernel.Envelope(EXECUTION, sequence, "SURFACE_PATCH", _PATCH, sequence, None, digest_of(n))]

    return events


def step(kernel: ModuleType, n: int, sequence: int) -> list[Any]:
    """Make a step that started and completed."""
    key = f"charge#{n}"
    begun = encode({"key": key, "stepId": "charge", "attempt": 1, "inputDigest": f"{spread(n):016x}"})
    done = encode({"key": key, "output": {"receipt": n, "currency": "EUR"}})
    return [
        kernel.Envelope(EXECUTION, sequence, "STEP_STARTED", begun, sequence, key),
        kernel.Envelope(EXECUTION, sequence + 1, "STEP_COMPLETED", done, sequence + 1, key),
    ]


def decision(kernel: ModuleType, n: int, sequence: int) -> list[Any]:
    """Make a recorded decision."""
    name = f"route#{n}"
    body = encode({"id": name, "choice": "fast" if n % 2 else "cheap"})
    return [kernel.Envelope(EXECUTION, sequence, "DECISION_RECORDED", body, sequence, name)]


def gate(kernel: ModuleType, n: int, sequence: int) -> list[Any]:
    """Make a gate that opened, was answered and passed."""
    body = encode({"gate": n, "on": "go"})
    return [
        kernel.Envelope(EXECUTION, sequence, "EXECUTION_SUSPENDED", body, sequence),
        kernel.Envelope(EXECUTION, sequence + 1, "go", _ANSWER, sequence + 1),
        kernel.Envelope(EXECUTION, sequence + 2, "EXECUTION_RESUMED", body, sequence + 2),
    ]


PARTS: dict[str, Entry] = {"emits": emit(), "steps": step, "decisions": decision, "gates": gate}


def mixed(kernel: ModuleType, size: int) -> Iterator[Any]:
    """Yield `size` events: half stamped emits, the rest steps, decisions, gates and unstamped events."""
    yield started(kernel)
    make_emit = PARTS["emits"]
    made, n = 1, 0
    while made < size:
        # 20 events: 10 stamped emits, 3 steps (6), 2 unstamped, 1 decision, and a decision or part of a gate.
        entry = [event for i in range(10) for event in make_emit(kernel, 10 * n + i, made + i)]
        for i in range(3):
            entry += step(kernel, 3 * n + i, made + len(entry))
        entry += decision(kernel, n, made + len(entry))
        if n % 20 == 0:
            entry += gate(kernel, n // 20, made + len(entry))
        else:
            for _ in range(3):
                sequence = made + len(entry)
                entry.append(kernel.Envelope(EXECUTION, sequence, "note", _PATCH, sequence))
        yield from entry[: size - made]
        made += len(entry)
        n += 1
