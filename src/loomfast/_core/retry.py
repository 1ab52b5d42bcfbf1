"""When a failed attempt is tried again: exponential back-off with jitter that a seed reproduces.

Theory of operation: the n-th retry waits `initial_s * multiplier ** (n - 1)`, at most `max_s`, and up to the
share `jitter` of that less. How much less is a digest of the execution, the step's key and the attempt: many
executions that fail together spread out, and the same execution always waits the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from loomfast._errors import BadInputError
from loomfast._kernels import fnv1a64


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and when an effect is tried again.

    `max_attempts` counts all attempts of one run of the step; `initial_s`, `max_s` are seconds; `jitter` is a
    share from 0 to 1. Only failures that are instances of `on` are tried again, and never those the step
    declares as part of its result.
    """

    max_attempts: int = 3
    initial_s: float = 0.1
    multiplier: float = 2.0
    max_s: float = 60.0
    jitter: float = 0.5
    on: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise BadInputError(f"max_attempts={self.max_attempts}: must be 1 or more")
        if not 0 <= self.initial_s <= self.max_s < float("inf"):
            raise BadInputError(
                f"initial_s={self.initial_s}, max_s={self.max_s}: need 0 <= initial_s <= max_s"
            )
        if not 1 <= self.multiplier < float("inf"):
            raise BadInputError(f"multiplier={self.multiplier}: must be 1 or more")
        if not 0 <= self.jitter <= 1:
            raise BadInputError(f"jitter={self.jitter}: must be a share from 0 to 1")

    def delay_s(self, execution_id: str, key: str, tries: int) -> float | None:
        """Return the seconds to wait after `tries` failed attempts, or None when there is no further one."""
        if tries >= self.max_attempts:
            return None
        try:
            delay = min(self.initial_s * self.multiplier ** (tries - 1), self.max_s)
        except OverflowError:
            delay = self.max_s
        seed = f"{execution_id}|{key}|{tries}".encode("utf-8", "surrogatepass")
        share = fnv1a64(seed) / 2**64
        return delay * (1 - self.jitter * share)
