"""Exceptions as plain data: `{type, message, data?}`, and back, without pickle and without guessing.

A declared failure is rebuilt by setting the `args` and fields it had, never by calling its constructor: an
exception whose constructor takes other arguments than it passes on comes back whole (F33). What a failure
carries that has no JSON form is left out of its record, on the first run as on every re-run, since the first
run too is handed the rebuilt exception.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loomfast._errors import JsonFormError
from loomfast._kernels import decode, encode

# A message beyond this many characters is cut: a log is no place for a dump.
MESSAGE_LIMIT = 16_384


def record(error: BaseException) -> dict[str, Any]:
    """Return the plain record of an exception. Never raises, whatever the exception's own methods do."""
    value: dict[str, Any] = {"type": type(error).__qualname__, "message": _message(error)}
    data: dict[str, Any] = {}
    args = _plain(list(error.args))
    if args is not None:
        data["args"] = args
    fields = {name: plain for name, held in vars(error).items() if (plain := _plain([held])) is not None}
    if fields:
        data["fields"] = {name: plain[0] for name, plain in fields.items()}
    if data:
        value["data"] = data
    return value


def rebuild(error: dict[str, Any], declared: Iterable[type[BaseException]]) -> BaseException | None:
    """Return the declared exception a record stands for, or None when its class is not declared any more."""
    for cls in declared:
        for candidate in (cls, *_subclasses(cls)):
            if candidate.__qualname__ == error["type"]:
                return _restore(candidate, error)
    return None


def _restore(cls: type[BaseException], error: dict[str, Any]) -> BaseException:
    data = error.get("data") or {}
    restored = cls.__new__(cls)
    restored.args = tuple(data.get("args", [error["message"]]))
    for name, held in data.get("fields", {}).items():
        restored.__dict__[name] = held
    return restored


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
