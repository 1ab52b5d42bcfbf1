"""What every test may use. Async tests run on a fresh event loop each; nothing else is needed for them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from loomfast.stores import EventStore, MemoryEventStore, PostgresEventStore, SqliteEventStore
from loomfast.testing.postgres import PostgresServer

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


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A PostgreSQL server that all tests share."""
    with PostgresServer() as server:
        yield server


_schemas = count(1)


@pytest.fixture
def new_schema() -> str:
    """The name of a schema that is not there yet."""
    return f"t{next(_schemas)}"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path, new_schema: str) -> OpenStore:
    """Open an empty store: `async with open_store() as store`."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[EventStore]:
        store: EventStore
        if request.param == "memory":
            store = MemoryEventStore()
        elif request.param == "sqlite":
            store = await SqliteEventStore.open(tmp_path / "events.db")
        else:
            store = await PostgresEventStore.open(server.dsn, schema=new_schema)
        async with store:
            yield store

    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
    return opened
