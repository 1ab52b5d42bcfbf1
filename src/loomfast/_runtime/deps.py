"""What a runtime hands to everything it drives: one value instead of a parameter list at each level."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from loomfast._runtime.clock import Clock
from loomfast._runtime.effects import EffectMiddleware

DeterminismPolicy: TypeAlias = Literal["error", "warn", "ignore"]


@dataclass(slots=True)
class Latch:
    """Something that begins once, for everybody who looks at it."""

    begun: bool = False


@dataclass(frozen=True, slots=True)
class RunDeps:
    """The surroundings of a run.

    `entropy(n)` gives n random bytes; `context` is what a run sees of context variables; `closing` is the one
    thing here that changes: once it has begun, no effect begins.
    """

    clock: Clock
    entropy: Callable[[int], bytes]
    executor: Executor
    middleware: Sequence[EffectMiddleware]
    determinism: DeterminismPolicy
    persists_json: bool
    context: contextvars.Context
    closing: Latch = field(default_factory=Latch)
