"""Fencing first, and driving under a token that was taken before: what a dispatch needs (ADR 0103, L12)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import loomfast as lf
from loomfast.testing.postgres import PostgresServer
from tests.conftest import OpenStore
from tests.runtime.harness import runtime, turns
from tests.runtime.test_recover_abandoned import leave_behind, works


async def test_it_runs_under_the_token_that_was_taken_and_takes_no_other(
    open_store: OpenStore,
) -> None:
    async with open_store() as store, runtime(store, works) as rt:
        await leave_behind(store, "x")
        fence = await rt.fence("x")
        assert fence == 1
        handle = await rt.recover("x", fence=fence)
        assert await handle.result() == "done"
        assert {event.fence for event in (await store.read("x"))[1:]} == {1}
        assert await store.acquire_fence("x") == 2


async def test_under_a_token_that_is_not_the_newest_nothing_runs_and_no_crash_counts(
    open_store: OpenStore,
) -> None:
    """The newer token's holder has not written yet: the log does not show that there is one."""
    async with open_store() as store, runtime(store, works) as rt:
        await leave_behind(store, "x")
        before = await store.read("x")
        older = await rt.fence("x")
        newer = await rt.fence("x")
        assert isinstance(older, int)
        assert isinstance(newer, int)
        with pytest.raises(lf.StaleFenceError) as caught:
            await rt.recover("x", fence=older)
        assert (caught.value.fence, caught.value.current) == (older, newer)
        assert await store.read("x") == before
        assert await store.recoveries.get("x") is None
        assert await (await rt.recover("x", fence=newer)).result() == "done"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_what_a_store_remembers_of_a_log_does_not_hide_a_newer_token(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, new_schema: str
) -> None:
    """It was acquired by another process, through a store of its own."""

    async def opened() -> lf.EventStore:
        if kind == "sqlite":
            return await lf.SqliteEventStore.open(tmp_path / "events.db")
        server: PostgresServer = request.getfixturevalue("postgres_server")
        return await lf.PostgresEventStore.open(server.dsn, schema=new_schema)

    async with await opened() as store, await opened() as theirs, runtime(store, works) as rt:
        await leave_behind(store, "x")
        fence = await rt.fence("x")
        assert isinstance(fence, int)
        assert await theirs.acquire_fence("x") == fence + 1
        with pytest.raises(lf.StaleFenceError):
            await rt.recover("x", fence=fence)


async def test_a_token_for_what_does_not_exist_yet_starts_it(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store, works) as rt:
        fence = await rt.fence("x")
        assert isinstance(fence, int)
        with pytest.raises(lf.UnknownExecutionError):
            await rt.recover("x", fence=fence)
        assert await (await rt.start(works, execution_id="x", fence=fence)).result() == "done"


async def test_what_is_driven_here_or_rests_is_not_fenced(open_store: OpenStore) -> None:
    release = asyncio.Event()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        await release.wait()
        await ctx.suspend("go")
        return "done"

    async with open_store() as store, runtime(store, flow) as rt, runtime(store, flow) as other:
        await rt.start(flow, execution_id="x")
        handle = await rt.fence("x")
        assert isinstance(handle, lf.ExecutionHandle)
        release.set()
        assert (await handle.rest()).status == "suspended"
        for at_rest in (await rt.fence("x"), await other.fence("x")):
            assert isinstance(at_rest, lf.ExecutionHandle)
            assert (await at_rest.rest()).status == "suspended"
        assert await (await rt.resume("x", "go")).result() == "done"
        assert {event.fence for event in await store.read("x")} == {None}


async def test_what_could_not_be_driven_on_here_is_not_fenced(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store) as rt:
        await leave_behind(store, "x")
        with pytest.raises(lf.UnknownFlowError):
            await rt.fence("x")
        await store.recoveries.put(lf.Recovery("x", 5, 0, False, "5 runs in a row crashed"))
        rt.register(works)
        with pytest.raises(lf.ExecutionSetAsideError):
            await rt.fence("x")
        assert await store.acquire_fence("x") == 1


async def test_a_token_that_is_none_and_an_id_that_is_none_are_refused() -> None:
    async with runtime(lf.MemoryEventStore(), works) as rt:
        for bad in (-1, 1.5, True, "1", 2**63):
            with pytest.raises(lf.BadInputError, match="fence"):
                await rt.recover("x", fence=bad)  # type: ignore[arg-type]
        for name in ("", None):
            with pytest.raises(lf.BadInputError, match="execution_id"):
                await rt.fence(name)  # type: ignore[arg-type]
        await rt.close()
        with pytest.raises(lf.RuntimeClosedError):
            await rt.fence("x")


async def test_one_that_came_to_rest_before_the_fence_is_left_as_it_is(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store, works) as one, runtime(store, works) as two:
        fence = await two.fence("x")
        assert isinstance(fence, int)
        newer = await one.fence("x")
        assert isinstance(newer, int)
        await (await one.start(works, execution_id="x", fence=newer)).result()
        handle = await two.recover("x", fence=fence)
        assert await handle.result() == "done"
        await turns(3)
        assert {event.fence for event in await store.read("x")} == {newer}
