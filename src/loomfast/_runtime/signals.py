"""What unwinds a run without being an error of the flow.

They derive from `BaseException`, so that a flow's `except Exception` cannot eat them. A task group wraps what
its children raise; `find` looks inside.
"""

from __future__ import annotations


class RunSignal(BaseException):
    """Base of the signals."""


class SuspendSignal(RunSignal):
    """The run has reached a gate that is not answered yet."""


class AbortSignal(RunSignal):
    """A write of this run failed: nothing it does from here on can become durable."""


def find(error: BaseException) -> RunSignal | None:
    """Return the signal that `error` is, or that a group of errors holds; an abort before a suspension."""
    if isinstance(error, RunSignal):
        return error
    found: RunSignal | None = None
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            signal = find(inner)
            if isinstance(signal, AbortSignal):
                return signal
            found = signal or found
    return found
