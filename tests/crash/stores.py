"""How the tests of this folder open a store anew in each life."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import loomfast as lf
from loomfast.testing.crash import OpenStore


def memory() -> OpenStore:
    """One memory store for all lives: it stands for a machine that stays up."""
    store = lf.MemoryEventStore()
    return lambda: contextlib.nullcontext(store)


def sqlite(path: Path) -> OpenStore:
    """The file, opened and closed by each life.

    A crash here is one of the process, not of the machine, and that is what `NORMAL` outlives.
    """

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[lf.EventStore]:
        store = await lf.SqliteEventStore.open(path, synchronous="NORMAL")
        async with store:
            yield store

    return opened
