"""Where a SQLite store may be made, and how a PostgreSQL store is opened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from loomfast.stores import PostgresEventStore
from loomfast.testing.postgres import PostgresServer

OpenPostgres: TypeAlias = Callable[..., Awaitable[PostgresEventStore]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file name in an empty folder."""
    return tmp_path / "events.db"


@pytest.fixture
def open_postgres(postgres_server: PostgresServer, new_schema: str) -> OpenPostgres:
    """Open the test's own schema: `async with await open_postgres(pool_size=2) as store`."""

    async def opened(**options: Any) -> PostgresEventStore:
        return await PostgresEventStore.open(postgres_server.dsn, **{"schema": new_schema, **options})

    return opened
