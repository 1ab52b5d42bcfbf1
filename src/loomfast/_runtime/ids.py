"""Ids of executions that nobody has chosen.

What lives here: `new_ulid`, the default `id_factory`. Invariant: random bits are the operating system's, each
is used once, and a forked child never uses its parent's.
"""

from __future__ import annotations

import os
import time

from ulid_transform import bytes_to_ulid

_BITS = 10  # bytes of them to an id
# Asking the system hands the interpreter lock to whoever waits for it: not for every id.
_AT_ONCE = 100
_left: list[bytes] = []
os.register_at_fork(after_in_child=_left.clear)


def new_ulid() -> str:
    """Return a new ULID: 26 characters that sort by the millisecond of making, and 80 random bits."""
    try:
        bits = _left.pop()
    except IndexError:
        drawn = os.urandom(_BITS * _AT_ONCE)
        _left.extend(drawn[place : place + _BITS] for place in range(_BITS, len(drawn), _BITS))
        bits = drawn[:_BITS]
    return bytes_to_ulid((time.time_ns() // 1_000_000).to_bytes(6) + bits)
