"""The world of a process that may be killed: what its effects do is to say that they do it.

What lives here: `Outside`, and `committed`, which says that an event is durable. What must not: where the
testimony is kept, and what is made of it.
"""

from __future__ import annotations

import os
from random import Random
from zlib import crc32

import loomfast as lf
from tests.soak.testimony import say

# The payloads that tell a driver what an execution waits for.
TELLING = ("EXECUTION_SUSPENDED", "EFFECT_INDOUBT", "STEP_COMPLETED", "STEP_CANCELLED")


class Outside:
    """A world that says to the file `said` what is done to it. An effect takes `longest_s` at most."""

    def __init__(self, said: int, seed: str, longest_s: float) -> None:
        self._said = said
        self._random = Random(seed)
        self._longest_s = longest_s

    def begin(self, fx: lf.EffectContext) -> float:
        say(self._said, "begin", fx.execution_id, fx.key, fx.attempt, os.getpid())
        return self._random.random() * self._longest_s

    def end(self, fx: lf.EffectContext, output: str) -> str:
        say(self._said, "end", fx.execution_id, fx.key, output, os.getpid())
        return output

    def choose(self) -> int:
        return self._random.getrandbits(32)


def committed(said: int, event: lf.Envelope) -> None:
    """Say that an event is durable."""
    payload = event.payload if event.event_type in TELLING else None
    assert isinstance(event.body, bytes)
    say(said, "committed", event.execution_id, event.sequence, event.event_type, crc32(event.body), payload)
