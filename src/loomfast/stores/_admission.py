"""What stores check before they write or read: one rule for every store.

What lives here: the checks of what is appended and read that stores share. What must not: storage, locks,
asyncio, and whether a batch may be appended, which is the admission kernel's to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from loomfast import _events as ev
from loomfast._errors import PrefixTruncatedError, UnsupportedTypeError
from loomfast._kernels import Envelope


def refuse_unstorable(envelopes: Sequence[Envelope]) -> None:
    """Refuse what a store of JSON text cannot keep, before anything is written.

    Raises `UnsupportedTypeError` at `$` for a payload without a JSON form.
    """
    for event in envelopes:
        if not isinstance(event.body, bytes):
            value = event.body.value if isinstance(event.body, ev.Opaque) else event.body
            raise UnsupportedTypeError(
                "$",
                type(value).__qualname__,
                f"execution {event.execution_id!r}, sequence {event.sequence}: a payload of type "
                f"{type(value).__qualname__} has no JSON form, and this store keeps JSON",
            )


def check_range(execution_id: str, first: int, last: int | None, cut: int) -> None:
    """Refuse a range that holds a sequence which was truncated, one of 1 to `cut` - 1.

    Raises `PrefixTruncatedError`.
    """
    wanted = max(first, 1)
    if wanted < cut and (last is None or wanted <= last):
        raise PrefixTruncatedError(execution_id, wanted, cut)
