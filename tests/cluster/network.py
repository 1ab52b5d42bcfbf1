"""What lies between a worker and its server: a proxy for each, which can cut, freeze and heal.

What lives here: `Network`, a thread with an event loop of its own, so that the driver's work never delays a
byte, and `Link`, one proxy in it. What must not: when what is disturbed.

A link that is *cut* has closed its connections, and refuses new ones. One that is *frozen* keeps them open,
accepts new ones too, and forwards nothing: what was sent meanwhile arrives once it is *healed*. One that has
*lost* its connections forwards new ones only: the old ones stay open and silent for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

PIECE = 65_536


class Link:
    """A proxy on a port of 127.0.0.1 to the unix socket `target`. Its methods are for the network's loop."""

    def __init__(self, target: str) -> None:
        self.port = 0
        self.passed = 0  # bytes, both ways
        self._target = target
        self._open = True
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self._open = False
        for writer in tuple(self._writers):
            writer.transport.abort()

    def freeze(self) -> None:
        self._flowing.clear()

    def heal(self) -> None:
        self._open = True
        self._flowing.set()

    def lose(self) -> None:
        self._flowing.clear()
        self._flowing = asyncio.Event()
        self._flowing.set()

    def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # when the network ends
            await self._connect(reader, writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:
            writer.transport.abort()
            return
        self._writers.add(writer)
        flowing = self._flowing
        try:
            await flowing.wait()
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_unix_connection(self._target)
                self._writers.add(far_writer)
                try:
                    await asyncio.gather(
                        self._pass(reader, far_writer, flowing), self._pass(far_reader, writer, flowing)
                    )
                finally:
                    self._writers.discard(far_writer)
                    far_writer.close()
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE):
                await flowing.wait()
                self.passed += len(piece)
                writer.write(piece)
                await writer.drain()
        writer.close()


class Network:
    """Links, in a thread of their own. `with Network() as network: network.link(path).port`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._links: list[Link] = []

    def link(self, target: str) -> Link:
        """Make a link to a unix socket."""
        link = Link(target)
        asyncio.run_coroutine_threadsafe(link.listen(), self._loop).result()
        self._links.append(link)
        return link

    def do(self, change: Callable[[], Any]) -> None:
        """Do something to a link: `network.do(link.cut)`."""

        async def done() -> None:
            change()

        asyncio.run_coroutine_threadsafe(done(), self._loop).result()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for link in self._links:
            self.do(link.close)
        asyncio.run_coroutine_threadsafe(self._emptied(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _emptied(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
