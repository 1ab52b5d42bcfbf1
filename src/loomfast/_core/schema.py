"""Checking a value against the schema a flow declares for its input or for a gate's answer.

A schema is whatever the author has at hand: a pydantic model, a msgspec struct, a dataclass-like type of
either library, or a function that takes the plain value and raises `ValueError` or `TypeError`. The value is
only checked, never converted: the flow receives the JSON form, on the first run as on every re-run.
"""

from __future__ import annotations

import sys
from typing import Any

from loomfast._errors import InputValidationError


def check(schema: Any, value: object, where: str) -> None:
    """Raise `InputValidationError` when `value` (plain JSON values) does not fit `schema`; None fits all."""
    if schema is None:
        return
    try:
        _apply(schema, value)
    except InputValidationError:
        raise
    except (ValueError, TypeError) as error:
        raise InputValidationError(where, _problems(error)) from error


def _apply(schema: Any, value: object) -> None:
    if hasattr(schema, "model_validate"):
        schema.model_validate(value)
    elif isinstance(schema, type) and hasattr(schema, "__struct_fields__"):
        sys.modules["msgspec"].convert(value, schema)
    else:
        schema(value)


def _problems(error: ValueError | TypeError) -> list[tuple[str, str]]:
    listed = getattr(error, "errors", None)
    if callable(listed):
        return [("$" + "".join(f".{part}" for part in one["loc"]), one["msg"]) for one in listed()]
    reason, _, path = str(error).partition(" - at `")
    return [(path.rstrip("`") or "$", reason)]
