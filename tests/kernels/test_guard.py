"""Guarded rows, on both kernels: they fold like events, and no flipped bit of what is read goes unseen."""

from __future__ import annotations

import struct
import zlib
from types import ModuleType
from typing import Any

import pytest

from loomfast import MalformedEventError
from loomfast import _events as ev
from tests.kernels.logs import random_log

NUMBER = 7 << 32
SEEDS = range(20)


def signed(stamp: int | None) -> int | None:
    return stamp if stamp is None or stamp < 2**63 else stamp - 2**64


def steers(event: Any) -> bool:
    return event.kind > ev.LAST_INERT or (event.kind == ev.DOMAIN and event.stamp is None)


def rows_of(kernel: ModuleType, events: list[Any]) -> list[tuple[Any, ...]]:
    """Rows as the SQLite store fetches them: what does not steer has neither subject nor body."""
    rows: list[tuple[Any, ...]] = []
    for event in events:
        subject, body = (event.subject, event.body) if steers(event) else (None, None)
        stamp = signed(event.stamp)
        guard = kernel.row_guard(NUMBER + event.sequence, event.kind, subject, stamp, body)
        rows.append((NUMBER + event.sequence, event.kind << 32 | guard, subject, stamp, body))
    return rows


@pytest.mark.parametrize("seed", SEEDS)
def test_guarded_rows_fold_like_events(fold_kernel: ModuleType, seed: int) -> None:
    events = [fold_kernel.Envelope.from_json(event) for event in random_log(seed)]
    rows = rows_of(fold_kernel, events)
    assert fold_kernel.fold_guarded(None, "e", rows) == fold_kernel.fold_events(None, events)
    half = len(rows) // 2
    if half:
        state = fold_kernel.fold_guarded(None, "e", rows[:half])
        assert fold_kernel.fold_guarded(state, "e", rows[half:]) == fold_kernel.fold_events(None, events)


@pytest.mark.parametrize("seed", SEEDS)
def test_both_kernels_guard_alike(kernels: dict[str, ModuleType], seed: int) -> None:
    written = {
        name: rows_of(kernel, [kernel.Envelope.from_json(event) for event in random_log(seed)])
        for name, kernel in kernels.items()
    }
    first, *others = written.values()
    assert all(rows == first for rows in others)


@pytest.mark.parametrize("subject", [None, "", "a", "key#1", "\u00e9\U0001f600", "\ud800", b"\xed\xa0\x80"])
@pytest.mark.parametrize("stamp", [None, 0, 5, -1])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1_000])
def test_a_guard_is_the_crc_32_of_what_the_docstring_says(
    fold_kernel: ModuleType, subject: str | bytes | None, stamp: int | None, size: int
) -> None:
    body = bytes(n % 251 for n in range(size))
    name = subject.encode("utf-8", "surrogatepass") if isinstance(subject, str) else subject
    shape = (0 if name is None else 2 * (len(name) + 1)) + (stamp is not None)
    head = struct.pack("<QIIQ", NUMBER, ev.STEP_COMPLETED, shape, (stamp or 0) % 2**64)
    guard = fold_kernel.row_guard(NUMBER, ev.STEP_COMPLETED, subject, stamp, body)
    assert guard == zlib.crc32(head + (name or b"") + body)
    inert = fold_kernel.row_guard(NUMBER, ev.SURFACE_PATCH, subject, stamp, body)
    head = struct.pack("<QIIQ", NUMBER, ev.SURFACE_PATCH, stamp is not None, (stamp or 0) % 2**64)
    assert inert == zlib.crc32(head)


def test_a_flipped_bit_of_anything_the_fold_reads_is_refused_and_named(fold_kernel: ModuleType) -> None:
    payloads = [
        ("EXECUTION_STARTED", {"flowId": "f", "flowVersion": "1", "input": None}, {}),
        ("STEP_COMPLETED", {"key": "a#1", "output": 5}, {}),
        ("note", {"n": 1}, {"flowEmit": "00000000000000ff"}),
        ("note", {"n": 1}, {}),
    ]
    events = [
        fold_kernel.Envelope.make("e", n, kind, payload, 0, metadata)
        for n, (kind, payload, metadata) in enumerate(payloads)
    ]
    rows = rows_of(fold_kernel, events)
    for place, (row_id, word, subject, stamp, body) in enumerate(rows):
        changed: list[tuple[Any, ...]] = []
        changed += [(row_id ^ 1 << bit, word, subject, stamp, body) for bit in range(32, 63)]
        changed += [(row_id, word ^ 1 << bit, subject, stamp, body) for bit in range(63)]
        changed += [(row_id, ~word, subject, stamp, body)]
        if stamp is not None:
            changed += [(row_id, word, subject, signed(stamp ^ 1 << bit), body) for bit in range(64)]
        if subject is not None:
            text = subject.encode()
            flipped = [
                bytes([*text[:at], text[at] ^ 1 << bit, *text[at + 1 :]])
                for at in range(len(text))
                for bit in range(8)
            ]
            changed += [(row_id, word, other, stamp, body) for other in flipped]
        if body is not None:
            flipped = [
                bytes([*body[:at], body[at] ^ 1 << bit, *body[at + 1 :]])
                for at in range(len(body))
                for bit in range(8)
            ]
            changed += [(row_id, word, subject, stamp, other) for other in flipped]
            changed += [
                (row_id, word, subject, stamp, body[:-1]),
                (row_id, word, subject, stamp, body + b" "),
            ]
        for row in changed:
            with pytest.raises(MalformedEventError) as caught:
                fold_kernel.fold_guarded(None, "e", [*rows[:place], row])
            assert (caught.value.execution_id, caught.value.sequence, caught.value.field) == (
                "e",
                place,
                "guard",
            ), row


@pytest.mark.parametrize("place", range(1, 5))
@pytest.mark.parametrize("value", ["text", 1.5, b"bytes", None])
def test_a_value_of_another_type_is_damage_and_no_other_error(
    fold_kernel: ModuleType, place: int, value: object
) -> None:
    event = fold_kernel.Envelope.make(
        "e", 0, "STEP_COMPLETED", {"key": "a", "output": 5}, 0, {"flowEmit": "f" * 16}
    )
    (row,) = rows_of(fold_kernel, [event])
    damaged = (*row[:place], value, *row[place + 1 :])
    with pytest.raises(MalformedEventError) as caught:
        fold_kernel.fold_guarded(None, "e", [damaged])
    assert caught.value.field == "guard"


def test_a_subject_may_come_as_bytes(fold_kernel: ModuleType) -> None:
    events = [
        fold_kernel.Envelope.make(
            "e", 0, "EXECUTION_STARTED", {"flowId": "f", "flowVersion": "1", "input": 1}, 0
        ),
        fold_kernel.Envelope.make("e", 1, "STEP_COMPLETED", {"key": "\ud800", "output": 5}, 0),
    ]
    first, (row_id, word, subject, stamp, body) = rows_of(fold_kernel, events)
    as_bytes = (row_id, word, subject.encode("utf-8", "surrogatepass"), stamp, body)
    state = fold_kernel.fold_guarded(None, "e", [first, as_bytes])
    assert state == fold_kernel.fold_events(None, events)
    assert state.steps.get("\ud800").output == 5
