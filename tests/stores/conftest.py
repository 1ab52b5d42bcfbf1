"""Stores to test, and logs to put into them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from loomfast.stores import EventStore, MemoryEventStore, SqliteEventStore

OpenStore = Callable[[], AbstractAsyncContextManager[EventStore]]


@pytest.fixture(params=["memory", "sqlite"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """Open an empty store: `async with open_store() as store`."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[EventStore]:
        if request.param == "memory":
            store: EventStore = MemoryEventStore()
        else:
            store = await SqliteEventStore.open(tmp_path / "events.db")
        async with store:
            yield store

    return opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a SQLite store may be made."""
    return tmp_path / "events.db"
