"""The digest kernel: canonical JSON, the persisted form of values, and FNV-1a 64. The specification.

Here: how a value becomes JSON text in its two forms, how text becomes a value again, and the identity of an
emit. Not here: which types have a JSON form (`_jsonform`), the grammar of reading (`_jsontext`).

Two texts of one value come from one walk, so they cannot disagree:

    value       {"b": 1.0, "a": [-0.0, 1e21, True]}
    canonical   {"a":[0,1e+21,true],"b":1}             RFC 8785: what ECMAScript's JSON.stringify writes,
                                                       names sorted by UTF-16 code units
    persisted   {"b":1.0,"a":[-0.0,1e+21,true]}        names in their own order; a float stays a float

The walk keeps the open containers on a list of frames instead of recursing. A frame takes a copy of its
container's members when it opens, in the container's own order; that is also the order in which conversion
hooks run, so a hook that changes a container around it changes nothing. Each finished value is a pair of
texts; a container that closes joins the pairs of its members (sorted by name for the canonical one) into its
own pair, and is then a finished value itself.

Invariants: `decode(encode(v))` is the JSON form of `v`, types included, and has the digest of `v`; equal
canonical texts, and only they, have equal identities.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

from loomfast import _digits, _jsontext
from loomfast._errors import BadInputError, JsonTextError
from loomfast._jsonform import (
    MAX_DEPTH,
    Bag,
    Members,
    Refusal,
    Step,
    dict_members,
    is_plain,
    joined,
    resolve,
    too_deep,
    type_name,
)

REVISION = 3

_OFFSET = 0xCBF29CE484222325
_PRIME = 0x100000001B3
_MASK = 0xFFFFFFFFFFFFFFFF

_CONTAINERS = (list, tuple, Bag, dict, Members)
_ESCAPED = re.compile('[\x00-\x1f"\\\\\ud800-\udfff]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
_HEX = re.compile("[0-9a-f]{16}")


# --- FNV-1a 64 -----------------------------------------------------------------------------------


def fnv1a64(data: object) -> int:
    """Return the FNV-1a 64 of the bytes of `data`, an unsigned integer: the definition, on big integers."""
    value = _OFFSET
    for byte in _octets(data):
        value = ((value ^ byte) * _PRIME) & _MASK
    return value


def fnv1a64_limbs(data: object) -> int:
    """Return the same as `fnv1a64`, by ADR 0102's formulation without 64-bit arithmetic.

    The value is four 16-bit limbs; the prime is 2**40 + 0x1b3, so a product is each limb times 0x1b3 plus the
    two low limbs shifted by 40 bits: two limbs up and 8 bits to the left.
    """
    a, b, c, d = 0x2325, 0x8422, 0x9CE4, 0xCBF2
    for byte in _octets(data):
        a ^= byte
        p = a * 0x1B3
        q = b * 0x1B3 + (p >> 16)
        r = c * 0x1B3 + (q >> 16) + ((a << 8) & 0xFFFF)
        s = d * 0x1B3 + (r >> 16) + (a >> 8) + ((b << 8) & 0xFFFF)
        a, b, c, d = p & 0xFFFF, q & 0xFFFF, r & 0xFFFF, s & 0xFFFF
    return a | b << 16 | c << 32 | d << 48


def _octets(data: object) -> bytes:
    try:
        return memoryview(data).tobytes()  # type: ignore[arg-type]  # that is what is being found out
    except TypeError:
        raise BadInputError(f"expected bytes, not {type_name(data)}") from None


# --- values to text ------------------------------------------------------------------------------


def canonical(value: object) -> bytes:
    """Return the canonical JSON of `value` (RFC 8785), in UTF-8.

    Raises a `JsonFormError`: `UnsupportedTypeError`, `KeyCollisionError`, `CircularValueError` or
    `TooDeepError`, with the path of what has no JSON form.
    """
    return _walk(value)[0].encode("utf-8")


def encode(value: object) -> bytes:
    """Return the persisted JSON of `value`, in UTF-8: members keep their order, floats stay floats.

    Raises `JsonFormError` exactly where `canonical` does.
    """
    return _walk(value)[1].encode("utf-8")


def decode(data: Any) -> Any:
    """Return the value that `data` (bytes-like, or str) spells in JSON; all lists and dicts are new.

    Integers of any size are exact and halves of surrogate pairs survive. Raises `JsonTextError` with the byte
    offset, `TooDeepError` below `MAX_DEPTH` levels.
    """
    if issubclass(type(data), str):
        text = str.__str__(data)
        try:
            return _jsontext.parse(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            at = len(text[: error.start].encode("utf-8"))
            raise JsonTextError(at, "half of a surrogate pair") from None
    return _jsontext.parse(_octets(data))


class _Frame:
    """An open container: what is left of it, and the texts of what is done."""

    __slots__ = ("done", "kind", "owner", "rest", "step")

    def __init__(self, owner: object, body: Any) -> None:
        self.owner = owner
        self.kind = type(body)
        self.step: Step = None
        self.done: list[tuple[str, str, str]] = []
        self.rest: Iterator[tuple[Step, Any]]
        if self.kind is Members:
            self.rest = zip(body[::2], body[1::2], strict=True)
        elif self.kind is Bag:
            self.rest = zip(repeat(None), body)  # one side has no end
        else:
            self.rest = iter(list(enumerate(body)))

    def close(self) -> tuple[str, str]:
        """Return the canonical and the persisted text of the whole container."""
        if self.kind is not Members:
            if self.kind is Bag:
                self.done.sort(key=lambda member: (member[1].encode("utf-8"), member[2].encode("utf-8")))
            return (
                "[" + ",".join([member[1] for member in self.done]) + "]",
                "[" + ",".join([member[2] for member in self.done]) + "]",
            )
        named = [(name, _string(name), first, second) for name, first, second in self.done]
        persisted = "{" + ",".join([f"{name}:{second}" for _, name, _, second in named]) + "}"
        named.sort(key=lambda member: member[0].encode("utf-16-be", "surrogatepass"))
        return "{" + ",".join([f"{name}:{first}" for _, name, first, _ in named]) + "}", persisted


def _walk(value: object) -> tuple[str, str]:
    """Return the canonical and the persisted text of `value`."""
    frames: list[_Frame] = []
    while True:
        owner = value
        if not is_plain(value):
            value = _located(resolve, value, frames)
        if type(value) in _CONTAINERS:
            if len(frames) == MAX_DEPTH:
                raise too_deep([frame.owner for frame in frames], owner, [frame.step for frame in frames])
            if type(value) is dict:
                value = _located(_named, value, frames)
            frames.append(_Frame(owner, value))
        else:
            done = _scalar(value)
            if not frames:
                return done
            frames[-1].done.append((str(frames[-1].step), *done))
        while True:
            frame = frames[-1]
            following = next(frame.rest, None)
            if following is not None:
                frame.step, value = following
                break
            frames.pop()
            done = frame.close()
            if not frames:
                return done
            frames[-1].done.append((str(frames[-1].step), *done))


def _located(convert: Any, value: object, frames: list[_Frame]) -> object:
    """Call a conversion of `_jsonform`; give its refusal the path of `value`."""
    try:
        return convert(value)
    except Refusal as refusal:
        raise refusal.at([frame.step for frame in frames]) from refusal.__cause__


def _named(value: dict[Any, Any]) -> Members:
    if all(type(key) is str and joined(key) is key for key in value):
        return Members(chain.from_iterable(value.items()))
    return dict_members(value)


def _scalar(value: Any) -> tuple[str, str]:
    kind = type(value)
    if kind is str:
        text = _string(value)
    elif value is None:
        text = "null"
    elif kind is bool:
        text = "true" if value else "false"
    elif kind is int:
        text = _digits.text(value)
    else:
        return _float(value)
    return text, text


def _string(value: str) -> str:
    return '"' + _ESCAPED.sub(_escape, joined(value)) + '"'


def _escape(found: re.Match[str]) -> str:
    char = found[0]
    return _SHORT.get(char) or f"\\u{ord(char):04x}"


def _float(value: float) -> tuple[str, str]:
    """Return the text of a float: ECMAScript's Number::toString, and the persisted one.

    Both have the shortest digits that read back as the same float, which `repr` finds; ECMAScript lays them
    out differently. The persisted text ends in `.0` where the other would read back as an integer.
    """
    if value != value or value in (float("inf"), float("-inf")):
        return "null", "null"
    if value == 0.0:
        return "0", "-0.0" if repr(value)[0] == "-" else "0.0"
    sign, text = ("-", repr(-value)) if value < 0 else ("", repr(value))
    mantissa, _, exponent = text.partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    # The value is 0.DIGITS * 10**point.
    point = len(whole) + int(exponent or 0) if whole != "0" else len(digits) - len(fraction)
    digits = digits.rstrip("0")
    count = len(digits)
    if count <= point <= 21:
        text = sign + digits + "0" * (point - count)
        return text, text + ".0"
    if 0 < point <= 21:
        text = f"{sign}{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        text = f"{sign}0.{'0' * -point}{digits}"
    else:
        text = f"{sign}{digits[0]}{'.' if count > 1 else ''}{digits[1:]}e{point - 1:+d}"
    return text, text


# --- identities ----------------------------------------------------------------------------------


def digest(segment: int, event_type: str, payload: object) -> int:
    """Return the identity of an emit (ADR 0102): FNV-1a 64 of `<segment>|<canonical [event_type, payload]>`.

    Raises `BadInputError` for a segment that is no integer of at least 0 or an event type that is no text,
    and `JsonFormError` as `canonical` does; paths and `MAX_DEPTH` count from the payload.
    """
    return encode_digest(segment, event_type, payload)[1]


def encode_digest(segment: int, event_type: str, payload: object) -> tuple[bytes, int]:
    """Return `(encode(payload), digest(segment, event_type, payload))`, from one walk of the payload."""
    if not issubclass(type(segment), int) or type(segment) is bool:
        raise BadInputError(f"segment must be an integer, not {type_name(segment)}")
    segment = int.__int__(segment)
    if segment < 0:
        raise BadInputError("segment must be at least 0")
    if not issubclass(type(event_type), str):
        raise BadInputError(f"event_type must be text, not {type_name(event_type)}")
    event_type = str.__str__(event_type)
    first, second = _walk(payload)
    text = f"{_digits.text(segment)}|[{_string(event_type)},{first}]"
    return second.encode("utf-8"), fnv1a64(text.encode("utf-8"))


def format_digest(value: int) -> str:
    """Return `value` as 16 lower-case hex digits; raise `BadInputError` if it is no unsigned 64-bit one."""
    if not issubclass(type(value), int) or type(value) is bool:
        raise BadInputError(f"a digest is an integer, not {type_name(value)}")
    value = int.__int__(value)
    if not 0 <= value <= _MASK:
        raise BadInputError("a digest is an unsigned 64-bit integer")
    return f"{value:016x}"


def parse_digest(text: str) -> int:
    """Return the integer that `text` spells; raise `BadInputError` unless it is 16 lower-case hex digits."""
    if not issubclass(type(text), str):
        raise BadInputError(f"a digest is 16 lower-case hex digits, not {type_name(text)}")
    text = str.__str__(text)
    if not _HEX.fullmatch(text):
        raise BadInputError(f"a digest is 16 lower-case hex digits, not {text[:32]!a}")
    return int(text, 16)
