"""What every test may use. Async tests run on a fresh event loop each; nothing else is needed for them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from loomfast.stores import EventStore, MemoryEventStore, SqliteEventStore

OpenStore: TypeAlias = Callable[[], AbstractAsyncContextManager[EventStore]]

# No test waits for anything that takes this long: it hangs.
TEST_LIMIT_S = 120


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(_bounded(pyfuncitem.obj(**arguments)))
    return True


async def _bounded(test: Any) -> None:
    async with asyncio.timeout(TEST_LIMIT_S):
        await test


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
