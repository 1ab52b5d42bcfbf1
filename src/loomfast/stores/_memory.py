"""The store of Python objects: for tests, and for programs that need no durability.

What lives here: `MemoryEventStore`. It keeps every guarantee of `_spi.py`, durable meaning "until the
process ends". Invariant: what is under the lock is one method call long, so no reader sees half a batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from loomfast._errors import StoreClosedError
from loomfast._kernels import Envelope, State, fold_events
from loomfast.stores._admission import NO_EVENT, Head, admit, check_page
from loomfast.stores._spi import EventStore, ExecutionSummary, PositionedEvent

# How many events are folded before the event loop gets its turn.
_FOLD_SLICE = 1_000


class MemoryEventStore(EventStore):
    """Keeps envelopes as they are handed over; they must not be changed afterwards.

    Also takes payloads without a JSON form (`Opaque`). May be used from several threads and event loops.
    Every call completes without waiting, so a cancelled caller's write has happened.
    """

    persists_json = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._heads: dict[str, Head] = {}
        self._logs: dict[str, list[Envelope]] = {}
        self._listing: list[str] = []  # execution ids by number, from 1
        self._order: list[Envelope] = []  # every event by position, from 1

    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        with self._lock:
            self._check_open(envelopes[0].execution_id if envelopes else None)
            heads = admit(self._head, envelopes)
            for execution_id, head in heads.items():
                if head.number == 0:
                    self._listing.append(execution_id)
                    head.number = len(self._listing)
                    self._logs[execution_id] = []
            self._heads.update(heads)
            for event in envelopes:
                self._logs[event.execution_id].append(event)
            self._order.extend(envelopes)

    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[Envelope]:
        with self._lock:
            self._check_open(execution_id)
            log = self._logs.get(execution_id, [])
            return log[max(first, 0) : None if last is None else max(last + 1, 0)]

    async def fold(self, execution_id: str, state: State | None = None) -> State | None:
        events = await self.read_from(execution_id, 0 if state is None else state.sequence + 1)
        for first in range(0, len(events), _FOLD_SLICE):
            if first:
                await asyncio.sleep(0)
            state = fold_events(state, events[first : first + _FOLD_SLICE])
        return state

    async def last_sequence(self, execution_id: str) -> int | None:
        with self._lock:
            self._check_open(execution_id)
            last = self._head(execution_id).last_sequence
            return None if last == NO_EVENT else last

    async def list_executions(
        self, *, status: str | None = None, after: int = 0, limit: int = 100
    ) -> list[ExecutionSummary]:
        check_page(after, limit)
        page: list[ExecutionSummary] = []
        with self._lock:
            self._check_open(None)
            for number in range(after + 1, len(self._listing) + 1):
                execution_id = self._listing[number - 1]
                head = self._heads[execution_id]
                if status is None or head.status == status:
                    page.append(
                        ExecutionSummary(execution_id, head.flow_id, head.status, head.last_sequence, number)
                    )
                    if len(page) == limit:
                        break
        return page

    async def acquire_fence(self, execution_id: str) -> int:
        with self._lock:
            self._check_open(execution_id)
            head = self._head(execution_id).copy()
            head.fence = (head.fence or 0) + 1
            self._heads[execution_id] = head
            return head.fence

    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        check_page(after, limit)
        with self._lock:
            self._check_open(None)
            page = self._order[after : after + limit]
        return [PositionedEvent(position, event) for position, event in enumerate(page, after + 1)]

    async def close(self) -> None:
        with self._lock:
            self._closed = True

    def _head(self, execution_id: str) -> Head:
        return self._heads.get(execution_id) or Head()

    def _check_open(self, execution_id: str | None) -> None:
        if self._closed:
            raise StoreClosedError(execution_id, "the memory store has been closed")
