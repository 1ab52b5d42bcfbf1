"""The world outside: what effects really did, and what really became durable, whatever process saw it.

What lives here: `World`, which outlives the processes of a case and notices at once what must never happen.
What must not: judging a whole log (invariants).

Effects say `world.call(fx)` where they would touch something outside. The store that observes for the world
says what became durable, before the process hears of it. So three promises are checked at the moment they
would be broken: a settled step is never executed again; an at-most-once effect runs behind a durable
STEP_STARTED and never twice; what a caller was told is on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from loomfast._core.answers import RELEASED
from loomfast._errors import LoomError
from loomfast._kernels import Envelope
from loomfast.testing.recording import Run


class ProcessGoneError(LoomError):
    """The process that calls has been stopped: nothing it still does reaches anything."""

    code = "process-gone"


class Keyed(Protocol):
    """What the world wants to know of an effect; an `EffectContext` has it."""

    @property
    def key(self) -> str: ...
    @property
    def attempt(self) -> int: ...


class World:
    """Counts what the effects of one case did.

    `calls[key, attempt]` is how often that attempt of that step touched the world; `facts` is the flow's to
    use: what is put there is there in the next process too. `runs` records what each run emitted,
    `violations` broken promises.
    """

    def __init__(self) -> None:
        self.alive = True
        self.calls: Counter[tuple[str, int]] = Counter()
        self.facts: dict[str, Any] = {}
        self.durable_sequence = -1
        self.durable_types: set[str] = set()
        self.violations: list[str] = []
        self.runs: list[Run] = []
        self._settled: set[str] = set()
        self._started: dict[str, int] = {}
        self._releases: Counter[str] = Counter()

    # --- for effects -----------------------------------------------------------------------------

    def call(self, fx: Keyed) -> int:
        """Note one execution of an effect; return how many there have been of this step, from 1."""
        if not self.alive:
            raise ProcessGoneError(f"step {fx.key!r}: this process has been stopped")
        if fx.key in self._settled:
            self.violations.append(f"step {fx.key!r} was executed again after its outcome was durable")
        self.calls[fx.key, fx.attempt] += 1
        return self.count(fx.key)

    def once(self, fx: Keyed) -> int:
        """As `call`, for an effect that is declared `at_most_once`."""
        count = self.call(fx)
        if self._started.get(fx.key, 0) < fx.attempt:
            self.violations.append(f"step {fx.key!r} ran at most once, but before its start was durable")
        if count > 1 + self._releases[fx.key]:
            self.violations.append(f"step {fx.key!r} is to run at most once and has run {count} times")
        return count

    def count(self, key: str) -> int:
        """Return how often the effect of this step was executed, all attempts together."""
        return sum(number for (called, _), number in self.calls.items() if called == key)

    # --- for the store and the driver ------------------------------------------------------------

    def became_durable(self, envelopes: Sequence[Envelope]) -> None:
        """Take note of events the moment the store has them."""
        for event in envelopes:
            self.durable_sequence = event.sequence
            self.durable_types.add(event.event_type)
            payload = event.payload if event.event_type.startswith("STEP_") else {}
            match event.event_type:
                case "STEP_STARTED":
                    self._started[payload["key"]] = payload["attempt"]
                case "STEP_COMPLETED":
                    self._settled.add(payload["key"])
                case "STEP_FAILED" if payload["typed"]:
                    self._settled.add(payload["key"])
                case "STEP_CANCELLED" if payload["reason"] == RELEASED:
                    self._releases[payload["key"]] += 1

    def stop(self) -> None:
        """The process has been stopped: what it still does reaches nothing."""
        self.alive = False

    def acknowledged(self, sequence: int, what: str) -> None:
        """Check that a caller was told of nothing that is not durable."""
        if sequence > self.durable_sequence:
            self.violations.append(
                f"{what} was acknowledged at sequence {sequence}, durable is only {self.durable_sequence}"
            )
