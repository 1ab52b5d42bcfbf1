"""The contract of what every event store makes of its arguments, and the checks that all stores share.

What lives here: which texts and numbers a store takes, and the one place where a number is brought into the
range that all stores count in. What must not: storage, and what an argument means.

The guarantee goes on from those of `_spi_timers.py`:

25. Every store refuses the same arguments, with `BadInputError` and nothing written: an id, a key or a name
    that is no text, a number that is not whole, a number to be kept that 64 bits do not hold, and `write` of
    nothing. A number that is only compared may be any: one beyond 64 bits counts as the last within.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from loomfast._errors import BadInputError

FIRST: Final = -(2**63)
LAST: Final = 2**63 - 1


def check_texts(*texts: object) -> None:
    """Refuse ids, keys and names that are no texts. Raises `BadInputError`."""
    for text in texts:
        if not isinstance(text, str):
            raise BadInputError(f"{text!r} is no text: give ids, keys and names as str")


def check_kept(name: str, number: object) -> None:
    """Refuse a number that cannot be kept. Raises `BadInputError`."""
    if not FIRST <= _whole(name, number) <= LAST:
        raise BadInputError(f"{name}={number}: must be a whole number of 64 bits, {FIRST} to {LAST}")


def bounded(name: str, number: object) -> int:
    """Return a number that is only compared, within 64 bits. Raises `BadInputError` if it is not whole."""
    return max(FIRST, min(_whole(name, number), LAST))


def limit_of(limit: object) -> int:
    """Return how long a page may be. Raises `BadInputError` below 1."""
    if _whole("limit", limit) < 1:
        raise BadInputError(f"limit={limit}: must be 1 or more")
    return bounded("limit", limit)


def position_of(after: object) -> int:
    """Return behind which position a page begins. Raises `BadInputError` below 0."""
    if _whole("after", after) < 0:
        raise BadInputError(f"after={after}: positions start at 1; give 0 to read from the start")
    return bounded("after", after)


def range_of(first: object, last: object) -> tuple[int, int | None]:
    """Return the ends of a range of sequences; `last` may be None."""
    return bounded("first", first), None if last is None else bounded("last", last)


def check_some(envelopes: Sequence[object]) -> None:
    """Refuse an append of nothing that somebody would wait for. Raises `BadInputError`."""
    if not envelopes:
        raise BadInputError("write of no events: there is nothing to wait for")


def _whole(name: str, number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool):
        raise BadInputError(f"{name}={number!r}: must be a whole number")
    return number
