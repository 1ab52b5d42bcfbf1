"""The web service from inside its process: clients that take nothing, silence, and a store that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

import loomfast as lf
from tests.examples.writer import words
from web_service import app as web
from web_service import event_stream
from web_service import report as flow

ORDER = {"topic": "looms", "sections": 2}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    async def compose(topic: str, section: int) -> list[str]:
        return words(section)

    monkeypatch.setattr(flow, "compose", compose)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Starlette, httpx.AsyncClient]]:
    app = web.create_app(str(folder / "reports.db"))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as client:
        client.base_url = httpx.URL("http://service")
        yield app, client


async def at_its_gate(app: Starlette) -> str:
    handle = await app.state.runtime.start(flow.report, ORDER)
    await handle.rest()
    return str(handle.execution_id)


async def stream(app: Starlette, report: str, take: Any) -> None:
    """Have a stream served to a client that stays connected and takes as `take` does."""
    scope = {
        "type": "http",
        "method": "GET",
        "path": f"/reports/{report}/events",
        "headers": [],
        "query_string": b"",
        "asgi": {"spec_version": "2.3"},
    }

    async def receive() -> MutableMapping[str, Any]:
        return await asyncio.Event().wait() or {}

    await app(scope, receive, take)


async def test_a_client_that_takes_nothing_is_given_up_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "STALLED_S", 0.01)
    taken: list[bytes] = []

    async def take(message: MutableMapping[str, Any]) -> None:
        if len(taken) == 3:
            await asyncio.Event().wait()
        taken.append(message.get("body", b""))

    async with served(tmp_path) as (app, _):
        await stream(app, await at_its_gate(app), take)
        assert len(taken) == 3
        assert app.state.runtime._driven.watchers == {}


async def test_a_stream_with_nothing_to_say_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.01)
    bodies: list[bytes] = []

    async with served(tmp_path) as (app, client):
        report = await at_its_gate(app)

        async def take(message: MutableMapping[str, Any]) -> None:
            bodies.append(message.get("body", b""))
            if bodies.count(b": still here\n\n") == 2:
                await client.post(f"/reports/{report}/approval", json={"approved": True})

        await stream(app, report, take)
    said = b"".join(bodies)
    assert said.count(b"event: text") == 12
    assert said.index(b"event: waiting") < said.index(b": still here") < said.index(b"event: end")


async def test_what_is_closed_is_unavailable_for_a_while_and_no_error_of_the_client(tmp_path: Path) -> None:
    async with served(tmp_path) as (app, client):
        report = await at_its_gate(app)
        await app.state.runtime.close()
        refused = await client.post(f"/reports/{report}/approval", json={"approved": True})
        assert (refused.status_code, refused.json()) == (503, {"code": "runtime-closed"})
        assert refused.headers["retry-after"] == "2"
        refused = await client.post("/reports", json=ORDER, headers={"Idempotency-Key": "k"})
        assert (refused.status_code, refused.json()) == (503, {"code": "runtime-closed"})
        assert (await client.get(f"/reports/{report}")).status_code == 200  # reading goes on
        await app.state.runtime.store.close()
        refused = await client.get(f"/reports/{report}")
        assert (refused.status_code, refused.json()) == (503, {"code": "store-closed"})
        assert refused.headers["retry-after"] == "2"


def test_every_error_has_a_status_and_the_nearest_one_counts() -> None:
    def status(kind: type[BaseException]) -> int:
        return next(web.STATUS[base] for base in kind.__mro__ if base in web.STATUS)

    assert status(lf.StoreFullError) == 503
    assert status(lf.BeyondLogError) == 400
    assert status(lf.GateRefusedError) == 409
    assert status(lf.ResumeIdReusedError) == 422
    assert status(lf.TooDeepError) == 422
    assert status(lf.LeaseLostError) == 503
    assert status(lf.UnknownFlowError) == 500
