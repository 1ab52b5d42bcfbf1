"""Events and logs for the store tests: those of the conformance kit."""

from loomfast.testing.conformance.logs import GATED, START, event, log

__all__ = ["GATED", "START", "event", "log"]
