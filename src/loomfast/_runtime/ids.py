"""Ids of executions that nobody has chosen.

What lives here: `new_ulid`, the default `id_factory`.
"""

from __future__ import annotations

import os
import time

from ulid_transform import bytes_to_ulid


def new_ulid() -> str:
    """Return a new ULID: 26 characters that sort by the millisecond of making, and 80 random bits.

    The bits are the operating system's, so that two processes never make the same, forked ones included.
    """
    return bytes_to_ulid((time.time_ns() // 1_000_000).to_bytes(6) + os.urandom(10))
