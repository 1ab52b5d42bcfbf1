"""Checking a value against the schema a flow declares for its input or for a gate's answer.

A schema is whatever the author has at hand: a pydantic model, a msgspec struct, or a function that takes the
plain value and raises, or returns False, when it does not fit. The value is only checked, never converted:
the flow receives the JSON form, on the first run as on every re-run. So models check strictly: `"no"` is no
bool.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, get_origin

from loomfast._errors import BadInputError, InputValidationError
from loomfast._kernels import encode


def check_schema(schema: Any) -> None:
    """Raise `BadInputError` unless `schema` is one of the things above, or None, which fits every value."""
    if schema is None or hasattr(schema, "model_validate") or hasattr(schema, "__struct_fields__"):
        return
    asynchronous = inspect.iscoroutinefunction(schema)
    if isinstance(schema, type) or not callable(schema) or get_origin(schema) is not None or asynchronous:
        raise BadInputError(
            f"{schema!r} is no schema: use a pydantic model, a msgspec struct, or a function that raises"
        )


def check(schema: Any, value: object, where: str) -> None:
    """Raise `InputValidationError` when `value` (plain JSON values) does not fit `schema`; None fits all."""
    if schema is None:
        return
    try:
        _apply(schema, value)
    except InputValidationError:
        raise
    except Exception as error:
        raise InputValidationError(where, _problems(error)) from error


def _apply(schema: Any, value: object) -> None:
    if hasattr(schema, "model_validate"):
        schema.model_validate_json(encode(value), strict=True)
    elif isinstance(schema, type) and hasattr(schema, "__struct_fields__"):
        sys.modules["msgspec"].convert(value, schema)
    elif schema(value) is False:
        raise ValueError("does not fit")


def _problems(error: Exception) -> list[tuple[str, str]]:
    listed = getattr(error, "errors", None)
    if callable(listed):
        return [("$" + "".join(f".{part}" for part in one["loc"]), one["msg"]) for one in listed()]
    reason, _, path = str(error).partition(" - at `")
    if not isinstance(error, ValueError | TypeError):
        reason = f"{type(error).__name__}: {reason}"
    return [(path.rstrip("`") or "$", reason)]
