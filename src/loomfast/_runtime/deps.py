"""What a runtime hands to everything it drives: one value instead of a parameter list at each level."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal, TypeAlias

from loomfast._runtime.clock import Clock
from loomfast._runtime.effects import EffectMiddleware

DeterminismPolicy: TypeAlias = Literal["error", "warn", "ignore"]


@dataclass(frozen=True, slots=True)
class RunDeps:
    """The surroundings of a run.

    `entropy(n)` gives n random bytes; `context` is what a run sees of context variables.
    """

    clock: Clock
    entropy: Callable[[int], bytes]
    executor: Executor
    middleware: Sequence[EffectMiddleware]
    determinism: DeterminismPolicy
    persists_json: bool
    context: contextvars.Context
