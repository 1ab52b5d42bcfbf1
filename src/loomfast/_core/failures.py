"""Exceptions as plain data: `{type, message, data?}`, and back, without pickle and without guessing.

A declared failure is rebuilt by setting the `args` and fields it had, never by calling its constructor: an
exception whose constructor takes other arguments than it passes on comes back whole (F33). What a failure
carries that has no JSON form is left out of its record, on the first run as on every re-run, since the first
run too is handed the rebuilt exception.

`data` holds `args`, `fields` (attributes, slots, and what a built-in class keeps outside both, such as
`errno`) and, for a group, the records of its `exceptions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from loomfast._errors import JsonFormError, StepFailedError
from loomfast._kernels import decode, encode

# A message beyond this many characters is cut, and the data of a failure that nobody rebuilds is dropped: a
# log is no place for a dump.
MESSAGE_LIMIT = 16_384
# How deep the groups of a record nest.
GROUP_DEPTH = 20

Classes = tuple[type[BaseException], ...]


def record(error: BaseException, declared: Classes = ()) -> dict[str, Any]:
    """Return the plain record of an exception. Never raises, whatever the exception's own methods do.

    `declared` are the classes it is going to be rebuilt from; only with them is the whole of it kept.
    """
    return _record(error, declared, GROUP_DEPTH)


def rebuild(key: str, error: dict[str, Any], declared: Classes) -> BaseException:
    """Return the exception a step's record stands for.

    A `StepFailedError` when its class is not declared any more, or cannot be made without its constructor.
    """
    try:
        return _restore(_class_of(error["type"], declared), key, error, declared)
    except Exception:
        return StepFailedError(key, error)


def _record(error: BaseException, declared: Classes, depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": _type_name(type(error), declared), "message": _message(error)}
    try:
        data = _data(error, declared, depth)
    except Exception:
        return value
    if data and (declared or len(encode(data)) <= MESSAGE_LIMIT):
        value["data"] = data
    return value


def _data(error: BaseException, declared: Classes, depth: int) -> dict[str, Any]:
    data: dict[str, Any] = {}
    args = _plain(list(error.args))
    if args is not None:
        data["args"] = args
    fields = {name: plain[0] for name, held in _held(error).items() if (plain := _plain([held])) is not None}
    if fields:
        data["fields"] = fields
    if isinstance(error, BaseExceptionGroup):
        members = error.exceptions if depth > 0 else ()
        data = {"exceptions": [_record(member, declared, depth - 1) for member in members]}
        if fields:
            data["fields"] = fields
    return data


def _type_name(cls: type[BaseException], declared: Classes) -> str:
    same = [other for other in declared if other.__qualname__ == cls.__qualname__]
    return cls.__qualname__ if len(same) < 2 else _full_name(cls)


def _full_name(cls: type[BaseException]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _class_of(name: str, declared: Classes) -> type[BaseException]:
    for cls in declared:
        if name in (cls.__qualname__, _full_name(cls)):
            return cls
    # Of several classes of one name the latest counts: an older one was replaced, and is not collected yet.
    found = [
        sub for cls in declared for sub in _subclasses(cls) if name in (sub.__qualname__, _full_name(sub))
    ]
    return found[-1]


def _restore(cls: type[BaseException], key: str, error: dict[str, Any], declared: Classes) -> BaseException:
    data = error.get("data") or {}
    args = data.get("args", [error["message"]])
    if issubclass(cls, BaseExceptionGroup):
        args = [_group_message(error), [rebuild(key, member, declared) for member in data["exceptions"]]]
    # A class of its own may ask for anything; what a built-in one asks for are the `args` it keeps.
    built_in = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    restored: BaseException = built_in.__new__(cls, *args)
    if not isinstance(restored, BaseExceptionGroup):
        restored.args = tuple(args)
    slots = _slots(cls)
    for name, held in data.get("fields", {}).items():
        if name in slots:
            slots[name].__set__(restored, held)
        else:
            restored.__dict__[name] = held
    return restored


def _group_message(error: dict[str, Any]) -> str:
    # `str()` of a group counts its members, and counts them anew.
    message: str = error["message"]
    return message.rpartition(" (")[0] or message


def _held(error: BaseException) -> dict[str, Any]:
    held = dict(vars(error))
    for name, slot in _slots(type(error)).items():
        try:
            value = slot.__get__(error, type(error))
        except AttributeError:
            continue
        # A built-in class expects its own types back, so only what stays itself in JSON is kept.
        if isinstance(value, str | int | float) and type(value) in (str, int, float, bool):
            held[name] = value
    return held


def _slots(cls: type[BaseException]) -> dict[str, MemberDescriptorType | GetSetDescriptorType]:
    return {
        name: slot
        for base in cls.__mro__
        if base not in (BaseException, BaseExceptionGroup)
        for name, slot in vars(base).items()
        if isinstance(slot, MemberDescriptorType | GetSetDescriptorType) and not name.startswith("__")
    }


def _subclasses(cls: type[BaseException]) -> Iterable[type[BaseException]]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as broken:
        return f"<str() of this {type(error).__qualname__} raised {type(broken).__qualname__}>"
    if len(text) > MESSAGE_LIMIT:
        return f"{text[:MESSAGE_LIMIT]}… ({len(text)} characters)"
    return text


def _plain(value: list[Any]) -> list[Any] | None:
    try:
        plain: list[Any] = decode(encode(value))
    except JsonFormError:
        return None
    return plain
