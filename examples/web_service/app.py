"""The service: what each request does to an execution, and what each error means to a client."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakSet

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import loomfast as lf

from .event_stream import EventStream
from .report import report

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024
RETRY_AFTER_S = 2

# What a client is told. The class that is nearest to that of the error counts.
STATUS: dict[type[BaseException], int] = {
    lf.BadInputError: 400,
    lf.UnknownExecutionError: 404,
    lf.ConflictError: 409,
    lf.PrefixTruncatedError: 410,
    lf.InputValidationError: 422,
    lf.JsonFormError: 422,
    lf.ResumeIdReusedError: 422,
    lf.LoomError: 500,
    lf.BadSnapshotError: 500,
    lf.UnknownFlowError: 500,
    lf.LeaseHeldError: 503,
    lf.LeaseLostError: 503,
    lf.RuntimeClosedError: 503,
    lf.StorageError: 503,
}


async def start(request: Request) -> Response:
    """POST /reports: start a report, once for each Idempotency-Key."""
    key = request.headers.get("idempotency-key")
    if not key:
        raise HTTPException(400, "the header Idempotency-Key is missing")
    order = await body_of(request)
    # Any key makes a good id. Where there are users, hash the user's name too: nobody meets another's keys.
    report_id = hashlib.sha256(key.encode()).hexdigest()[:32]
    runtime: lf.WorkflowRuntime = request.app.state.runtime
    status = 202
    try:
        await runtime.start(report, order, execution_id=report_id)
    except lf.ExecutionAlreadyExistsError:
        status = 200
    state = await state_of(request, report_id)
    if state.input != order:
        return answer(422, {"code": "idempotency-key-reused", "message": "the key belongs to another order"})
    return answer(status, described(state), {"Location": f"/reports/{report_id}"})


async def show(request: Request) -> Response:
    """GET /reports/{id}: how far it is."""
    return answer(200, described(await state_of(request, request.path_params["id"])))


async def approve(request: Request) -> Response:
    """POST /reports/{id}/approval: answer the gate, once for each Idempotency-Key."""
    report_id = request.path_params["id"]
    await request.app.state.runtime.resume(
        report_id,
        "approval",
        await body_of(request),
        resume_id=request.headers.get("idempotency-key"),
    )
    return answer(202, described(await state_of(request, report_id)))


async def follow(request: Request) -> Response:
    """GET /reports/{id}/events: what has been written behind Last-Event-ID, and what is being written."""
    state = await state_of(request, request.path_params["id"])
    seen = request.headers.get("last-event-id")
    if seen and not (seen.isascii() and seen.isdigit() and len(seen) < 19):
        raise HTTPException(400, "Last-Event-ID must be an id of this stream")
    after = int(seen) if seen else None
    if after is not None and after > state.sequence:
        raise lf.BeyondLogError(state.execution_id, after, state.sequence)
    if after == state.sequence and state.ended is not None:
        return Response(status_code=204)  # which keeps a browser from asking again
    events = request.app.state.runtime.handle(state.execution_id).events(after=after)
    request.app.state.streams.add(events)
    return EventStream(events)


async def body_of(request: Request) -> Any:
    """Read a JSON body of bounded size."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"at most {MAX_BODY_BYTES} bytes")
    return lf.decode(body)


async def state_of(request: Request, report_id: str) -> lf.State:
    state: lf.State | None = await request.app.state.runtime.load_state(report_id)
    if state is None:
        raise lf.UnknownExecutionError(report_id)
    return state


def described(state: lf.State) -> dict[str, Any]:
    return {
        "id": state.execution_id,
        "status": state.status,
        "waiting_for": None if state.pending is None else state.pending.on,
        "result": state.output if state.status == "completed" else None,
        "error": state.error if state.status == "failed" else None,
    }


def answer(status: int, body: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(lf.encode(body), status, headers, media_type="application/json")


async def refuse(request: Request, error: Exception) -> Response:
    """Say what a typed error means to the client."""
    assert isinstance(error, lf.LoomError)
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    if status >= 500:
        logger.warning("%s %s: %s", request.method, request.url.path, error)
        return answer(
            status, {"code": error.code}, {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
        )
    problems = error.problems if isinstance(error, lf.InputValidationError) else []
    named = [{"path": path, "reason": reason} for path, reason in problems]
    return answer(status, {"code": error.code, "message": str(error), "problems": named})


def create_app(store_url: str, *, lease_ttl_s: float = 10) -> Starlette:
    """Make the service. Any number of its processes may share a store.

    What a process that was killed left running is taken up, by whoever is there, once `lease_ttl_s` seconds
    have passed.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with (
            await lf.open_store(store_url) as store,
            lf.Worker(store, lf.App([report]), lease_ttl_s=lease_ttl_s, close_grace_s=5) as worker,
        ):
            app.state.runtime = worker.runtime
            yield

    routes = [
        Route("/reports", start, methods=["POST"]),
        Route("/reports/{id}", show),
        Route("/reports/{id}/approval", approve, methods=["POST"]),
        Route("/reports/{id}/events", follow),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={lf.LoomError: refuse})
    app.state.streams = WeakSet()
    return app


def end_streams(app: Starlette) -> None:
    """End the open streams, since a server that stops waits for its responses, and these have no end."""
    for events in tuple(app.state.streams):
        events.stop()
