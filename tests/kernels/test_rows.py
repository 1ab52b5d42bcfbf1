"""Rows of events, on both kernels: the same values for ever, and a checksum that covers all of them."""

from __future__ import annotations

import zlib
from types import ModuleType
from typing import Any

import pytest

from loomfast import _events as ev
from tests.kernels.logs import random_log

WIDTH = 10
STARTED = b'{"flowId":"f","flowVersion":"1","input":null}'

# Arguments of an envelope, and its row as the first version of the format wrote it, with the number 7.
WRITTEN: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    (
        (
            "e",
            0,
            "EXECUTION_STARTED",
            STARTED,
            1_700_000_000_000,
            None,
            None,
            None,
            b'{"computeTarget":"gpu"}',
        ),
        (
            30064771072,
            46669125296,
            None,
            None,
            11,
            None,
            1700000000000,
            2793750495,
            b'{"computeTarget":"gpu"}',
            STARTED,
        ),
    ),
    (
        ("e", 1, "note", b'{"n":1}', 1_700_000_000_001, None, 2**64 - 1, 3),
        (30064771073, 476267918, -1, "note", 12, 3, 1700000000001, 2844804827, None, b'{"n":1}'),
    ),
    (
        ("e", 2, "\u00e9\ud800", b"null", 0, None, None, 0),
        (30064771074, 683579849, None, b"\xc3\xa9\xed\xa0\x80", 13, 0, 0, 270978817, None, b"null"),
    ),
    (
        ("e", 3, "STEP_COMPLETED", b'{"key":"a#1","output":5}', -1, "a#1"),
        (
            30064771075,
            92434309999,
            None,
            "a#1",
            14,
            None,
            -1,
            887632600,
            None,
            b'{"key":"a#1","output":5}',
        ),
    ),
    (
        ("e", 4, "note", b"0", 2**63 - 1, None, 0),
        (30064771076, 2955329155, 0, "note", 15, None, 9223372036854775807, 3436696388, None, b"0"),
    ),
]


def rows(values: list[Any]) -> list[tuple[Any, ...]]:
    return [tuple(values[at : at + WIDTH]) for at in range(0, len(values), WIDTH)]


def test_rows_are_what_they_were_when_the_format_was_new(fold_kernel: ModuleType) -> None:
    events = [fold_kernel.Envelope(*arguments) for arguments, _ in WRITTEN]
    expected = [row for _, row in WRITTEN]
    assert rows(fold_kernel.event_rows(7, 11, events)) == expected
    one_by_one = [fold_kernel.event_rows(7, 11 + n, (event,)) for n, event in enumerate(events)]
    assert [row for values in one_by_one for row in rows(values)] == expected
    assert fold_kernel.event_rows(7, 11, []) == []


@pytest.mark.parametrize("seed", range(20))
def test_both_kernels_make_the_same_rows_and_fold_them(kernels: dict[str, ModuleType], seed: int) -> None:
    log = random_log(seed)
    written = {}
    for name, kernel in kernels.items():
        events = [kernel.Envelope.from_json(event) for event in log]
        values = kernel.event_rows(2**31 - 1, 2**40, events)
        written[name] = [(type(value), value) for value in values]
        read = [(row[0], row[1], row[3], row[2], row[9]) for row in rows(values)]
        assert kernel.fold_guarded(None, "e", read) == kernel.fold_events(None, events)
    first, *others = written.values()
    assert all(values == first for values in others)


@pytest.mark.parametrize("subject", [None, "", "key#1", "\u00e9\U0001f600", b"\xed\xa0\x80"])
@pytest.mark.parametrize("extra", [None, b"", b'{"forkOf":"x"}'])
@pytest.mark.parametrize(
    "fence", [None, 0, 7, -(2**63), 2**63 - 1, 2**63, -(2**63) - 1, 2**200, True, "text", 1.5]
)
def test_a_checksum_is_the_crc_32_of_what_the_docstring_says(
    fold_kernel: ModuleType, subject: str | bytes | None, extra: bytes | None, fence: Any
) -> None:
    name = subject.encode() if isinstance(subject, str) else subject
    size = None if name is None else len(name)
    text = f"{7 << 32},{1 << 35},{-5},{fence},{1_700},{size},".encode()
    whole = text + (name or b"") + b'{"n":1}' + (b"" if extra is None else b"+" + extra)
    row = (7 << 32, 1 << 35, -5, subject, fence, 1_700, extra, b'{"n":1}')
    assert fold_kernel.row_checksum(*row) == zlib.crc32(whole)


@pytest.mark.parametrize("place", range(8))
def test_a_checksum_changes_with_every_value_of_the_row(fold_kernel: ModuleType, place: int) -> None:
    row: list[Any] = [7 << 32, 1 << 35, None, "key", None, 1_700, b"{}", b'{"n":1}']
    changed = [*row]
    changed[place] = [8 << 32, 1 << 36, 0, "kez", 0, 1_701, b"[]", b'{"n":2}'][place]
    assert fold_kernel.row_checksum(*row) != fold_kernel.row_checksum(*changed)


@pytest.mark.parametrize(
    ("place", "value"), [(3, 5), (3, 1.5), (6, "text"), (6, 5), (7, None), (7, "text"), (7, bytearray(b"{}"))]
)
def test_a_text_of_another_type_has_no_checksum(fold_kernel: ModuleType, place: int, value: object) -> None:
    row: list[Any] = [7 << 32, 1 << 35, None, "key", None, 1_700, b"{}", b'{"n":1}']
    row[place] = value
    with pytest.raises(TypeError, match="must be bytes, not"):
        fold_kernel.row_checksum(*row)


@pytest.mark.parametrize("timestamp", [2**63, 2**200, -(2**64), True, 1.5])
def test_a_number_that_no_column_holds_makes_the_same_row_on_both_kernels(
    kernels: dict[str, ModuleType], timestamp: Any
) -> None:
    first, *others = (
        kernel.event_rows(7, 11, [kernel.Envelope("e", 0, "note", b"1", timestamp)])
        for kernel in kernels.values()
    )
    assert all(values == first for values in others)


@pytest.mark.parametrize("subject", [b"key", 5])
def test_an_event_whose_subject_is_no_text_has_no_row(fold_kernel: ModuleType, subject: Any) -> None:
    event = fold_kernel.Envelope("e", 0, "STEP_COMPLETED", b"{}", 0, subject)
    with pytest.raises(TypeError, match="subject: must be str, not"):
        fold_kernel.event_rows(7, 11, [event])


@pytest.mark.parametrize("body", [None, ev.Opaque(object()), "text"])
def test_an_event_without_json_has_no_row(fold_kernel: ModuleType, body: Any) -> None:
    event = fold_kernel.Envelope("e", 0, "note", body, 0)
    with pytest.raises(TypeError, match="body: must be bytes, not"):
        fold_kernel.event_rows(7, 11, [event])
