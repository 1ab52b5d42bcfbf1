"""Event stores."""

from loomfast.stores._spi import EventStore, ExecutionSummary, PositionedEvent

__all__ = ["EventStore", "ExecutionSummary", "PositionedEvent"]
