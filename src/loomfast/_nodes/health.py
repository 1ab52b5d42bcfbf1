"""A worker's health over HTTP, for whoever restarts processes.

What lives here: `serve_health`. What must not: what health is (`Worker.health`).

`GET /healthz` answers 200 while the worker is well and 503 otherwise, with its `Health` as JSON; so does `/`.
A request is read by h11, within bounds of size and time; one connection carries one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import h11

from loomfast._kernels import encode
from loomfast._nodes.worker import Worker

# How long, in seconds, a request may take to arrive, and its answer to be taken.
REQUEST_S = 5.0
# How many may be under way at a time: one more, and the oldest is cut off, so that nobody is kept out.
AT_A_TIME = 64


@contextlib.asynccontextmanager
async def serve_health(worker: Worker, host: str, port: int) -> AsyncIterator[tuple[str, int]]:
    """Serve the health of a worker until left, and give the address; port 0 takes a free one.

    Raises `OSError` for an address that cannot be taken.
    """
    connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}  # the oldest first

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) == AT_A_TIME:
            connections.pop(next(iter(connections))).transport.abort()
        this = asyncio.current_task()
        assert this is not None
        connections[this] = writer
        try:
            with contextlib.suppress(TimeoutError, OSError, h11.RemoteProtocolError):
                async with asyncio.timeout(REQUEST_S):
                    await _answer(worker, reader, writer)
        finally:
            connections.pop(this, None)
            writer.close()

    server = await asyncio.start_server(answer, host, port)
    async with server:
        taken_host, taken_port = server.sockets[0].getsockname()[:2]
        try:
            yield taken_host, taken_port
        finally:
            server.close()
            for writer in connections.values():
                writer.transport.abort()
            if connections:
                await asyncio.wait(tuple(connections))


async def _answer(worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=16_384)
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(4_096))
    if not isinstance(event, h11.Request):
        return
    status, body = _response(worker, event.method, event.target)
    headers = [
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        ("connection", "close"),
    ]
    parts = [connection.send(h11.Response(status_code=status, headers=headers))]
    if event.method != b"HEAD":
        parts.append(connection.send(h11.Data(data=body)))
    parts.append(connection.send(h11.EndOfMessage()))
    writer.write(b"".join(part for part in parts if part))
    await writer.drain()


def _response(worker: Worker, method: bytes, target: bytes) -> tuple[int, bytes]:
    if method not in (b"GET", b"HEAD"):
        return 405, b'{"error":"GET only"}'
    if target.partition(b"?")[0] not in (b"/", b"/healthz"):
        return 404, b'{"error":"look at /healthz"}'
    health = worker.health()
    body = encode(
        {
            "phase": health.phase,
            "well": health.well,
            "driving": health.driving,
            "limit": health.limit,
            "lookedSecondsAgo": health.looked_s,
            "sweptSecondsAgo": health.swept_s,
            "failing": health.failing,
        }
    )
    return (200 if health.well else 503), body
