"""Checks of arguments that end up as names in a log."""

from __future__ import annotations

from loomfast._errors import BadInputError


def text_argument(name: str, value: object) -> None:
    """Raise `BadInputError` unless `value` is a non-empty text."""
    if not isinstance(value, str) or not value:
        raise BadInputError(f"{name} must be a non-empty text, not {value!r}")
