"""What unwinds a run without being an error of the flow.

They derive from `BaseException`, so that a flow's `except Exception` cannot eat them. A flow that catches
more than that changes nothing: the context remembers that its run has reached a gate, and the journal that a
write has failed.
"""

from __future__ import annotations


class RunSignal(BaseException):
    """Base of the signals."""


class SuspendSignal(RunSignal):
    """The run has reached a gate that is not answered yet."""


class AbortSignal(RunSignal):
    """A write of this run failed: nothing it does from here on can become durable."""


class CancelSignal(RunSignal):
    """The execution is being cancelled: no further effect starts."""


class WindDownSignal(RunSignal):
    """The runtime closes: the run stops before its next effect, and another one goes on from the log."""
