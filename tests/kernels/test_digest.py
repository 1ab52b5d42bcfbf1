"""FNV-1a 64, identities of emits, the form of a digest: against the vectors and the definition."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from loomfast._errors import BadInputError
from loomfast._kernels import REVISION

VECTORS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "digest-vectors.jsonl").read_bytes().splitlines()
]

# F28, F29, F30: payload of event type NOTE in segment 0, and its stamp.
STAMPS = [
    (
        {"\ufb33": 1, "\U0001f600": 2, "\ue000": 3, "\uffff": 4, "\ud7ff": 5, "a": 6, "": 7},
        "d7b3f567960d18cb",
    ),
    (0, "b0284d2d2faa865d"),
    (0.0, "b0284d2d2faa865d"),
    (-0.0, "b0284d2d2faa865d"),
    (1, "b02c492d2fae6868"),
    (1.0, "b02c492d2fae6868"),
    (1e16, "386940b0a52f2ea8"),
    (1e20, "a641dd57cf723b78"),
    (1e21, "9078bc260d67a33f"),
    (1e-6, "38e05f23bee112ee"),
    (1e-7, "d9c0deadbb574207"),
    (5e-324, "3c23ce7f3b0d6f59"),
    (0.1 + 0.2, "de056a2431f9a6ac"),
    (123456789012345680000.0, "0d078ba478dee29f"),
    (True, "e74dd0aa2f5a17b5"),
    (2**53, "6a596b50ae4bb564"),
    (2**53 + 1, "6a566f50ae498659"),
    (10**30, "787d8f86a4e5a740"),
    (None, "781735a3c14c222e"),
    (math.nan, "781735a3c14c222e"),
    (math.inf, "781735a3c14c222e"),
    (-math.inf, "781735a3c14c222e"),
    ("\ud800", "bf462360db6a624a"),
    ({"\udfff": 1}, "8d5449e2d3f81f6b"),
    ("a\x00b", "252fd50c9832832f"),
]


def fnv(data: bytes) -> int:
    value = 14695981039346656037
    for byte in data:
        value = (value ^ byte) * 1099511628211 % 2**64
    return value


def test_every_vector_has_its_canonical_text_and_its_digest(digest_kernel):
    assert len(VECTORS) == 3000
    for vector in VECTORS:
        segment, event_type, payload = vector["segment"], vector["eventType"], vector["payload"]
        assert digest_kernel.canonical([event_type, payload]).decode() == vector["canonical"]
        value = digest_kernel.digest(segment, event_type, payload)
        assert digest_kernel.format_digest(value) == vector["digest"]
        assert digest_kernel.parse_digest(vector["digest"]) == value
        assert digest_kernel.encode_digest(segment, event_type, payload) == (
            digest_kernel.encode(payload),
            value,
        )


@pytest.mark.parametrize(("payload", "stamp"), STAMPS, ids=lambda value: ascii(value)[:30])
def test_f28_f29_f30_stamps_are_those_of_the_cases(digest_kernel, payload, stamp):
    assert digest_kernel.format_digest(digest_kernel.digest(0, "NOTE", payload)) == stamp


def test_f28_names_sort_by_utf16_code_units(digest_kernel):
    names = ["", "a", "\ud7ff", "\U0001f600", "\ue000", "\ufb33", "\uffff"]
    for order in (names, names[::-1], random.Random(1).sample(names, len(names))):
        text = digest_kernel.canonical({name: STAMPS[0][0][name] for name in order})
        assert list(json.loads(text)) == names
        assert len(text) == 53
        assert digest_kernel.fnv1a64(text) == 0x79C5D3394D043151


def test_f29_the_segment_is_part_of_the_identity(digest_kernel):
    assert digest_kernel.format_digest(digest_kernel.digest(1, "NOTE", 1)) == "5253d2a25999edb5"


def test_fnv1a64_agrees_with_the_definition_at_every_length(digest_kernel):
    data = random.Random(2).randbytes(4096)
    value = 14695981039346656037
    slow = digest_kernel.__name__.startswith("loomfast._pure")
    for size in range(4097):
        # The pure twin takes a quarter of the lengths: it is the definition.
        if not slow or size < 300 or size % 37 == 0:
            assert digest_kernel.fnv1a64(data[:size]) == value
            assert digest_kernel.fnv1a64_limbs(data[:size]) == value
        if size < 4096:
            value = (value ^ data[size]) * 1099511628211 % 2**64


def test_fnv1a64_agrees_with_the_definition_on_random_and_long_input(digest_kernel):
    source = random.Random(3)
    for size in [source.randrange(64) for _ in range(500)] + [300_000]:
        data = source.randbytes(size)
        assert digest_kernel.fnv1a64(data) == digest_kernel.fnv1a64_limbs(data) == fnv(data)
    for data in (b"\xff" * 1000, b"\0" * 1000, b""):
        assert digest_kernel.fnv1a64(data) == digest_kernel.fnv1a64_limbs(data) == fnv(data)


def test_fnv1a64_takes_any_bytes_and_nothing_else(digest_kernel):
    expected = fnv(b"abc")
    for data in (b"abc", bytearray(b"abc"), memoryview(b"abc"), memoryview(b"a-b-c")[::2]):
        assert digest_kernel.fnv1a64(data) == digest_kernel.fnv1a64_limbs(data) == expected
    for data in ("abc", 7, None, ["a"]):
        with pytest.raises(BadInputError, match="expected bytes, not"):
            digest_kernel.fnv1a64(data)


class Text(str):
    pass


class Number(int):
    pass


def test_segment_and_event_type_are_checked(digest_kernel):
    plain = digest_kernel.digest(3, "NOTE", 1)
    assert digest_kernel.digest(Number(3), Text("NOTE"), 1) == plain
    assert digest_kernel.digest(segment=3, event_type="NOTE", payload=1) == plain
    assert digest_kernel.digest(2**80, "NOTE", 1) == fnv(f'{2**80}|["NOTE",1]'.encode())
    assert digest_kernel.digest(0, '"\ud800\u00e9', 1) == fnv('0|["\\"\\ud800\u00e9",1]'.encode())
    for segment, reason in [
        (True, "segment must be an integer, not bool"),
        (1.0, "segment must be an integer, not float"),
        (None, "segment must be an integer, not NoneType"),
        (-1, "segment must be at least 0"),
        (-(2**70), "segment must be at least 0"),
    ]:
        for function in (digest_kernel.digest, digest_kernel.encode_digest):
            with pytest.raises(BadInputError) as caught:
                function(segment, "NOTE", 1)
            assert str(caught.value) == reason
    for event_type in (b"NOTE", None, 1):
        with pytest.raises(BadInputError, match="event_type must be text, not"):
            digest_kernel.digest(0, event_type, 1)


def test_digests_are_written_as_sixteen_lower_case_hex_digits(digest_kernel):
    for value, text in [
        (0, "0" * 16),
        (2**64 - 1, "f" * 16),
        (0xABC, "0000000000000abc"),
        (Number(1), "0" * 15 + "1"),
    ]:
        assert digest_kernel.format_digest(value) == text
        assert digest_kernel.parse_digest(text) == value
    for value in (-1, 2**64, 2**200, True, 1.0, None, "0"):
        with pytest.raises(BadInputError, match="a digest is an"):
            digest_kernel.format_digest(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0" * 15,
        "0" * 17,
        "0" * 15 + "A",
        "0" * 15 + "g",
        " " + "0" * 15,
        "0" * 15 + "\n",
        "0x" + "0" * 14,
        "+" + "0" * 15,
        "0_" * 8,
        "\u0661" * 16,
        "\ud800" * 16,
        b"0" * 16,
        None,
        0,
    ],
    ids=ascii,
)
def test_only_sixteen_lower_case_hex_digits_are_read_as_a_digest(digest_kernel, text):
    with pytest.raises(BadInputError, match="a digest is 16 lower-case hex digits, not"):
        digest_kernel.parse_digest(text)


def test_both_kernels_have_the_same_revision_and_limit(digest_kernels):
    assert {kernel.REVISION for kernel in digest_kernels} == {REVISION}
    assert {kernel.MAX_DEPTH for kernel in digest_kernels} == {256}
