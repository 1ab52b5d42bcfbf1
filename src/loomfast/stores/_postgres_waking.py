"""Telling those who wait that an execution has changed: LISTEN and NOTIFY.

What lives here: `Listener`, and the form of the notices. What must not: anything that a waiter relies on. A
notice may be lost, may come twice, and says only where to look; a waiter still polls.

`append` sends a notice, in the transaction that changes the status of an execution, so nobody hears of what
was rolled back. A notice is 16 hex digits, the hash of an execution's id; some hundreds share one payload.
PostgreSQL takes payloads of less than 8,000 bytes.

The listener connects when it is first asked to watch, on a connection of its own. When that is lost it is
made again, and everybody is woken: what was said in between was not heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import asyncpg
import xxhash

from loomfast.stores._postgres_connections import LOST, Connection, Connections
from loomfast.stores._postgres_rows import store_text

_log = logging.getLogger("loomfast")

_NOTICES_AT_ONCE: Final = 400
_SEPARATOR: Final = ","
_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 5.0

Waker = Callable[[], None]


def notice_of(execution_id: str) -> str:
    """What is said of an execution that has changed."""
    return xxhash.xxh3_64_hexdigest(store_text(execution_id))


def payloads_of(execution_ids: Sequence[str]) -> list[str]:
    """The payloads that tell of these executions."""
    return [
        _SEPARATOR.join(notice_of(one) for one in execution_ids[start : start + _NOTICES_AT_ONCE])
        for start in range(0, len(execution_ids), _NOTICES_AT_ONCE)
    ]


class Listener:
    """Wakes those who watch an execution. Belongs to the store's event loop."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._watchers: dict[str, list[Waker]] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def watch(self, execution_id: str, wake: Waker) -> None:
        """Call `wake` whenever the execution may have changed, until `unwatch`."""
        self._watchers.setdefault(notice_of(execution_id), []).append(wake)
        if self._task is None and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._listen())

    def unwatch(self, execution_id: str, wake: Waker) -> None:
        notice = notice_of(execution_id)
        watchers = self._watchers.get(notice, [])
        with contextlib.suppress(ValueError):
            watchers.remove(wake)
        if not watchers:
            self._watchers.pop(notice, None)

    async def close(self) -> None:
        """Stop listening."""
        self.terminate()
        if self._task is not None:
            await asyncio.wait((self._task,))

    def terminate(self) -> None:
        """Stop listening as soon as the event loop gets to it."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    async def _listen(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                connection: Connection = await self._connections.connect()
            except (*LOST, asyncpg.PostgresError) as error:
                _log.warning("cannot listen for changes, waiters poll meanwhile: %s", error)
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
                continue
            lost = asyncio.Event()
            connection.add_termination_listener(lambda _, lost=lost: lost.set())
            try:
                channel = await connection.fetchval("SELECT channel()")
                await connection.add_listener(channel, self._hear)
                self._wake(list(self._watchers))  # what was said before this was not heard
                wait_s = _FIRST_WAIT_S
                await lost.wait()
            except (*LOST, asyncpg.PostgresError):
                await asyncio.sleep(wait_s)
            finally:
                connection.terminate()

    def _hear(self, _connection: Any, _pid: int, _channel: str, payload: Any) -> None:
        self._wake(str(payload).split(_SEPARATOR))

    def _wake(self, notices: Sequence[str]) -> None:
        for notice in notices:
            for wake in tuple(self._watchers.get(notice, ())):
                wake()
