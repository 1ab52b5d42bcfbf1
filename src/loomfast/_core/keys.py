"""How calls of one run get their identity: `id` for the first call, `id#1`, `id#2` for later ones.

The sequence of keys is a pure function of the order of calls, and so of logged inputs (contract, section 2).
"""

from __future__ import annotations

from loomfast._errors import BadInputError


class CallKeys:
    """Hands out the keys of one run, in call order."""

    __slots__ = ("_calls", "_used")

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._used: set[str] = set()

    def next(self, call_id: str, explicit: str | None = None) -> str:
        """Return the key of the next call of `call_id`, or check and return the caller's explicit key.

        Raises `BadInputError` for a key that another call of this run has already.
        """
        if explicit is None:
            n = self._calls.get(call_id, 0)
            self._calls[call_id] = n + 1
            key = call_id if n == 0 else f"{call_id}#{n}"
        else:
            key = explicit
        if key in self._used:
            raise BadInputError(f"key {key!r} names two calls of one run; give one of them another key=")
        self._used.add(key)
        return key
