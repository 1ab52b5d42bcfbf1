"""Checks of arguments that several doors share."""

from __future__ import annotations

from loomfast._errors import BadInputError


def text_argument(name: str, value: object) -> None:
    """Raise `BadInputError` unless `value` is a non-empty text."""
    if not isinstance(value, str) or not value:
        raise BadInputError(f"{name} must be a non-empty text, not {shown(value)}")


def shown(value: object) -> str:
    """Return how a refused value reads in the message that refuses it: short, whatever the value is."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or a repr that fails
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def count_argument(name: str, value: object) -> None:
    """Raise `BadInputError` unless `value` is a whole number, 1 or more."""
    if type(value) is not int or value < 1:
        raise BadInputError(f"{name}={shown(value)}: must be a whole number, 1 or more")


def seconds_argument(name: str, value: object) -> None:
    """Raise `BadInputError` unless `value` is a number of seconds, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise BadInputError(f"{name}={shown(value)}: must be a number of seconds, 0 or more")


def fence_argument(fence: object) -> None:
    """Raise `BadInputError` unless `fence` is None or may be a token."""
    if fence is not None and (type(fence) is not int or not 0 <= fence < 2**63):
        raise BadInputError(f"fence={shown(fence)}: must be a token that acquire_fence returned")
