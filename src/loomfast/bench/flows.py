"""Benchmarks of the whole product: one-step flows per second, acknowledged only when they are durable.

What lives here: measuring flows on a store against the least that the same storage needs for the same rows.
What must not: limits (cases). Each measurement checks the outputs, and what the log holds, before its time
counts.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any, TypeAlias

import loomfast as lf
from loomfast._kernels import event_rows
from loomfast.stores import EventStore
from loomfast.stores import _sqlite_schema as schema
from loomfast.stores._sqlite_rows import COLUMNS, WIDTH
from loomfast.stores._sqlite_writer import LENGTHEN_AFTER

AT_ONCE = 100
# What a one-step flow leaves in its log.
EVENTS = 4
_TICK_S = 0.001
_CALLBACK_S = 0.0004
_CONNECTIONS = 16

OpenStore: TypeAlias = Callable[[], Any]


@lf.step
async def add_one(value: int) -> int:
    return value + 1


@lf.flow
async def one_step(ctx: lf.WorkflowContext, value: int) -> Any:
    return await ctx.run(add_one, value)


def on_memory(flows: int, rounds: int) -> dict[str, float]:
    """Seconds per flow in the best round, 100 at once, on the memory store."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[EventStore]:
        yield lf.MemoryEventStore()

    return {"loomfast": min(asyncio.run(_at_once(opened, flows))[0] for _ in range(rounds))}


def on_sqlite(flows: int, rounds: int) -> dict[str, float]:
    """Seconds per flow, 100 at once, `synchronous=FULL`; and of a loop that commits each of a flow's events
    in a transaction of its own, with the same driver, pragmas and columns.
    """
    best = {"loomfast": float("inf"), "bare_loop": float("inf")}
    for _ in range(rounds):
        with _sqlite_folder() as folder:
            taken, _ = asyncio.run(_at_once(lambda: _sqlite(folder), flows))
            best["loomfast"] = min(best["loomfast"], taken)
            bare = flows // 8
            commits = _BareCommits(folder)
            taken = sum(commits.commit(1) for _ in range(EVENTS * bare)) / bare
            commits.close()
            best["bare_loop"] = min(best["bare_loop"], taken)
    return best


def on_postgres(flows: int, rounds: int) -> dict[str, float]:
    """Seconds per flow, 100 at once, on a server of its own; and of as many single-row commits as a flow has
    events, over 16 connections of the bare driver. Raises `ImportError` where no server is to be had.
    """
    import asyncpg  # noqa: F401  # so that a missing driver is known before a server is started

    from loomfast.testing.postgres import PostgresServer, PostgresServerError

    best = {"loomfast": float("inf"), "bare_rows": float("inf")}
    try:
        server = PostgresServer()
    except PostgresServerError as error:
        raise ImportError(str(error)) from error
    with server:
        for number in range(rounds):
            taken, _ = asyncio.run(_at_once(lambda: _postgres(server.dsn, f"flows_{number}"), flows))  # noqa: B023
            best["loomfast"] = min(best["loomfast"], taken)
            best["bare_rows"] = min(best["bare_rows"], asyncio.run(_bare_rows(server.dsn, flows)))
    return best


def alone_on_sqlite(flows: int) -> dict[str, float]:
    """The median flow, one at a time, with a minted id and with a chosen one, whose start is durable before
    its body; and, taking turns with them, the median of the same rows in two commits (its first row, and the
    others) and in three (its start, its step, its end), with nothing around them but a loop that goes on: a
    thread makes them. `bare_two` are two made by the loop itself, which stands still meanwhile.
    """
    taken: dict[str, list[float]] = defaultdict(list)
    with _sqlite_folder() as folder:
        asyncio.run(_one_by_one(folder, flows, taken))
    return {variant: statistics.median(times) for variant, times in taken.items()}


def new_on_sqlite(rounds: int) -> dict[str, float]:
    """The median of the first 100 single-row commits of a new database: as the store makes them, whose log is
    long from the tenth on, and as SQLite makes them by itself.
    """
    taken: dict[str, list[float]] = {"long_log": [], "as_it_grows": []}
    for _ in range(rounds):
        for variant, times in taken.items():
            with _sqlite_folder() as folder:
                commits = _BareCommits(folder)
                times += [commits.commit(1) for _ in range(LENGTHEN_AFTER)]
                if variant == "long_log":
                    commits.lengthen_log()
                times += [commits.commit(1) for _ in range(100 - LENGTHEN_AFTER)]
                commits.close()
    return {variant: statistics.median(times) for variant, times in taken.items()}


def stall(flows: int, rounds: int) -> dict[str, float]:
    """How late a timer of the same loop is at full load on SQLite: the median round's 99.9th percentile.

    `frozen` is the same with all that was made before kept from the garbage collector, `machine` that of a
    loop which does nothing but short callbacks: what the machine itself is late by.
    """
    busy_s = flows / 5_000  # about what the flows take
    machine = [asyncio.run(_busy(busy_s)) for _ in range(rounds)]
    lags = [_lags(flows) for _ in range(rounds)]
    gc.collect()
    gc.freeze()
    try:
        frozen = [_lags(flows) for _ in range(rounds)]
    finally:
        gc.unfreeze()
    return {
        "p99.9": _late(lags),
        "median": statistics.median(late[len(late) // 2] for late in lags),
        "worst": max(late[-1] for late in lags),
        "frozen": _late(frozen),
        "machine": _late(machine),
    }


def _late(rounds: list[list[float]]) -> float:
    return statistics.median(late[int(len(late) * 0.999)] for late in rounds)


def _lags(flows: int) -> list[float]:
    with _sqlite_folder() as folder:
        _, lags = asyncio.run(_at_once(lambda: _sqlite(folder), flows))
    return sorted(lags)


async def _busy(seconds: float) -> list[float]:
    """How late a timer is on a loop with nothing to do but short callbacks, one behind the other."""
    loop = asyncio.get_running_loop()

    def work() -> None:
        until = perf_counter() + _CALLBACK_S
        while perf_counter() < until:
            pass
        loop.call_soon(work)

    lags: list[float] = []
    loop.call_soon(work)
    ticker = asyncio.create_task(_tick(lags))
    await asyncio.sleep(seconds)
    ticker.cancel()
    return sorted(lags)


def _sqlite_folder() -> tempfile.TemporaryDirectory[str]:
    # In the working folder: the system's one for temporary files is often kept in memory, where FULL is free.
    return tempfile.TemporaryDirectory(prefix="loomfast-bench-", dir=os.getcwd())


async def _sqlite_store(folder: str) -> EventStore:
    return await lf.SqliteEventStore.open(os.path.join(folder, "flows.db"))


@asynccontextmanager
async def _sqlite(folder: str) -> AsyncIterator[EventStore]:
    async with await _sqlite_store(folder) as store:
        yield store


@asynccontextmanager
async def _postgres(dsn: str, schema: str) -> AsyncIterator[EventStore]:
    from loomfast.stores import PostgresEventStore

    async with await PostgresEventStore.open(dsn, schema=schema) as store:
        yield store


async def _bare_rows(dsn: str, rows: int) -> float:
    """Seconds for as many rows as a flow has events, each committed by itself."""
    import asyncpg

    pool = await asyncpg.create_pool(dsn, min_size=_CONNECTIONS, max_size=_CONNECTIONS)
    try:
        await pool.execute("CREATE TABLE IF NOT EXISTS bare (id bigserial PRIMARY KEY, body bytea)")
        left = iter(range(rows))

        async def client() -> None:
            async with pool.acquire() as connection:
                insert = await connection.prepare("INSERT INTO bare (body) VALUES ($1)")
                for _ in left:
                    await insert.fetch(b'{"key":"add_one","output":1}')

        begun = perf_counter()
        await asyncio.gather(*(client() for _ in range(_CONNECTIONS)))
        return (perf_counter() - begun) / rows * EVENTS
    finally:
        await pool.close()


async def _at_once(open_store: OpenStore, flows: int) -> tuple[float, list[float]]:
    """Seconds per flow, and how late the ticks of a timer on the same loop were."""
    each = flows // AT_ONCE
    async with open_store() as store, lf.WorkflowRuntime(store) as runtime:

        async def client(first: int, count: int) -> None:
            for value in range(first, first + count):
                handle = await runtime.start(one_step, value)
                if await handle.result() != value + 1:
                    raise AssertionError("a flow returned another flow's output")

        await asyncio.gather(*(client(0, 2) for _ in range(AT_ONCE)))  # warm: threads, caches, statements
        lags: list[float] = []
        ticker = asyncio.create_task(_tick(lags))
        begun = perf_counter()
        await asyncio.gather(*(client(n * each, each) for n in range(AT_ONCE)))
        taken = perf_counter() - begun
        ticker.cancel()
        total = (each + 2) * AT_ONCE
        last = (await store.read_all(total * EVENTS - 1))[-1].position
        if last != total * EVENTS:
            raise AssertionError(f"the log holds {last} events of {total * EVENTS}")
    return taken / (each * AT_ONCE), lags


async def _tick(lags: list[float]) -> None:
    while True:
        due = perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        lags.append(max(perf_counter() - due, 0.0))


async def _one_by_one(folder: str, flows: int, taken: dict[str, list[float]]) -> None:
    bare = _BareCommits(folder)
    bare.lengthen_log()
    async with (
        _sqlite(folder) as store,
        lf.WorkflowRuntime(store) as runtime,
        _commits_of_a_thread() as commit,
    ):
        for value in range(-LENGTHEN_AFTER, flows):
            for variant, execution_id in (("minted", None), ("chosen", f"alone-{value}")):
                begun = perf_counter()
                handle = await runtime.start(one_step, value, execution_id=execution_id)
                output = await handle.result()
                taken[variant].append(perf_counter() - begun)
                if output != value + 1:
                    raise AssertionError("a flow returned another flow's output")
            for variant, commits in (("two", (1, EVENTS - 1)), ("three", (1, EVENTS - 2, 1))):
                begun = perf_counter()
                for rows in commits:
                    await commit(rows)
                taken[variant].append(perf_counter() - begun)
            taken["bare_two"].append(bare.commit(1) + bare.commit(EVENTS - 1))
            if value < 0:
                taken.clear()  # the store's log is not long yet
    bare.close()


@asynccontextmanager
async def _commits_of_a_thread() -> AsyncIterator[Callable[[int], Awaitable[float]]]:
    """Give what commits so many rows while the event loop goes on."""
    with _sqlite_folder() as folder, ThreadPoolExecutor(1) as thread:
        loop = asyncio.get_running_loop()
        commits = await loop.run_in_executor(thread, _BareCommits, folder)
        await loop.run_in_executor(thread, commits.lengthen_log)
        yield lambda rows: loop.run_in_executor(thread, commits.commit, rows)
        await loop.run_in_executor(thread, commits.close)


class _BareCommits:
    """Inserts rows and commits, with nothing around it: the store's driver, pragmas and columns."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "bare.db")
        self._connection = schema.open_writer(self._path, "FULL", 5_000)
        self._insert = f"INSERT INTO events ({COLUMNS}) VALUES ({','.join('?' * WIDTH)})"
        self._position = 0

    def commit(self, rows: int) -> float:
        """Commit so many rows, and return the seconds it took."""
        body = lf.encode({"key": "add_one", "output": 1})
        events = [
            event_rows(1, place, [lf.Envelope("bare", place, "note", body, 0, "note")])
            for place in range(self._position + 1, self._position + rows + 1)
        ]
        self._position += rows
        begun = perf_counter()
        self._connection.execute("BEGIN IMMEDIATE")
        for event in events:
            self._connection.execute(self._insert, event)
        self._connection.execute("COMMIT")
        return perf_counter() - begun

    def lengthen_log(self) -> None:
        """Do what the store does for its own log."""
        schema.lengthen_log(self._connection, self._path)

    def close(self) -> None:
        self._connection.close()
