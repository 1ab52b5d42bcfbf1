"""Following one execution: its durable events, one after the other, until it ends.

What lives here: `ExecutionEvents`. What must not: anything that changes an execution, and events that are not
durable yet (`on_event` tells of those).

A follower looks at the store, hands out the page it found, and waits when it finds nothing. It registers with
those who may tell it of more *before* it looks, so nothing is missed in between: the journal of a run that
this process drives tells of every append; the store tells of changes of status, as far as it can
(`EventStore.watch`). What neither of them tells of, because another process drives the execution or nobody
does, is found by looking now and then.

Invariant: `sequence` is that of the event handed out last, and nothing is awaited between setting it and
handing the event out. So a follower that was cancelled, or that raised, goes on exactly where it was.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Self

from loomfast._core.arguments import count_argument
from loomfast._errors import BadInputError, BeyondLogError, UnknownExecutionError
from loomfast._events import END_STATUS
from loomfast._kernels import Envelope
from loomfast._runtime.journal import fenced_out
from loomfast._runtime.polling import Polling

if TYPE_CHECKING:
    import asyncio

    from loomfast._runtime.driven import DrivenExecutions
    from loomfast._runtime.execution import DrivenExecution
    from loomfast._runtime.rest import Rest

# How many events are read from the store, and held, at a time, unless told otherwise.
PAGE_EVENTS = 256


class ExecutionEvents:
    """Iterates over the durable events of one execution behind the sequence `after`, until it has ended.

        async for event in runtime.handle(execution_id).events(after=seen):
            ...

    It waits for what is yet to come, while the execution runs, is parked, or is driven elsewhere, and stops
    behind the event that ends it, or once it is told to `stop`. Nothing is held while it is not asked but the
    rest of one page of at most `page_events`, so it can be dropped at any moment, and a slow one holds up
    nobody. It can be asked again after a cancellation (`asyncio.timeout` around `anext` makes a heartbeat)
    and after any error, and then goes on where it was.

    Raises `UnknownExecutionError`; `BeyondLogError` when the log does not reach `after`;
    `PrefixTruncatedError`, whose `first_available` says where one can go on; `StoreReadError` for a damaged
    event, and what else the store's reads raise; and, behind the last durable event, what keeps a run that
    this process drove from going on, as `ExecutionHandle.rest` does. One follower belongs to one task.
    """

    def __init__(
        self,
        driven: DrivenExecutions,
        execution_id: str,
        after: int | None,
        rest: Rest | None,
        *,
        page_events: int,
    ) -> None:
        if after is not None and (type(after) is not int or after < 0):
            raise BadInputError(f"after={after!r}: must be the sequence of an event, 0 or more, or None")
        count_argument("page_events", page_events)
        self.execution_id = execution_id
        self.sequence = after
        self._driven = driven
        self._page_events = page_events
        self._polling = Polling(driven.deps.clock)
        self._rest = rest  # of the run that was driven here last
        self._page: deque[Envelope] = deque()
        self._reached = False  # the log is known to hold `sequence`
        self._ended = False
        self._stopped = False
        self._told: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Envelope:
        while not (self._page or self._ended or self._stopped):
            with self._driven.watching(self.execution_id) as self._told:
                await self._look(self._told)
        if self._stopped or not self._page:
            raise StopAsyncIteration
        event = self._page.popleft()
        self.sequence = event.sequence
        self._ended = event.kind in END_STATUS
        return event

    def stop(self) -> None:
        """End the iteration here, for whoever waits in it too. Call it on the event loop of the runtime.

        What a service does with its open streams when it stops; the execution is not touched.
        """
        self._stopped = True
        if self._told is not None and not self._told.done():
            self._told.set_result(None)

    async def _look(self, told: asyncio.Future[None]) -> None:
        """Read the next page; if there is none, wait until there may be."""
        live = self._driven.live(self.execution_id)
        if live is not None:
            self._rest = live.rest
        failure = None if self._rest is None else self._rest.failure  # before the look: all it wrote is seen
        first = 0 if self.sequence is None else self.sequence + 1
        store = self._driven.store.primary
        page = await store.read_range(self.execution_id, first, first + self._page_events - 1)
        if page:
            self._reached = True
            self._page.extend(page)
            self._polling.found()
            return
        if not self._reached:
            await self._reach(live)
        if self._ended or told.done():
            return
        if live is not None:
            await told
        elif failure is not None and not fenced_out(failure):
            raise failure
        else:
            await self._polling.pause(told)

    async def _reach(self, live: DrivenExecution | None) -> None:
        """Say what it means that the first look found nothing."""
        store = self._driven.store.primary
        last = await store.last_sequence(self.execution_id)
        if last is None and live is None:
            raise UnknownExecutionError(self.execution_id)
        if self.sequence is None:
            return  # it has been started here, and its first event is on its way
        if last is None or last < self.sequence:
            raise BeyondLogError(self.execution_id, self.sequence, -1 if last is None else last)
        if last == self.sequence:
            (event,) = await store.read_range(self.execution_id, last, last)
            self._ended = event.kind in END_STATUS
        self._reached = True
