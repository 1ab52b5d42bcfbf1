"""Server-sent events from the durable log of one execution.

The `id` of each is its sequence in the log, so a client that reconnects with the last one it saw misses
nothing and gets nothing twice, whatever process serves it by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

from starlette.responses import StreamingResponse

import loomfast as lf

logger = logging.getLogger(__name__)

HEARTBEAT_S = 15.0  # how long a stream may be silent
STALLED_S = 30.0  # how long a client may take nothing of what it is sent

ENDS = {"EXECUTION_COMPLETED": "completed", "EXECUTION_FAILED": "failed", "EXECUTION_CANCELLED": "cancelled"}


class EventStream(StreamingResponse):
    """Server-sent events from the durable log: a position and at most one page of it are held."""

    media_type = "text/event-stream"

    def __init__(self, events: lf.ExecutionEvents) -> None:
        super().__init__(frames(events), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Callable[[MutableMapping[str, Any]], Any]) -> None:
        """Send, and give a client up that takes nothing: a response left unfinished is cut by the server."""

        async def send_in_time(message: MutableMapping[str, Any]) -> None:
            async with asyncio.timeout(STALLED_S):
                await send(message)

        try:
            await super().stream_response(send_in_time)
        except TimeoutError:
            logger.info("a client took nothing for %s s and is given up", STALLED_S)


async def frames(events: lf.ExecutionEvents) -> AsyncIterator[bytes]:
    """Write events as a browser's EventSource reads them. Whatever breaks this off, it can ask again."""
    yield b"retry: 1000\n\n"
    while True:
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                event = await anext(events, None)
        except TimeoutError:
            yield b": still here\n\n"
            continue
        except lf.LoomError as error:
            logger.warning("a stream of %s ends early: %s", events.execution_id, error)
            return
        if event is None:
            return
        if event.event_type == "STREAM_CHUNK":
            yield frame(event.sequence, "text", event.payload["chunk"])
        elif event.event_type == "EXECUTION_SUSPENDED":
            yield frame(event.sequence, "waiting", event.payload["on"])
        elif event.event_type in ENDS:
            yield frame(event.sequence, "end", ENDS[event.event_type])


def frame(sequence: int, kind: str, data: Any) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (sequence, kind.encode(), lf.encode(data))
