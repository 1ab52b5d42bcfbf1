"""LISTEN and NOTIFY: who is woken early, and that nobody relies on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

import loomfast as lf
from loomfast._runtime import polling
from loomfast.stores import EventStore
from loomfast.stores import _postgres_waking as waking
from loomfast.testing.postgres import PostgresServer

from .conftest import OpenPostgres
from .logs import event
from .test_postgres_faults import drop_connections

DONE = {"output": None}


class Ear:
    """Hears of one execution. It hears once, too, when the store has begun to listen."""

    def __init__(self, store: EventStore, execution_id: str) -> None:
        self._heard = asyncio.Event()
        self.times = 0
        self.unwatch: Callable[[], None] = store.watch(execution_id, self._hear)

    def _hear(self) -> None:
        self.times += 1
        self._heard.set()

    async def hears(self) -> None:
        await asyncio.wait_for(self._heard.wait(), 20)
        self._heard.clear()


async def test_who_watches_is_told_when_the_status_changes_elsewhere_and_not_otherwise(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres() as store, await open_postgres() as other:
        await other.append_batch([event("\ud800", 0), event("b", 0), event("c", 0)])
        ear, deaf = Ear(store, "\ud800"), Ear(store, "b")
        await ear.hears()  # the store listens
        await deaf.hears()
        assert (ear.times, deaf.times) == (1, 1)
        await other.append(event("\ud800", 1))
        await other.append(event("c", 1, "EXECUTION_COMPLETED", DONE))
        await other.append(event("\ud800", 2, "EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}))
        await ear.hears()
        await other.append(event("\ud800", 3, "EXECUTION_COMPLETED", DONE))
        await ear.hears()
        assert (ear.times, deaf.times) == (3, 1)
        ear.unwatch()
        ear.unwatch()
        await other.append_batch(
            [event("\ud800", 4, "note"), event("b", 1, "EXECUTION_CANCELLED", {"reason": None})]
        )
        await deaf.hears()
        assert (ear.times, deaf.times) == (3, 2)


async def test_who_watches_through_decorators_is_told_of_the_execution_by_its_own_name(
    open_postgres: OpenPostgres,
) -> None:
    async with await open_postgres() as inner, await open_postgres() as other:
        store = lf.CoalescingEventStore(lf.TenantScopedEventStore(inner, "t"))
        await store.append(event("a", 0))
        ear = Ear(store, "a")
        await ear.hears()
        await lf.TenantScopedEventStore(other, "t").append(event("a", 1, "EXECUTION_COMPLETED", DONE))
        await ear.hears()


async def test_a_large_group_tells_of_everybody(open_postgres: OpenPostgres) -> None:
    async with await open_postgres() as store, await open_postgres() as other:
        names = [f"x{n}" for n in range(waking._NOTICES_AT_ONCE * 2 + 50)]
        await other.append_batch([event(name, 0) for name in names])
        ears = [Ear(store, name) for name in names]
        for ear in ears:
            await ear.hears()
        await other.append_batch([event(name, 1, "EXECUTION_COMPLETED", DONE) for name in names])
        for ear in ears:
            await ear.hears()


async def test_a_listener_that_lost_its_server_listens_again_and_wakes_everybody(
    open_postgres: OpenPostgres, postgres_server: PostgresServer
) -> None:
    async with await open_postgres() as store, await open_postgres() as other:
        await other.append_batch([event("a", 0), event("b", 0)])
        ear = Ear(store, "a")
        await ear.hears()
        for restart in (False, True):
            if restart:
                await asyncio.to_thread(postgres_server.restart)
            else:
                await drop_connections(postgres_server, but=None)
            await ear.hears()
        await other.append(event("a", 1, "EXECUTION_COMPLETED", DONE))
        await ear.hears()


async def test_a_store_listens_from_the_first_watch_on_and_not_before(
    open_postgres: OpenPostgres, postgres_server: PostgresServer
) -> None:
    async with await open_postgres() as store:
        await store.append(event("a", 0))
        assert store._listener._task is None
        ear = Ear(store, "a")
        await ear.hears()
        ear.unwatch()
        await asyncio.sleep(0)
        assert store._listener._watchers == {}


async def test_a_handle_is_woken_by_what_another_process_does_long_before_it_would_look(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "POLL_S", 10_000)

    @lf.flow
    async def wait(ctx: lf.WorkflowContext, _: None) -> str:
        return str((await ctx.suspend("go"))["said"])

    async with (
        await open_postgres() as here,
        await open_postgres() as there,
        lf.WorkflowRuntime(here, flows=[wait]) as waiting,
        lf.WorkflowRuntime(there, flows=[wait]) as driving,
    ):
        await (await driving.start(wait, execution_id="x")).rest()
        result = asyncio.create_task(waiting.handle("x").result())
        await asyncio.sleep(0.2)
        assert not result.done()
        await driving.resume("x", "go", {"said": "hello"})
        assert await asyncio.wait_for(result, 20) == "hello"


async def test_who_follows_what_another_process_drives_is_woken_where_it_rests_and_ends(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "POLL_S", 10_000)

    @lf.flow
    async def wait(ctx: lf.WorkflowContext, _: None) -> None:
        ctx.emit("note", 1)
        await ctx.suspend("go")
        ctx.emit("note", 2)

    async with (
        await open_postgres() as here,
        await open_postgres() as there,
        lf.WorkflowRuntime(here) as watching,
        lf.WorkflowRuntime(there, flows=[wait]) as driving,
    ):
        await (await driving.start(wait, execution_id="x")).rest()
        seen: list[int] = []

        async def follow() -> None:
            seen.extend([event.sequence async for event in watching.handle("x").events()])

        following = asyncio.create_task(follow())
        await driving.resume("x", "go")
        await asyncio.wait_for(following, 20)
        assert seen == [event.sequence for event in await there.read("x")]


async def test_a_handle_on_another_event_loop_is_woken_too(
    open_postgres: OpenPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "POLL_S", 10_000)
    async with await open_postgres() as store:
        await store.append(event("x", 0))
        statuses: list[str] = []

        async def wait_there() -> None:
            async with lf.WorkflowRuntime(store) as waiting:
                statuses.append((await waiting.handle("x").rest()).status)

        thread = threading.Thread(target=lambda: asyncio.run(wait_there()))
        thread.start()
        while not store._listener._watchers:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        await store.append(event("x", 1, "EXECUTION_COMPLETED", DONE))
        await asyncio.to_thread(thread.join, 20)
        assert statuses == ["completed"]
