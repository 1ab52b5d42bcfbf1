"""Both texts of plain values, and reading them back: numbers, strings, order, malformed text."""

from __future__ import annotations

import json
import math
import random
import struct
import sys
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomfast._errors import BadInputError, JsonFormError, JsonTextError, LoomError, TooDeepError


def es_text(value: float) -> str:
    """ECMAScript's Number::toString, from the digits that repr finds."""
    if not math.isfinite(value):
        return "null"
    if value == 0:
        return "0"
    if value < 0:
        return "-" + es_text(-value)
    _, figures, exponent = Decimal(repr(value)).as_tuple()
    digits = "".join(map(str, figures)).rstrip("0")
    count, point = len(digits), len(figures) + int(exponent)
    if count <= point <= 21:
        return digits + "0" * (point - count)
    if 0 < point <= 21:
        return f"{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return "0." + "0" * -point + digits
    return digits[0] + ("." + digits[1:] if count > 1 else "") + f"e{point - 1:+d}"


def random_doubles(count: int) -> list[float]:
    source = random.Random(20240501)
    values = [struct.unpack("<d", source.randbytes(8))[0] for _ in range(count // 2)]
    values += [source.uniform(-1e6, 1e6) for _ in range(count // 4)]
    values += [round(source.uniform(0, 1e5), source.randrange(8)) for _ in range(count - len(values))]
    return values


EDGES = [
    *(2.0**power for power in range(-1074, 1024)),
    *(math.nextafter(2.0**power, 0) for power in range(-1073, 1024)),
    *(math.nextafter(2.0**power, math.inf) for power in range(-1074, 1023)),
    *(
        float(f"{digit}e{power}")
        for power in range(-323, 309)
        for digit in (1, 5, 9.5)
        if digit < 2 or power < 308
    ),
    *(float(2**53 + offset) for offset in range(-30, 60)),
    *(sign * value for sign in (1, -1) for value in (0.0, 1e20, 1e21, 1e-6, 1e-7, 123456789012345680000.0)),
    sys.float_info.max,
    sys.float_info.min,
    9007199254740993.0,
    math.nan,
    math.inf,
    -math.inf,
]


def test_f29_200000_random_doubles_have_the_reference_text(digest_kernel):
    values = random_doubles(200_000)
    expected = "[" + ",".join(map(es_text, values)) + "]"
    assert digest_kernel.canonical(values).decode() == expected


def test_f29_the_edges_of_the_doubles_have_the_reference_text(digest_kernel):
    assert digest_kernel.canonical(EDGES).decode() == "[" + ",".join(map(es_text, EDGES)) + "]"


def test_f29_persisted_doubles_come_back_as_the_same_double(digest_kernel):
    values = [value for value in random_doubles(20_000) + EDGES if math.isfinite(value)]
    back = digest_kernel.decode(digest_kernel.encode(values))
    assert {type(value) for value in back} == {float}
    assert [struct.pack("<d", value) for value in back] == [struct.pack("<d", value) for value in values]


def test_both_kernels_persist_the_same_bytes_of_doubles(digest_kernels):
    values = random_doubles(20_000) + EDGES
    assert len({kernel.encode(values) for kernel in digest_kernels}) == 1


@pytest.mark.parametrize(
    ("value", "persisted"),
    [
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (0.0, "0.0"),
        (1e16, "10000000000000000.0"),
        (1e21, "1e+21"),
        (1.5e-7, "1.5e-7"),
        (-1e20, "-100000000000000000000.0"),
        (math.nan, "null"),
        (math.inf, "null"),
        (0.5, "0.5"),
        (1, "1"),
        (-7, "-7"),
        (True, "true"),
        (False, "false"),
        (None, "null"),
    ],
    ids=str,
)
def test_persisted_text_of_numbers_and_constants(digest_kernel, value, persisted):
    assert digest_kernel.encode(value).decode() == persisted
    assert digest_kernel.encode_digest(0, "NOTE", [value])[0].decode() == f"[{persisted}]"


INTEGERS = [
    sign * (2**power + offset)
    for power in (0, 7, 31, 32, 53, 62, 63, 64, 65, 127, 999, 1023, 1024, 1700, 1701)
    for offset in (-1, 0, 1, 2)
    for sign in (1, -1)
] + [sign * (10**power + offset) for power in range(0, 40) for offset in (-1, 0, 1) for sign in (1, -1)]


def test_f29_integers_of_any_size_are_exact_both_ways(digest_kernel):
    text = digest_kernel.encode(INTEGERS)
    assert text == digest_kernel.canonical(INTEGERS) == ("[" + ",".join(map(str, INTEGERS)) + "]").encode()
    back = digest_kernel.decode(text)
    assert back == INTEGERS
    assert {type(value) for value in back} == {int}


def test_f29_integers_above_the_digit_limit_of_the_interpreter_are_exact(digest_kernel):
    limit = sys.get_int_max_str_digits()
    assert limit == 4300
    for value in (10**4299, 10**4300, 10**4300 - 1, -(10**5000) + 7, 7**30_000, 10**512, 10**1024 - 1):
        text = digest_kernel.encode({"n": value})
        assert digest_kernel.decode(text) == {"n": value}
        assert digest_kernel.canonical([value]) == b"[" + text[5:-1] + b"]"
        try:
            sys.set_int_max_str_digits(0)
            assert text == f'{{"n":{value}}}'.encode()
            sys.set_int_max_str_digits(640)
            assert digest_kernel.encode({"n": value}) == text
            assert digest_kernel.decode(text) == {"n": value}
        finally:
            sys.set_int_max_str_digits(limit)


def test_f30_strings_escape_what_json_requires_and_nothing_more(digest_kernel):
    every = "".join(
        map(chr, [*range(0x20), 0x22, 0x2F, 0x5C, 0x7F, 0x80, 0x2028, 0xFEFF, 0xFFFF, 0x10000, 0x10FFFF])
    )
    expected = (
        '"\\u0000\\u0001\\u0002\\u0003\\u0004\\u0005\\u0006\\u0007\\b\\t\\n\\u000b\\f\\r\\u000e\\u000f'
        "\\u0010\\u0011\\u0012\\u0013\\u0014\\u0015\\u0016\\u0017\\u0018\\u0019\\u001a\\u001b\\u001c\\u001d\\u001e\\u001f"
        '\\"/\\\\\x7f\x80\u2028\ufeff\uffff\U00010000\U0010ffff"'
    )
    assert digest_kernel.canonical(every).decode() == digest_kernel.encode(every).decode() == expected
    assert digest_kernel.decode(expected) == every


def test_strings_of_every_length_with_one_escape_at_every_place(digest_kernel):
    for size in range(70):
        text = ("abcdefghij" * 7)[:size]
        assert digest_kernel.encode(text) == f'"{text}"'.encode()
        for at in range(size):
            for char, written in (('"', '\\"'), ("\\", "\\\\"), ("\x1f", "\\u001f"), ("\u00e9", "\u00e9")):
                marked = text[:at] + char + text[at + 1 :]
                assert digest_kernel.encode(marked).decode() == f'"{text[:at]}{written}{text[at + 1 :]}"'
                assert digest_kernel.encode({marked: marked}).decode().count(written) == 2


def test_long_strings_are_whole(digest_kernel):
    for text in (
        "x" * 1_000_000,
        "\n" * 10_000,
        "\u00e9" * 10_000,
        "\u20ac" * 9_999,
        "\U0001f600" * 9_999,
        "\ud800x" * 5_000,
    ):
        assert digest_kernel.decode(digest_kernel.encode([text, {text: text}])) == [text, {text: text}]


def test_f30_halves_of_surrogate_pairs_survive(digest_kernel):
    for value in (
        "\ud800",
        "\udfff",
        "a\udc00\ud800",
        {"\ud83d": "\ude00"},
        ["\ud800", "\udc00"],
        "\U0001f600\ud800",
    ):
        text = digest_kernel.encode(value)
        assert text.isascii() or b"\xf0\x9f\x98\x80" in text
        assert digest_kernel.decode(text) == value
    assert digest_kernel.encode("\ud800\udabc") == b'"\\ud800\\udabc"'


def test_f30_two_adjacent_halves_are_the_one_character_that_a_re_run_sees(digest_kernel):
    split = "\ud83d" + "\ude00"
    for value, joined in [(split, "\U0001f600"), ({split: split}, {"\U0001f600": "\U0001f600"})]:
        assert digest_kernel.encode(value) == digest_kernel.encode(joined)
        assert digest_kernel.digest(0, "NOTE", value) == digest_kernel.digest(0, "NOTE", joined)
        assert digest_kernel.decode(digest_kernel.encode(value)) == joined


def test_persisted_objects_keep_their_order_and_canonical_ones_do_not_depend_on_it(digest_kernel):
    source = random.Random(7)
    alphabet = [
        "",
        "a",
        "b",
        "ab",
        "\u00e9",
        "\u20ac",
        "\ue000",
        "\U0001f600",
        "\uffff",
        '"',
        "\n",
        "\ud800",
        "longer name",
    ]
    for count in (1, 2, 3, 10, 33, 40, 300):
        names = list(
            {"".join(source.choices(alphabet, k=source.randrange(4))) + "x" * (at % 9) for at in range(count)}
        )
        names = [name for name in names if "\ud800" not in name or len(name) < 2]
        expected = sorted(names, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
        value = {name: {"b": [at], "a": at} for at, name in enumerate(names)}
        assert list(digest_kernel.decode(digest_kernel.encode(value))) == names
        assert list(digest_kernel.decode(digest_kernel.encode_digest(0, "N", value)[0])) == names
        canonical = digest_kernel.canonical(value)
        assert list(json.loads(canonical)) == expected
        assert list(json.loads(canonical)[expected[0]]) == ["a", "b"]
        source.shuffle(names)
        assert digest_kernel.canonical({name: value[name] for name in names}) == canonical


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.text(st.characters(categories=["Cs", "Lu", "Cc"])),
    st.sampled_from(["", "a", "\ue000", "\U0001f600"]),
)
NAMES = st.one_of(st.text(max_size=12), st.text(st.characters(codec="ascii"), max_size=20))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(NAMES, inner, max_size=6)),
    max_leaves=30,
)


def with_types(value: object) -> object:
    if isinstance(value, list):
        return [with_types(item) for item in value]
    if isinstance(value, dict):
        return [(name, with_types(item)) for name, item in value.items()]
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return (type(value), repr(value))


@settings(max_examples=400, deadline=None)
@given(VALUES)
def test_any_json_value_comes_back_with_its_types_from_every_kernel(digest_kernels, value):
    texts = {kernel.encode(value) for kernel in digest_kernels}
    assert len(texts) == 1
    text = texts.pop()
    for kernel in digest_kernels:
        assert with_types(kernel.decode(text)) == with_types(value)
        assert kernel.digest(0, "NOTE", kernel.decode(text)) == kernel.digest(0, "NOTE", value)
        assert kernel.encode_digest(2, "N", value) == (text, digest_kernels[0].digest(2, "N", value))
    assert len({kernel.canonical(value) for kernel in digest_kernels}) == 1


def outcome(function, *arguments):
    try:
        return with_types(function(*arguments))
    except LoomError as error:
        return type(error), str(error), getattr(error, "offset", None), getattr(error, "path", None)


FRAGMENTS = st.sampled_from(
    [
        *'[]{}:,"\\ \n\t0123456789.eE+-',
        "true",
        "false",
        "null",
        "NaN",
        "Infinity",
        '"a"',
        "\\u",
        "d800",
        "\\ud83d\\ude00",
        "\u00e9",
        "\U0001f600",
        "\x00",
        "\x1f",
        "1e400",
        "-0",
        "-0.0",
        "12345678901234567890",
        "-9223372036854775809",
        "[[",
        "]]",
    ]
)


@settings(max_examples=1500, deadline=None)
@given(st.one_of(st.lists(FRAGMENTS, max_size=12).map("".join), st.binary(max_size=12)))
def test_any_text_is_read_or_refused_alike_by_every_kernel(digest_kernels, text):
    assert len({repr(outcome(kernel.decode, text)) for kernel in digest_kernels}) == 1


@settings(max_examples=300, deadline=None)
@given(VALUES, st.data())
def test_damaged_text_is_read_or_refused_alike_by_every_kernel(digest_kernels, value, data):
    text = bytearray(digest_kernels[0].encode(value))
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    assert len({repr(outcome(kernel.decode, bytes(text))) for kernel in digest_kernels}) == 1


@pytest.mark.parametrize(
    ("text", "offset", "reason"),
    [
        ("", 0, "the text ends too early"),
        ("[1,]", 3, "expected a value"),
        ("[1 2]", 3, "expected ',' or ']'"),
        ('{"a" 1}', 5, "expected ':'"),
        ('{"a":1 "b":2}', 7, "expected ',' or '}'"),
        ("{a:1}", 1, "expected a name in double quotes"),
        ("1 x", 2, "text after the end of the value"),
        ("NaN", 0, "expected a value"),
        ("-Infinity", 0, "expected a value"),
        ("[01]", 2, "expected ',' or ']'"),
        ("[1e400]", 1, "a number beyond the range of a float"),
        ("\ufeff1", 0, "expected a value"),
        (b"[\xff]", 1, "invalid UTF-8"),
        ('["\u00e9", x]', 7, "expected a value"),
        ('"\ud800"', 1, "half of a surrogate pair"),
        ('["\u00e9\x01"]', 4, "invalid control character at"),
        ('"abc', 0, "unterminated string starting at"),
    ],
    ids=ascii,
)
def test_f09_text_that_is_not_json_is_refused_with_its_offset(digest_kernel, text, offset, reason):
    with pytest.raises(JsonTextError) as caught:
        digest_kernel.decode(text)
    assert (caught.value.offset, caught.value.reason) == (offset, reason)
    assert isinstance(caught.value, BadInputError)


def test_text_is_read_from_str_and_from_any_bytes_and_from_nothing_else(digest_kernel):
    text = '{"a":[1,2.0,"\u00e9"]}'
    for data in (text, text.encode(), bytearray(text.encode()), memoryview(text.encode())):
        assert digest_kernel.decode(data) == {"a": [1, 2.0, "\u00e9"]}
    with pytest.raises(BadInputError, match="expected bytes, not int"):
        digest_kernel.decode(7)


def test_the_last_of_repeated_names_wins(digest_kernel):
    assert digest_kernel.decode('{"a":1,"b":2,"a":"\\ud800"}') == {"a": "\ud800", "b": 2}
    assert digest_kernel.decode('{"a":1,"b":2,"a":3}') == {"a": 3, "b": 2}


def test_every_call_reads_new_containers(digest_kernel):
    first, second = digest_kernel.decode("[[],{}]"), digest_kernel.decode("[[],{}]")
    assert first is not second
    assert first[0] is not second[0]
    assert first[1] is not second[1]


def nested(depth: int, kind: str) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value] if kind == "list" else (value,) if kind == "tuple" else {"a": value}
    return value


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_f32_the_documented_depth_is_accepted_and_one_more_refused(digest_kernel, kind):
    deepest, deeper = nested(digest_kernel.MAX_DEPTH, kind), nested(digest_kernel.MAX_DEPTH + 1, kind)
    text = digest_kernel.encode(deepest)
    assert digest_kernel.encode(digest_kernel.decode(text)) == text
    assert digest_kernel.encode_digest(0, "NOTE", deepest)[0] == text
    step = ".a" if kind == "dict" else "[0]"
    for function in (
        digest_kernel.encode,
        digest_kernel.canonical,
        lambda value: digest_kernel.digest(0, "N", value),
    ):
        with pytest.raises(TooDeepError, match="nested deeper than 256 levels") as caught:
            function(deeper)
        assert caught.value.path == "$" + step * 256
        assert caught.value.type_name == kind
        assert isinstance(caught.value, JsonFormError)
    opening, closing = ('{"a":', "}") if kind == "dict" else ("[", "]")
    assert digest_kernel.decode(opening * 256 + "1" + closing * 256) == digest_kernel.decode(text)
    for tail in ("1" + closing * 257, ""):
        with pytest.raises(TooDeepError, match="nested deeper than 256 levels") as caught:
            digest_kernel.decode(opening * 257 + tail)
        assert caught.value.path == "$" + step * 256


def test_brackets_in_strings_are_no_depth(digest_kernel):
    value = ["[" * 1000, {"{" * 1000: "\\" * 10 + "["}]
    assert digest_kernel.decode(digest_kernel.encode(value)) == value
    wide = [[] for _ in range(1000)]
    assert digest_kernel.decode(digest_kernel.encode(wide)) == wide
