"""Group commit for any store: appends of independent callers share one batch of the store inside.

What lives here: `CoalescingEventStore`, and how what waits becomes batches. What must not: writing itself.

Theory of operation
-------------------
A caller's append is put into a queue and the caller waits. One task takes from the front of the queue what
goes together, appends it as one `append_batch` of the store inside, and then tells each caller what became
of theirs: nobody is told "stored" before the commit that holds their events. While a batch is under way the
next one gathers, so that a busy store is flushed once for many callers even with a linger of 0.

    append(a-0)           ┐
    append_batch(b-3,b-4) ├─ one batch, in this order       whole batches of callers are never split
    append(c-7)           ┘
    append_batch(d-0)     ── a batch by itself: a one-envelope batch is somebody who wants to be alone
    append(a-1)           ── the next one

The queue is first come, first served, and one batch is under way at a time: the order of one execution's
appends is kept. A lone one-envelope `append_batch` shares its flush with nobody, which is what the single
retry of a start relies on (ADR 0103, D2).

*Linger.* With `max_linger_ms` above 0 an append is held back for company, by at most that; a full batch, a
batch that is alone and closing end the wait at once.

*Refusals.* The store inside takes a batch whole or not at all. A refused one is, by default, halved until the
offender stands alone, so that only its caller is rejected; the halves keep the order. With `isolate=False`
every caller of the batch gets the batch's error, which is the record's behaviour. A store that is busy or
closed is nobody's offence, and a write that may have happened after all (`StorageWriteError.doubtful`) must
not be tried again, or its own events would refuse it: everybody is told.

*Fences* are judged by the store inside, when the batch is flushed: what waits here while its execution is
fenced is refused then.

Invariant: every caller hears exactly once, and what a caller who went away was waiting for is either not
begun, and then never written, or under way, and then whole or absent.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence

from loomfast._errors import (
    BadInputError,
    StorageWriteError,
    StoreBusyError,
    StoreClosedError,
    StoreFullError,
    StoreReadOnlyError,
)
from loomfast._kernels import Envelope
from loomfast.stores._decorator import EventStoreDecorator
from loomfast.stores._spi import EventStore
from loomfast.stores._spi_arguments import check_some


class _Append:
    """What one caller waits for."""

    __slots__ = ("alone", "arrived_s", "envelopes", "outcome")

    def __init__(
        self, envelopes: tuple[Envelope, ...], *, alone: bool, arrived_s: float, outcome: asyncio.Future[None]
    ) -> None:
        self.envelopes = envelopes
        self.alone = alone
        self.arrived_s = arrived_s
        self.outcome = outcome

    def stored(self) -> None:
        if not self.outcome.done():
            self.outcome.set_result(None)

    def reject(self, error: Exception) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # seen, in case the caller goes away in this very moment


class CoalescingEventStore(EventStoreDecorator):
    """Joins appends of independent callers into batches of `inner`.

    `max_linger_ms` is how long, in milliseconds, an append may be held back for company; 0 never holds one
    back. `max_events` ends a batch (one caller's batch may be larger, and then is one by itself).
    `max_waiting_events` bounds the queue: who comes when it is full waits before it. `isolate=False` rejects
    every caller of a refused batch. `sleep` is what the linger is waited with; arrival is timed by the
    loop's clock.

    Belongs to one event loop at a time. Cancelling a caller whose append has not been begun takes it back;
    of one that has, the write happens whole or not at all. Reads and all other verbs go to `inner` at once,
    and see what was acknowledged. `close` flushes what waits and then closes `inner`. SPEC 7, F22.
    """

    def __init__(
        self,
        inner: EventStore,
        *,
        max_linger_ms: float = 0,
        max_events: int = 1_000,
        max_waiting_events: int = 10_000,
        isolate: bool = True,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        super().__init__(inner)
        if not 0 <= max_linger_ms <= 60_000:
            raise BadInputError(f"max_linger_ms={max_linger_ms}: must be between 0 and a minute")
        for name, value in (("max_events", max_events), ("max_waiting_events", max_waiting_events)):
            if value < 1:
                raise BadInputError(f"{name}={value}: must be 1 or more")
        self._linger_s = max_linger_ms / 1000
        self._max_events = max_events
        self._max_waiting = max_waiting_events
        self._isolate = isolate
        self._sleep = sleep
        self._before: OrderedDict[_Append, None] = OrderedDict()  # who waits for room in the queue
        self._queue: deque[_Append] = deque()
        self._under_way: list[_Append] = []
        self._waiting_events = 0  # of the queue, and of what is under way
        self._hurry: asyncio.Future[None] | None = None  # while an append lingers: ends the linger
        self._flusher: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def waiting_events(self) -> int:
        """How many events are in the queue or being written."""
        return self._waiting_events

    async def append(self, envelope: Envelope) -> None:
        await self._told(self._enter((envelope,), alone=False))

    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        if not envelopes:
            await self.inner.append_batch(())
            return
        await self._told(self._enter(tuple(envelopes), alone=len(envelopes) == 1))

    def write(self, envelopes: Sequence[Envelope]) -> asyncio.Future[Exception | None]:
        check_some(envelopes)
        told: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

        def tell(outcome: asyncio.Future[None]) -> None:
            if not told.done():
                error = outcome.exception()
                assert error is None or isinstance(error, Exception)  # `reject` is given nothing else
                told.set_result(error)

        self._enter(tuple(envelopes), alone=False).outcome.add_done_callback(tell)
        return told

    @staticmethod
    async def _told(append: _Append) -> None:
        try:
            await append.outcome
        finally:
            # The error knows this frame, and must not be kept alive by it.
            del append

    def _enter(self, envelopes: tuple[Envelope, ...], *, alone: bool) -> _Append:
        """Put an append into the queue, or before it, for the flusher to take."""
        if self._closed:
            raise StoreClosedError(envelopes[0].execution_id, "the coalescing store has been closed")
        loop = asyncio.get_running_loop()
        self._outlive()
        if self._flusher is None:
            self._loop = loop
        elif self._loop is not loop:
            raise BadInputError("a coalescing store belongs to one event loop: make one for each")
        append = _Append(envelopes, alone=alone, arrived_s=loop.time(), outcome=loop.create_future())
        self._before[append] = None
        self._let_in()
        if append in self._before:  # who gives up, or is rejected, waits no longer
            append.outcome.add_done_callback(lambda _: self._before.pop(append, None))
        if self._flusher is None:
            self._flusher = loop.create_task(self._flush())
            self._flusher.add_done_callback(self._flushed)
        return append

    async def close(self) -> None:
        self._closed = True
        self._outlive()
        self._end_linger()
        if self._flusher is not None:
            await asyncio.wait((self._flusher,))
        await self.inner.close()

    def _outlive(self) -> None:
        """Forget what was left unwritten when the event loop was closed under the flusher: nobody waits."""
        if self._flusher is not None and self._loop is not None and self._loop.is_closed():
            self._forget()

    def _forget(self) -> None:
        """Be as before the first append."""
        self._under_way = []
        self._queue.clear()
        self._before.clear()
        self._waiting_events = 0
        self._hurry = None
        self._flusher = None

    # --- the queue -------------------------------------------------------------------------------

    def _let_in(self) -> None:
        """Move callers from before the queue into it, in the order they came, while there is room."""
        alone = False
        while self._before:
            append = next(iter(self._before))
            size = len(append.envelopes)
            if append.outcome.done():  # its caller has gone
                self._before.popitem(last=False)
            elif self._waiting_events == 0 or self._waiting_events + size <= self._max_waiting:
                self._before.popitem(last=False)
                self._queue.append(append)
                self._waiting_events += size
                alone = alone or append.alone
            else:
                break
        if alone or self._is_full():
            self._end_linger()

    def _is_full(self) -> bool:
        return bool(self._before) or self._waiting_events >= self._max_events

    def _take(self) -> list[_Append]:
        """Take what goes together off the front of the queue."""
        batch: list[_Append] = []
        events = 0
        while self._queue:
            append = self._queue[0]
            size = len(append.envelopes)
            if append.outcome.done():  # its caller has gone: it is never begun
                self._queue.popleft()
                self._waiting_events -= size
                continue
            if batch and (append.alone or events + size > self._max_events):
                break
            self._queue.popleft()
            batch.append(append)
            events += size
            if append.alone:
                break
        return batch

    # --- flushing --------------------------------------------------------------------------------

    async def _flush(self) -> None:
        """Write batch after batch until the queue is empty."""
        loop = asyncio.get_running_loop()
        try:
            while self._queue:
                await self._company()
                self._under_way = self._take()
                if self._under_way:
                    await self._write(self._under_way.copy())
                self._waiting_events -= sum(len(append.envelopes) for append in self._under_way)
                self._under_way.clear()
                self._let_in()
        finally:
            if not loop.is_closed():  # or nobody is left to tell, and this store may be in use on another
                self._reject_all()

    def _flushed(self, flusher: asyncio.Task[None]) -> None:
        if self._flusher is flusher:  # cancelled before its first turn
            self._reject_all()

    def _reject_all(self) -> None:
        """Tell those who are left, which there are only if the loop is ending, that nobody will write."""
        for append in (*self._under_way, *self._queue, *self._before):
            append.reject(
                StoreClosedError(append.envelopes[0].execution_id, "the event loop ended while it waited")
            )
        self._forget()

    async def _company(self) -> None:
        """Hold the first append back, as long as it may be held back and something might still join it."""
        if not self._linger_s or self._closed or self._is_full():
            return
        if any(append.alone for append in self._queue):  # nothing that comes behind it would join
            return
        loop = asyncio.get_running_loop()
        left_s = self._queue[0].arrived_s + self._linger_s - loop.time()
        if left_s <= 0:
            return
        hurry = self._hurry = loop.create_future()
        pause = asyncio.ensure_future(self._sleep(left_s))
        try:
            await asyncio.wait((hurry, pause), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not loop.is_closed():
                self._hurry = None
                pause.cancel()

    def _end_linger(self) -> None:
        if self._hurry is not None and not self._hurry.done():
            self._hurry.set_result(None)

    async def _write(self, batch: list[_Append]) -> None:
        """Append a batch, and tell its callers."""
        try:
            if len(batch) > 1 or batch[0].alone or len(batch[0].envelopes) > 1:
                await self.inner.append_batch([one for append in batch for one in append.envelopes])
            else:
                await self.inner.append(batch[0].envelopes[0])
        except Exception as error:
            if len(batch) == 1 or not self._isolate or _is_everybodys(error):
                while batch:  # emptied, since the error knows this frame
                    batch.pop().reject(error)
                return
        else:
            for append in batch:
                append.stored()
            return
        middle = len(batch) // 2
        await self._write(batch[:middle])
        await self._write(batch[middle:])


def _is_everybodys(error: Exception) -> bool:
    """Whether an error blames no event, or leaves it open whether the batch was written."""
    if isinstance(error, StorageWriteError) and error.doubtful:
        return True
    # A disk or a server: asked for each caller again, it would keep the last one waiting for all of them.
    if isinstance(error, StorageWriteError) and isinstance(error.__cause__, OSError):
        return True
    return isinstance(error, StoreBusyError | StoreClosedError | StoreFullError | StoreReadOnlyError)
