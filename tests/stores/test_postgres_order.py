"""The one order of all events on PostgreSQL: late commits, holes, and who waits for whom. F24."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import asyncpg
import pytest

from loomfast._errors import LeaseLostError, StoreBusyError
from loomfast._kernels import Envelope
from loomfast.stores import PostgresEventStore
from loomfast.stores._postgres_ledger import APPEND, Append, Ledger
from loomfast.testing.postgres import PostgresServer

from .conftest import OpenPostgres
from .logs import event
from .programs import start_program

WRITERS = """
    import asyncio, random, sys
    from loomfast._errors import DuplicateSequenceError, MalformedEventError
    from loomfast._kernels import Envelope
    from loomfast.stores import PostgresEventStore

    START = {"flowId": "f", "flowVersion": "1", "input": None}

    def event(execution_id, n):
        kind = "note" if n else "EXECUTION_STARTED"
        return Envelope.make(execution_id, n, kind, None if n else START, n)
"""

# Four writers side by side, each with a log of its own.
OWN_LOGS = (
    WRITERS
    + """
    async def drive(store, name):
        for n in range(0, 60, 3):
            await store.append_batch([event(name, n + i) for i in range(3)])

    async def main(dsn, schema, process):
        async with await PostgresEventStore.open(dsn, schema=schema, busy_timeout_ms=60_000) as store:
            await asyncio.gather(*(drive(store, f"p{process}-{k}") for k in range(4)))

    asyncio.run(main(*sys.argv[1:]))
"""
)

# Batches over several logs that all processes share, in any order; whoever is refused looks again.
SHARED_LOGS = (
    WRITERS
    + """
    NAMES = [f"s{k}" for k in range(6)]

    async def main(dsn, schema, process):
        rng = random.Random(process)
        async with await PostgresEventStore.open(dsn, schema=schema, busy_timeout_ms=60_000) as store:
            for round in range(25):
                names = rng.sample(NAMES, 4)
                while True:
                    nexts = [((await store.last_sequence(name)), name) for name in names]
                    try:
                        await store.append_batch([event(x, 0 if n is None else n + 1) for n, x in nexts])
                        break
                    except (DuplicateSequenceError, MalformedEventError):
                        pass

    asyncio.run(main(*sys.argv[1:]))
"""
)


@contextlib.asynccontextmanager
async def held(store: PostgresEventStore, *envelopes: Envelope) -> AsyncIterator[asyncpg.Connection]:
    """Append in a transaction of another connection, and leave it open: it is the caller's to end."""
    connection = await store._connections.connect()
    try:
        await connection.execute("BEGIN")
        ((_, arguments),) = Ledger().judge([Append(envelopes, 7)]).statements()
        await connection.fetch(APPEND, *arguments)
        yield connection
    finally:
        await connection.close()


async def test_what_commits_late_is_neither_passed_over_nor_seen_early(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as store:
        await store.append(event("before", 0))
        async with held(store, event("a", 0), event("a", 1)) as slow:
            behind = asyncio.create_task(store.append(event("b", 0)))
            # The reader waits for nobody, and is not told of what stands behind the open transaction.
            assert [(p.position, p.event.id) for p in await store.read_all()] == [(1, "before-0")]
            assert await store.last_sequence("a") is None
            await asyncio.sleep(0.05)
            assert not behind.done()
            await slow.execute("COMMIT")
        await behind
        seen = [(p.position, p.event.id) for p in await store.read_all(1)]
        assert seen == [(2, "a-0"), (3, "a-1"), (4, "b-0")]


async def test_what_is_rolled_back_leaves_no_hole(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as store:
        await store.append(event("before", 0))
        async with held(store, event("a", 0), event("a", 1)) as slow:
            behind = asyncio.create_task(store.append(event("b", 0)))
            await asyncio.sleep(0.05)
            await slow.execute("ROLLBACK")
        await behind
        assert [(p.position, p.event.id) for p in await store.read_all()] == [(1, "before-0"), (2, "b-0")]
        assert [s.execution_id for s in await store.list_executions()] == ["before", "b"]
        await store.append(event("a", 0))


async def test_a_client_that_dies_in_its_transaction_is_rolled_back(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as store:
        async with held(store, event("a", 0)) as slow:
            behind = asyncio.create_task(store.append(event("b", 0)))
            slow.terminate()
        await behind
        assert [(p.position, p.event.id) for p in await store.read_all()] == [(1, "b-0")]


async def test_an_old_transaction_of_somebody_elses_delays_nobody(
    open_postgres: OpenPostgres, postgres_server: PostgresServer
) -> None:
    async with await open_postgres() as store:
        await store.append(event("x", 0))
        other = await asyncpg.connect(postgres_server.dsn)
        await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await other.execute("CREATE TEMP TABLE written (n integer)")  # which gives it a number
        await store.append(event("x", 1))
        assert [p.position for p in await store.read_all()] == [1, 2]
        await other.close()


async def test_whether_a_lease_is_held_is_looked_at_behind_all_that_has_written_before(
    open_postgres: OpenPostgres,
) -> None:
    """F18: it is taken over while the fence waits for its turn."""
    async with await open_postgres() as store:
        ours = await store.leases.acquire("x", "a", 60)
        assert ours is not None
        async with held(store, event("x", 0)) as slow:
            late = asyncio.create_task(store.acquire_fence("x", lease=ours))
            beside = asyncio.create_task(store.append(event("y", 0)))
            while not await slow.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                await asyncio.sleep(0.01)
            await store.leases.release([ours])
            assert await store.leases.acquire("x", "b", 60) is not None
            await slow.execute("COMMIT")
        with pytest.raises(LeaseLostError):
            await late
        await beside
        await store.append(event("x", 1))  # which nobody has fenced


async def test_a_lock_held_too_long_is_an_error_that_names_each_write_and_can_be_repeated(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres(busy_timeout_ms=50) as store:
        await store.append(event("x", 0))
        async with held(store, event("a", 0)) as slow:
            results = await asyncio.gather(
                store.append_batch([event("x", 1), event("x", 2)]),
                store.append(event("y", 0)),
                store.acquire_fence("z"),
                store.copy_prefix("x", "t", 0),
                return_exceptions=True,
            )
            assert all(isinstance(result, StoreBusyError) for result in results)
            named = [(r.execution_id, r.sequence) for r in results if isinstance(r, StoreBusyError)]
            assert named == [("x", 1), ("y", 0), ("z", None), ("t", None)]
            assert isinstance(results[0], StoreBusyError)
            assert isinstance(results[0].__cause__, asyncpg.LockNotAvailableError)
            assert len(await store.read_all()) == 1
            await slow.execute("ROLLBACK")
        await store.append_batch([event("x", 1), event("x", 2)])
        assert await store.acquire_fence("z") == 1


async def test_a_caller_cancelled_while_the_log_is_locked_returns_at_once(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres() as store:
        async with held(store, event("a", 0)) as slow:
            waiting = [
                asyncio.create_task(store.append_batch([event("x", 0), event("x", 1)])),
                asyncio.create_task(store.copy_prefix("a", "t", 0)),
            ]
            await asyncio.sleep(0.05)
            for task in waiting:
                task.cancel()
            done, _ = await asyncio.wait(waiting, timeout=1)
            assert len(done) == 2
            await slow.execute("COMMIT")
        await store.append(event("y", 0))  # queued behind them, so the cancelled writes are over now
        assert len(await store.read("x")) in (0, 2)


async def test_sixteen_writers_in_four_processes_are_read_once_each_in_order_across_restarts(
    open_postgres: OpenPostgres, postgres_server: PostgresServer, new_schema: str
) -> None:
    async with await open_postgres():
        pass
    rng = random.Random(24)
    processes = [start_program(OWN_LOGS, postgres_server.dsn, new_schema, str(n)) for n in range(4)]
    seen: list[tuple[int, str]] = []
    running = True
    disturbances = 0
    while running or len(seen) < disturbances + 16 * 60:
        running = any(process.poll() is None for process in processes)
        async with await open_postgres(busy_timeout_ms=60_000) as store:  # a reader that was restarted
            for _ in range(5):
                if running and rng.random() < 0.5:  # one transaction is held open, then ended either way
                    async with held(store, event(f"d{disturbances}", 0)) as slow:
                        page = await store.read_all(seen[-1][0] if seen else 0, limit=50)
                        kept = rng.random() < 0.5
                        await slow.execute("COMMIT" if kept else "ROLLBACK")
                        disturbances += kept
                else:
                    page = await store.read_all(seen[-1][0] if seen else 0, limit=50)
                seen += [(p.position, p.event.id) for p in page]
    for process in processes:
        _, complaints = await asyncio.to_thread(process.communicate)
        assert (process.returncode, complaints) == (0, "")
    assert [position for position, _ in seen] == list(range(1, len(seen) + 1))
    written = {f"p{p}-{k}-{n}" for p in range(4) for k in range(4) for n in range(60)}
    assert {event_id for _, event_id in seen} == written | {f"d{n}-0" for n in range(disturbances)}
    for p in range(4):
        for k in range(4):
            own = [event_id for _, event_id in seen if event_id.startswith(f"p{p}-{k}-")]
            assert own == [f"p{p}-{k}-{n}" for n in range(60)]


async def test_batches_over_shared_executions_from_several_processes_never_lock_each_other_out(
    open_postgres: OpenPostgres, postgres_server: PostgresServer, new_schema: str
) -> None:
    processes = [start_program(SHARED_LOGS, postgres_server.dsn, new_schema, str(n)) for n in range(4)]
    for process in processes:
        _, complaints = await asyncio.to_thread(process.communicate, timeout=100)
        assert (process.returncode, complaints) == (0, "")
    async with await open_postgres() as store:
        assert len(await store.read_all(limit=10_000)) == 4 * 25 * 4
        for summary in await store.list_executions():
            log = await store.read(summary.execution_id)
            assert [one.sequence for one in log] == list(range(summary.last_sequence + 1))


@pytest.mark.parametrize("rivals", [2, 5])
async def test_stores_that_append_to_one_execution_at_once_each_get_their_own_outcome(
    open_postgres: OpenPostgres, rivals: int
) -> None:
    stores = [await open_postgres() for _ in range(rivals)]
    for n in range(30):
        results = await asyncio.gather(
            *(store.append(event("x", n)) for store in stores), return_exceptions=True
        )
        assert results.count(None) == 1
    tokens = await asyncio.gather(*(store.acquire_fence("x") for store in stores * 4))
    assert sorted(tokens) == list(range(1, 4 * rivals + 1))
    assert [one.sequence for one in await stores[0].read("x")] == list(range(30))
    for store in stores:
        await store.close()
