"""Reading what the log recorded, where it may be damaged.

What lives here: `read_recorded`. What must not: judging what was read.

Invariant: damage is no outcome. A body that is not what the kernel wrote is a storage fault, a
`StoreReadError` that names the event; it never passes for something the flow did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from loomfast._errors import JsonTextError, StoreReadError, TooDeepError

T = TypeVar("T")


def read_recorded(execution_id: str, sequence: int, read: Callable[[], T]) -> T:
    """Return what `read` takes from the body of an event; it must do nothing else.

    Raises `StoreReadError` if the body is no JSON, or another value than this kind of event has.
    """
    try:
        return read()
    except (JsonTextError, TooDeepError, LookupError, TypeError, AttributeError) as error:
        raise StoreReadError(
            execution_id,
            f"execution {execution_id!r}, sequence {sequence}: what it recorded cannot be read:"
            f" {type(error).__name__}: {error}",
        ) from error
