"""A PostgreSQL store whose server goes away, answers too late, or holds something else than was written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from loomfast._core.snapshots import snapshot_of
from loomfast._errors import (
    DuplicateSequenceError,
    LoomError,
    StorageWriteError,
    StoreBusyError,
    StoreCorruptError,
    StoreFullError,
    StoreReadError,
    StoreReadOnlyError,
    StoreUnreachableError,
)
from loomfast._kernels import Envelope, fold_events
from loomfast.stores import PostgresEventStore
from loomfast.stores._postgres_connections import write_error
from loomfast.stores._postgres_ledger import APPEND
from loomfast.testing.postgres import PostgresServer
from tests.cluster.network import Network

from .conftest import OpenPostgres
from .logs import event, log
from .programs import on_the_server
from .test_postgres_order import held

# --- lost servers --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fast", "immediate", "kill"])
async def test_a_server_that_restarts_under_load_is_a_pause_and_loses_nothing_acknowledged(
    open_postgres: OpenPostgres, postgres_server: PostgresServer, way: Any
) -> None:
    async with await open_postgres(reconnect_timeout_ms=60_000) as store:
        acknowledged = dict.fromkeys((f"x{k}" for k in range(20)), 0)
        over = False

        async def drive(name: str) -> None:
            while not over:
                first = acknowledged[name]
                await store.append_batch(log(name, 7, first=first))
                acknowledged[name] = first + 7

        async def read() -> None:
            while not over:
                await store.fold("x0")

        async def restart() -> None:
            nonlocal over
            for _ in range(3):
                await asyncio.sleep(0.15)
                await asyncio.to_thread(
                    postgres_server.kill if way == "kill" else postgres_server.stop, *[way][: way != "kill"]
                )
                await asyncio.to_thread(postgres_server.start)
            await asyncio.sleep(0.15)
            over = True

        await asyncio.gather(restart(), read(), *(drive(name) for name in acknowledged))
        for name, count in acknowledged.items():
            assert await store.read(name) == log(name, count)
        assert sum(acknowledged.values()) > 20 * 7
        positions = [p.position for p in await store.read_all(limit=1_000_000)]
        assert positions == list(range(1, sum(acknowledged.values()) + 1))


async def test_every_kind_of_call_goes_on_after_its_connections_were_dropped(
    open_postgres: OpenPostgres, postgres_server: PostgresServer
) -> None:
    async with await open_postgres() as store:
        await store.append_batch(log("x", 3))
        calls: list[Callable[[], Any]] = [
            lambda: store.append_batch(log("x", 1, first=3)),
            lambda: store.acquire_fence("y"),
            lambda: store.read("x"),
            lambda: store.fold("x"),
            lambda: store.read_all(),
            lambda: store.list_executions(),
            lambda: store.copy_prefix("x", "z", 1),
            lambda: store.snapshots.save(snapshot_of(fold_events(None, log("x", 2)))),
            lambda: store.leases.acquire("k", "o", 60),
            lambda: store.timers.due_wakes(0),
        ]
        for call in calls:
            await asyncio.gather(*(store.last_sequence("x") for _ in range(4)))  # the pool is full
            await drop_connections(postgres_server, but=None)
            await call()
        assert await store.read("x") == log("x", 4)


async def test_connections_that_fall_silent_are_given_up_after_one_timeout_and_not_two(
    postgres_server: PostgresServer, new_schema: str
) -> None:
    """As behind a firewall that forgets them: no end of the line ever says so, and new ones would do."""
    with Network() as network:
        link = network.link(str(postgres_server.folder / ".s.PGSQL.5432"))
        async with await PostgresEventStore.open(
            f"postgresql://loomfast@127.0.0.1:{link.port}/postgres",
            schema=new_schema,
            timeout_ms=2_000,
            reconnect_timeout_ms=3_900,  # behind a second timeout there is no patience left
        ) as store:
            await store.append_batch(log("x", 3))
            assert await store.read("x") == log("x", 3)
            network.do(link.lose)
            read, leased, _ = await asyncio.gather(
                store.read("x"),
                store.leases.acquire("k", "o", 60),
                store.append_batch(log("x", 1, first=3)),
            )
            assert read[:3] == log("x", 3)
            assert leased is not None
            assert await store.read("x") == log("x", 4)


async def drop_connections(server: PostgresServer, but: int | None) -> None:
    connection = await asyncpg.connect(server.dsn)
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'loomfast' AND pid <> pg_backend_pid() AND pid IS DISTINCT FROM $1",
        but,
    )
    await connection.close()


async def test_a_server_that_stays_away_is_an_error_that_names_the_call_and_the_store_recovers(
    open_postgres: OpenPostgres, postgres_server: PostgresServer
) -> None:
    async with await open_postgres(reconnect_timeout_ms=100) as store:
        await store.append_batch(log("x", 3))
        await asyncio.to_thread(postgres_server.stop)
        try:
            results = await asyncio.gather(
                store.append_batch(log("x", 2, first=3)),
                store.acquire_fence("y"),
                store.leases.acquire("k", "o", 60),
                store.read("x"),
                store.read_all(),
                return_exceptions=True,
            )
        finally:
            await asyncio.to_thread(postgres_server.start)
        for result, kind, named in zip(
            results,
            [StorageWriteError] * 3 + [StoreUnreachableError] * 2,
            [("x", 3), ("y", None), ("k", None), "x", None],
            strict=True,
        ):
            assert isinstance(result, LoomError)
            assert type(result) is kind
            assert "copy" not in result.hint  # nothing is wrong with what is stored
            assert isinstance(result.__cause__, OSError)
            assert named == (
                (result.execution_id, result.sequence)
                if isinstance(result, StorageWriteError)
                else getattr(result, "execution_id", None)
            )
        await store.append_batch(log("x", 2, first=3))
        assert await store.read("x") == log("x", 5)


async def test_what_queues_up_while_the_server_is_away_waits_for_it_together(
    open_postgres: OpenPostgres, postgres_server: PostgresServer
) -> None:
    """Tasks have a transaction each; they do not wait for the server one behind the other."""
    async with await open_postgres(reconnect_timeout_ms=1_000) as store:
        await store.append_batch(log("x", 12))
        await asyncio.to_thread(postgres_server.stop)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            results = await asyncio.gather(
                *(store.copy_prefix("x", f"fork-{n}", 3) for n in range(10)),
                store.append_batch(log("x", 2, first=12)),
                *(store.copy_prefix("x", f"fork-{n}", 3) for n in range(10, 20)),
                return_exceptions=True,
            )
            waited_s = loop.time() - begun
        finally:
            await asyncio.to_thread(postgres_server.start)
        assert {type(result) for result in results} == {StorageWriteError}
        assert waited_s < 5  # one after the other they would have waited 21 s
        await store.append_batch(log("x", 2, first=12))
        await store.copy_prefix("x", "fork-0", 3)
        assert await store.read("x") == log("x", 14)


class CutOff:
    """The writer's connection, cut before or after the next append is done; nobody hears its answer."""

    def __init__(self, store: PostgresEventStore, *, after: bool) -> None:
        self._writer = store._writer
        self._inner: Any = store._writer._connection
        self._after = after
        self._writer._connection = self  # type: ignore[assignment]  # it passes on all it does not cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def fetch(self, sql: str, *arguments: Any) -> Any:
        if sql != APPEND:
            return await self._inner.fetch(sql, *arguments)
        if self._after:
            await self._inner.fetch(sql, *arguments)
        self._inner.terminate()
        raise asyncpg.ConnectionDoesNotExistError("cut off")


@pytest.mark.parametrize("after", [True, False], ids=["after the commit", "before it"])
async def test_an_append_whose_answer_was_lost_is_found_or_repeated_and_stored_once(
    open_postgres: OpenPostgres, after: bool
) -> None:
    async with await open_postgres() as store:
        await store.append_batch(log("x", 3))
        CutOff(store, after=after)
        results = await asyncio.gather(
            store.append_batch(log("x", 2, first=3)),
            store.append_batch([event("y", 0), event("z", 0)]),
            store.append(event("x", 0)),  # a refusal stays one
            store.acquire_fence("f"),
            return_exceptions=True,
        )
        assert results[:2] == [None, None]
        assert isinstance(results[2], DuplicateSequenceError)
        assert results[3] == (2 if after else 1)
        assert [p.event.id for p in await store.read_all()] == [
            "x-0",
            "x-1",
            "x-2",
            "x-3",
            "x-4",
            "y-0",
            "z-0",
        ]


async def test_an_append_that_still_runs_on_a_lost_connection_is_not_taken_for_a_rivals(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres() as store:
        await store.append(event("x", 0))
        async with held(store, event("a", 0)) as slow:
            waiting = asyncio.create_task(store.append_batch([event("x", 1), event("x", 2)]))
            await asyncio.sleep(0.1)
            # The server does not notice: its process goes on waiting for the lock, and will write.
            assert store._writer._connection is not None
            store._writer._connection.terminate()
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await slow.execute("COMMIT")
        await waiting
        assert [one.sequence for one in await store.read("x")] == [0, 1, 2]
        assert [p.position for p in await store.read_all()] == [1, 2, 3, 4]


@pytest.mark.parametrize("when", ["_written", "look_up", "_send"])
async def test_a_late_commit_is_found_whenever_it_comes(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    async with await open_postgres() as store:
        await store.append(event("x", 0))
        async with held(store, event("a", 0)) as slow:
            waiting = asyncio.create_task(store.append(event("x", 1)))
            await asyncio.sleep(0.1)
            part: Any = store._writer._ledger if when == "look_up" else store._writer
            step = getattr(part, when)

            async def late_commit_first(*arguments: Any) -> Any:
                monkeypatch.setattr(part, when, step)
                await slow.execute("COMMIT")
                while await store.last_sequence("x") != 1:  # what was left behind writes now
                    await asyncio.sleep(0.01)
                return await step(*arguments)

            monkeypatch.setattr(part, when, late_commit_first)
            assert store._writer._connection is not None
            store._writer._connection.terminate()
            await waiting
        assert [p.event.id for p in await store.read_all()] == ["x-0", "a-0", "x-1"]


async def test_a_rivals_event_is_not_taken_for_ones_own_though_it_is_the_same(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres() as store, await open_postgres() as rival:
        CutOff(store, after=False)
        await rival.append(event("x", 0))
        with pytest.raises(DuplicateSequenceError):
            await store.append(event("x", 0))


async def test_a_statement_the_server_gives_up_fails_its_callers_and_nobody_else(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres() as store:
        await store.append(event("x", 0))
        assert store._writer._connection is not None
        await store._writer._connection.execute("SET statement_timeout = 50")
        async with held(store, event("a", 0)) as slow:
            results = await asyncio.gather(
                store.append(event("x", 1)), store.append(event("y", 0)), return_exceptions=True
            )
            for result, named in zip(results, [("x", 1), ("y", 0)], strict=True):
                assert isinstance(result, StorageWriteError)
                assert (result.execution_id, result.sequence) == named
                assert isinstance(result.__cause__, asyncpg.QueryCanceledError)
            await slow.execute("ROLLBACK")
        await store.append(event("x", 1))
        assert [p.event.id for p in await store.read_all()] == ["x-0", "x-1"]


async def test_a_server_that_does_not_answer_counts_as_lost(open_postgres: OpenPostgres) -> None:
    async with await open_postgres(timeout_ms=200, reconnect_timeout_ms=300) as store:
        await store.append(event("x", 0))
        async with held(store, event("a", 0)) as slow:
            with pytest.raises(StorageWriteError) as caught:
                await store.append(event("x", 1))
            assert isinstance(caught.value.__cause__, TimeoutError)
            assert "may have been written" in str(caught.value)
            await slow.execute("ROLLBACK")
        await store.append(event("y", 0))
        assert await store.last_sequence("x") in (0, 1)


async def test_a_number_that_the_server_cannot_hold_fails_its_caller_alone(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres() as store:
        results = await asyncio.gather(
            store.append(event("x", 0)),
            store.append(Envelope("bad", 0, "note", b"null", 2**70)),
            store.append(event("y", 0)),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [type(None), StorageWriteError, type(None)]
        assert [p.event.id for p in await store.read_all()] == ["x-0", "y-0"]


async def test_what_the_server_refuses_fails_its_caller_alone(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as store:
        on_the_server(store, "ALTER TABLE events ADD CHECK (length(body) < 1000)")
        results = await asyncio.gather(
            store.append(event("x", 0)),
            store.append_batch([event("bad", 0), event("bad", 1, payload="x" * 2_000)]),
            store.append_batch(log("y", 2)),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [type(None), StorageWriteError, type(None)]
        error = results[1]
        assert isinstance(error, StorageWriteError)
        assert (error.execution_id, error.sequence) == ("bad", 0)
        assert isinstance(error.__cause__, asyncpg.CheckViolationError)
        assert await store.last_sequence("bad") is None
        assert [p.position for p in await store.read_all()] == [1, 2, 3]


BROKEN = (
    "CREATE FUNCTION broken() RETURNS SETOF integer LANGUAGE plpgsql AS"
    " $$ BEGIN RAISE EXCEPTION 'page 7 is damaged' USING ERRCODE = 'XX001'; END $$"
)
TROUBLE = (
    "CREATE FUNCTION trouble() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN RAISE EXCEPTION 'trouble' USING ERRCODE = '{}'; END $$"
)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("53100", StoreFullError), ("25006", StoreReadOnlyError), ("42501", StoreReadOnlyError)],
)
async def test_a_server_that_has_no_room_or_may_not_write_says_so_and_is_read_on(
    open_postgres: OpenPostgres, code: str, kind: type[StorageWriteError]
) -> None:
    async with await open_postgres() as store:
        await store.append(event("x", 0))
        on_the_server(store, TROUBLE.format(code))
        on_the_server(
            store, "CREATE TRIGGER t BEFORE INSERT ON events FOR EACH STATEMENT EXECUTE FUNCTION trouble()"
        )
        for call, named in (
            (store.append(event("x", 1)), ("x", 1)),
            (store.copy_prefix("x", "t", 0), ("t", None)),
        ):
            with pytest.raises(kind) as caught:
                await call
            assert (caught.value.execution_id, caught.value.sequence) == named
        assert await store.read("x") == [event("x", 0)]
        on_the_server(store, "DROP TRIGGER t ON events")
        await store.append(event("x", 1))


async def test_damage_that_the_server_finds_itself_is_told_apart(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as store:
        await store.append(event("x", 0))
        on_the_server(store, BROKEN)
        on_the_server(store, "ALTER TABLE events RENAME TO kept")
        on_the_server(store, "CREATE VIEW events AS SELECT kept.* FROM kept, broken() AS b (n)")
        with pytest.raises(StoreCorruptError) as caught:
            await store.read("x")
        assert caught.value.execution_id == "x"
        assert isinstance(caught.value.__cause__, asyncpg.DataCorruptedError)
        with pytest.raises(StorageWriteError) as refused:
            await store.append(event("x", 1))
        assert isinstance(refused.value.__cause__, StoreCorruptError)


# --- damaged rows --------------------------------------------------------------------------------

STAMPED = "00000000000000ff"
DAMAGES = {
    "kind": "kind = 2",
    "stamp": "stamp = 5",
    "a stamp or none": "stamp = CASE WHEN stamp IS NULL THEN 0 END",
    "subject": "subject = 'other'",
    "fence": "fence = 9",
    "timestamp": "timestamp = timestamp + 1",
    "checksum": "checksum = checksum # 1",
    "extra": "extra = '{}'",
    "body": "body = '{\"n\":7}'",
    "sequence": "sequence = 99",
}


def mixed() -> list[Envelope]:
    """A log with a stamped emit at 2 and a plain one, with metadata, at 3."""
    return [
        event("x", 0),
        event("x", 1, payload={"n": 1}),
        event("x", 2, payload={"n": 2}, flowEmit=STAMPED),
        event("x", 3, payload={"n": 3}, hint="h", fence=1),
        event("x", 4, payload={"n": 4}),
    ]


@pytest.mark.parametrize("sequence", [2, 3])
@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES)
async def test_a_row_that_is_not_as_it_was_written_is_found_wherever_it_is_read(
    open_postgres: OpenPostgres, change: str, sequence: int
) -> None:
    async with await open_postgres() as store:
        await store.append_batch([event("before", 0), *mixed(), event("after", 0)])
        on_the_server(store, f"UPDATE events SET {change} WHERE execution = 2 AND sequence = {sequence}")
        with pytest.raises(StoreReadError, match="'x'"):
            await store.read("x")
        with pytest.raises(StoreReadError, match="'x'"):
            await store.copy_prefix("x", "t", 4)
        position = sequence + 2
        page = await store.read_all()
        assert [p.position for p in page] == list(range(1, position))
        with pytest.raises(StoreReadError) as caught:
            await store.read_all(position - 1)
        assert (caught.value.execution_id, caught.value.position) == ("x", position)
        assert [p.position for p in await store.read_all(position)] == list(range(position + 1, 8))
        assert await store.read("after") == [event("after", 0)]


# Of a stamped emit a fold uses the sequence, the kind and the stamp only.
UNUSED = {"subject", "fence", "timestamp", "extra", "body"}


@pytest.mark.parametrize("name", DAMAGES)
async def test_a_fold_finds_damage_to_what_it_uses(open_postgres: OpenPostgres, name: str) -> None:
    async with await open_postgres() as store:
        await store.append_batch(mixed())
        on_the_server(store, f"UPDATE events SET {DAMAGES[name]} WHERE sequence = 2")
        if name in UNUSED:
            assert await store.fold("x") == fold_events(None, mixed())
        else:
            with pytest.raises(StoreReadError, match="'x'"):
                await store.fold("x")
    if name in UNUSED - {"fence", "timestamp", "extra"}:
        async with await open_postgres() as store:
            on_the_server(store, f"UPDATE events SET {DAMAGES[name]} WHERE sequence = 3")
            with pytest.raises(StoreReadError, match="sequence 3"):
                await store.fold("x")


@pytest.mark.parametrize("gone", [0, 2, 4])
async def test_a_row_that_is_missing_is_found(open_postgres: OpenPostgres, gone: int) -> None:
    async with await open_postgres() as store:
        await store.append_batch(mixed())
        on_the_server(store, f"DELETE FROM events WHERE sequence = {gone}")
        for call in (store.read("x"), store.fold("x"), store.copy_prefix("x", "t", 4)):
            with pytest.raises(StoreReadError, match="'x'"):
                await call


async def test_a_row_that_strayed_into_another_log_is_found(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as store:
        await store.append_batch([*log("x", 2), *log("y", 3)])
        on_the_server(store, "DELETE FROM events WHERE execution = 2 AND sequence < 2")
        on_the_server(store, "UPDATE events SET execution = 2 WHERE execution = 1")
        for call in (store.read("y"), store.fold("y")):
            with pytest.raises(StoreReadError, match="'y', sequence 0"):
                await call


async def test_a_row_that_belongs_to_no_execution_stops_the_page_before_it(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres() as store:
        await store.append_batch([event("x", 0), event("y", 0), event("z", 0)])
        on_the_server(store, "UPDATE events SET execution = 77 WHERE position = 2")
        assert [p.position for p in await store.read_all()] == [1]
        with pytest.raises(StoreReadError) as caught:
            await store.read_all(1)
        assert (caught.value.execution_id, caught.value.position) == (None, 2)
        assert [p.position for p in await store.read_all(2)] == [3]


def test_a_busy_server_is_safe_to_repeat_only_if_nothing_can_have_been_written() -> None:
    busy = asyncpg.LockNotAvailableError("canceling statement due to lock timeout")
    surely = write_error("x", 1, busy, doubtful=False)
    assert (type(surely), surely.doubtful) == (StoreBusyError, False)
    assert "safe to repeat" in str(surely)
    perhaps = write_error("x", 1, busy, doubtful=True)
    assert (type(perhaps), perhaps.doubtful) == (StorageWriteError, True)
    assert "may have been written" in str(perhaps)
