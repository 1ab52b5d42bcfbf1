"""How calls of one run get their identity: `id` for the first call, `id#1`, `id#2` for later ones.

The sequence of keys is a pure function of the order of calls, and so of logged inputs (contract, section 2).
"""

from __future__ import annotations

from loomfast._errors import BadInputError


class CallKeys:
    """Hands out the keys of one run, in call order."""

    __slots__ = ("_calls", "_explicit")

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._explicit: set[str] = set()

    def next(self, call_id: str, explicit: str | None = None) -> str:
        """Return the key of the next call of `call_id`, or check and return the caller's explicit key.

        Raises `BadInputError` for an explicit key this run has used before.
        """
        if explicit is not None:
            if explicit in self._explicit:
                raise BadInputError(f"key {explicit!r} names two calls of one run; keys must differ")
            self._explicit.add(explicit)
            return explicit
        n = self._calls.get(call_id, 0)
        self._calls[call_id] = n + 1
        return call_id if n == 0 else f"{call_id}#{n}"
