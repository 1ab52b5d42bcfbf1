"""What the JSON form of a Python value is, for everything that is not plain JSON already.

Here, once, for the persisted form and for the digest, in both kernels: the table of docs/values.md, the
names that keys become, and how an error spells the place (`$.items[3].when`). Not here: how JSON text is
written or read; only the kernels and `_jsontext` do that.

Plain are exactly `str`, `int`, `float`, `bool`, `None`, `list`, `tuple` and `dict`: a subclass is not.
`resolve` turns any other value into a plain one, or into one of two private containers: `Members` (an object
whose names are already text and distinct) and `Bag` (an array that the kernel sorts by canonical form).

Invariants: a value is converted one layer at a time and each hook is called once per walk; nothing here
recurses into a value; user code that raises becomes `Refusal`, which the kernel turns into a `JsonFormError`
with the path; optional libraries (numpy, pydantic, msgspec) are looked up in `sys.modules`, never imported.
"""

from __future__ import annotations

import re
import sys
from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from json.encoder import encode_basestring_ascii
from typing import Any
from uuid import UUID

from loomfast import _digits
from loomfast._errors import (
    CircularValueError,
    JsonFormError,
    KeyCollisionError,
    TooDeepError,
    UnsupportedTypeError,
)

# Levels of arrays and objects that a value or a text may nest: this many are accepted, one more is not.
MAX_DEPTH = 256

# One step of a path: a member's name, an element's index, or None for "some member of a set".
Step = str | int | None

# The name a type was given: a metaclass cannot lie about it, nor raise.
_name_of_type = type.__dict__["__name__"].__get__

_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class Members(list[Any]):
    """An object as a flat list `[name, value, name, value, ...]`: names are exact `str`, all different."""


class Bag(list[Any]):
    """A set: an array whose elements the kernel sorts by their canonical form."""


class Refusal(Exception):
    """Why one value or key has no JSON form. It has no path yet; `at` makes the public error."""

    def __init__(self, error: type[JsonFormError], value: object, reason: str, name: Step = None) -> None:
        super().__init__(reason)
        self.error = error
        self.type_name = type_name(value)
        self.reason = reason
        self.name = name

    def at(self, steps: list[Step]) -> JsonFormError:
        """Return the error to raise for the value at `steps`."""
        where = [*steps, self.name] if self.name is not None else steps
        return self.error(path_text(where), self.type_name, self.reason)


def is_plain(value: object) -> bool:
    """True if `value` is of exactly one of the plain types.

    Types are compared by identity: a metaclass can make hashing or comparing its classes raise.
    """
    kind = type(value)
    return (
        kind is str
        or kind is int
        or value is None
        or kind is float
        or kind is bool
        or kind is list
        or kind is dict
        or kind is tuple
    )


def type_name(value: object) -> str:
    """Return the name of the type of `value`, without running code of it."""
    name: str = _name_of_type(type(value))
    return name


def path_text(steps: list[Step]) -> str:
    """Return `steps` as `$.items[3]["a b"]`, in ASCII, so that it can be printed anywhere."""
    parts = ["$"]
    for step in steps:
        if step is None:
            parts.append("[*]")
        elif isinstance(step, int):
            parts.append(f"[{step}]")
        elif step.isidentifier() and step.isascii():
            parts.append(f".{step}")
        else:
            parts.append(f"[{encode_basestring_ascii(step)}]")
    return "".join(parts)


def too_deep(owners: list[object], value: object, steps: list[Step]) -> JsonFormError:
    """Return the error for `value`, reached by `steps`, one level below the deepest allowed.

    `owners` are the containers around it, outermost first, as the caller handed them over (not what a hook
    made of them). The same object twice on that line is a cycle, reported where it first closes.
    """
    seen: dict[int, object] = {}
    for depth, owner in enumerate([*owners, value]):
        if id(owner) in seen:
            return CircularValueError(path_text(steps[:depth]), type_name(owner), "the value contains itself")
        seen[id(owner)] = owner
    return TooDeepError(path_text(steps), type_name(value), f"nested deeper than {MAX_DEPTH} levels")


def joined(text: str) -> str:
    """Return `text` with two adjacent halves of a surrogate pair made the one character they mean.

    In JSON text they are indistinguishable, so a re-run would see the character.
    """
    if text.isascii() or not _PAIR.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def members(pairs: Iterable[tuple[object, object]]) -> Members:
    """Return `pairs` with their keys as JSON names, in order.

    Raises `Refusal` for a key without a name and for two keys of one name. Keys are never hashed or compared.
    """
    found = Members()
    seen: set[str] = set()
    for key, value in pairs:
        name = _name(key)
        if name in seen:
            raise Refusal(KeyCollisionError, key, "two keys of the mapping become this one name", name)
        seen.add(name)
        found.append(name)
        found.append(value)
    return found


def dict_members(value: dict[Any, Any]) -> Members:
    """Return `members` of an exact dict whose keys are not all plain text."""
    try:
        return members(list(value.items()))
    except Refusal:
        raise
    except Exception as error:
        raise _failed(value, error) from error


def _name(key: Any) -> str:
    """Return the JSON name of `key`: as the stdlib's `json` writes it, subclasses by their base value."""
    original = key
    for _ in range(MAX_DEPTH):
        kind = type(key)
        if key is None:
            return "null"
        if kind is str:
            return joined(key)
        if kind is bool:
            return "true" if key else "false"
        if kind is int:
            return _digits.text(key)
        if kind is float:
            return _float_name(key)
        if issubclass(kind, Enum):
            key = key.value
        elif issubclass(kind, (str, int, float)):
            key = _base(kind, key)
        elif _is_numpy_scalar(kind):
            key = _item(key)
        else:
            break
    raise Refusal(UnsupportedTypeError, original, f"a key of type {type_name(original)} has no JSON name")


def _float_name(key: float) -> str:
    if key != key:
        return "NaN"
    if key in (float("inf"), float("-inf")):
        return "Infinity" if key > 0 else "-Infinity"
    return repr(key)


def resolve(value: object) -> object:
    """Return the plain value (or `Members`, or `Bag`) that stands for `value`; see docs/values.md.

    Raises `Refusal`: the type is not in the table, its conversion raised, or converting never ends.
    """
    original = value
    try:
        for _ in range(MAX_DEPTH):
            value = plain(value)
            if is_plain(value) or type(value) is Members or type(value) is Bag:
                return value
    except Refusal:
        raise
    except Exception as error:
        raise _failed(original, error) from error
    raise Refusal(TooDeepError, original, f"converting a {type_name(original)} never ends")


def _failed(value: object, error: Exception) -> Refusal:
    name = type_name(value)
    return Refusal(UnsupportedTypeError, value, f"converting a {name} raised {type_name(error)}")


def plain(value: Any) -> object:
    """Turn one value that is not plain JSON into something one step plainer, or raise `Refusal`.

    Types are asked, never instances: what an instance makes up (`__class__`, attributes) counts for nothing.
    """
    kind = type(value)
    for base, convert in _BASES:
        if kind is base:
            return convert(value)
    hook = getattr(kind, "__json__", None)
    if hook is not None:
        return hook(value)
    if issubclass(kind, Enum):
        return value.value
    if issubclass(kind, (str, int, float)):
        return _base(kind, value)
    model = getattr(sys.modules.get("pydantic.main"), "BaseModel", None)
    if model is not None and issubclass(kind, model):
        return value.model_dump(mode="json")
    msgspec = sys.modules.get("msgspec")
    struct = getattr(msgspec, "Struct", None)
    if struct is not None and issubclass(kind, struct):
        return msgspec.to_builtins(value)  # type: ignore[union-attr]  # it has Struct, so it is there
    if hasattr(kind, "__dataclass_fields__"):
        return members((field.name, getattr(value, field.name)) for field in fields(value))
    if issubclass(kind, Mapping):
        return members(value.items())
    # Sequences and sets are read from their own storage, so that an overridden __iter__ cannot run for ever.
    if issubclass(kind, tuple):
        return tuple.__getitem__(value, slice(None))
    if issubclass(kind, list):
        return list.__getitem__(value, slice(None))
    for base, convert in _BASES:
        if issubclass(kind, base):
            return convert(value)
    if _is_numpy_scalar(kind):
        return _item(value)
    raise Refusal(UnsupportedTypeError, value, f"{type_name(value)} has no JSON form")


def _base(kind: type, value: Any) -> object:
    if issubclass(kind, str):
        return str.__str__(value)
    return int.__int__(value) if issubclass(kind, int) else float.__float__(value)


def _is_numpy_scalar(kind: type) -> bool:
    generic = getattr(sys.modules.get("numpy"), "generic", None)
    return generic is not None and issubclass(kind, generic)


def _item(value: Any) -> object:
    """Return the Python value of a numpy scalar; extended precision has none, numpy hands back the scalar."""
    item: object = value.item()
    if type(item) is type(value):
        raise Refusal(UnsupportedTypeError, value, f"{type_name(value)} has no JSON form")
    return item


def _set(value: Any) -> Bag:
    return Bag(frozenset(value))


def _bytes(value: Any) -> str:
    return b64encode(memoryview(value).tobytes()).decode("ascii")


# Order matters only in that datetime is a date; both write isoformat.
_BASES: tuple[tuple[type, Any], ...] = (
    (set, _set),
    (frozenset, _set),
    (bytes, _bytes),
    (bytearray, _bytes),
    (memoryview, _bytes),
    (datetime, lambda value: value.isoformat()),
    (date, lambda value: value.isoformat()),
    (time, lambda value: value.isoformat()),
    (UUID, str),
    (Decimal, str),
)
