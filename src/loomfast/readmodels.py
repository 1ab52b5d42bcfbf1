"""Catch-up reads: following the store's total order, and read models that are kept up to date by it.

What lives here: `CatchUpReader`, `ReadModel`, and `FilePosition`, a place to keep how far one has come. What
must not: what a read model is made of, and anything that a run waits for.

This is what a consumer that acts only on durable facts uses in the place of `on_event` (ADR 0103, D6). A
reader holds a position and at most one page; it is registered nowhere, so there is nothing to give back when
it is dropped, and a slow one holds up nobody. What appears in the order appears behind every position that
was ever read (guarantee 7), so reading on from a position has neither gap nor repeat.

Invariant: `CatchUpReader.position` is that of the event it handed out last, or passed over as unreadable, so
that a new reader behind it goes on with the next one.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, Self

from loomfast._core.arguments import count_argument
from loomfast._errors import BadInputError, StoreReadError
from loomfast._runtime.clock import Clock, SystemClock, done_within
from loomfast.stores import EventStore, PositionedEvent
from loomfast.stores._spi_arguments import position_of


class CatchUpReader:
    """Iterates over every event of a store behind `after`, in the total order, and waits for more.

        async for position, event in CatchUpReader(store, after=seen):
            ...

    `page_events` bounds what is held at once. `wait=False` ends the iteration where the store ends now;
    otherwise the store is looked at every `poll_s` seconds of `clock`, and at once after `wake`, which costs
    nothing: `WorkflowRuntime(on_commit=lambda event: reader.wake())` for what is written in this process.

    An event that is damaged raises `StoreReadError`, with its `position`. With `on_unreadable` that error is
    given to it instead, and the reader goes on behind the event. Other errors are the store's, and the reader
    can be asked again after any of them, as after a cancellation. What was truncated before it was read is
    passed over in silence, as by `read_all`: cut logs behind your readers. One reader belongs to one task.
    F24, F38.
    """

    def __init__(
        self,
        store: EventStore,
        *,
        after: int = 0,
        page_events: int = 500,
        wait: bool = True,
        poll_s: float = 0.25,
        clock: Clock | None = None,
        on_unreadable: Callable[[StoreReadError], object] | None = None,
    ) -> None:
        count_argument("page_events", page_events)
        if not isinstance(poll_s, int | float) or not poll_s > 0:
            raise BadInputError(f"poll_s={poll_s!r}: must be a number of seconds above 0")
        self.position = after = position_of(after)
        self._store = store
        self._page_events = page_events
        self._wait = wait
        self._poll_s = poll_s
        self._clock = clock or SystemClock()
        self._on_unreadable = on_unreadable
        self._page: deque[PositionedEvent] = deque()
        self._read = after  # up to where the store has been read
        self._woken = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PositionedEvent:
        while not self._page:
            self._woken.clear()
            await self._fetch()
            if not self._page:
                if not self._wait:
                    raise StopAsyncIteration
                await self._pause()
        placed = self._page.popleft()
        self.position = placed.position
        return placed

    @property
    def page_left(self) -> int:
        """How many events have been read from the store and not handed out yet."""
        return len(self._page)

    def wake(self) -> None:
        """Look at the store now. Call it on the reader's event loop."""
        self._woken.set()

    async def _fetch(self) -> None:
        """Read the next page; an empty one is the end."""
        while True:
            try:
                page = await self._store.read_all(self._read, limit=self._page_events)
            except StoreReadError as error:
                if self._on_unreadable is None or error.position is None:
                    raise
                self._on_unreadable(error)
                self._read = self.position = error.position
                continue
            if page:
                self._read = page[-1].position
                self._page.extend(page)
            return

    async def _pause(self) -> None:
        woken = asyncio.ensure_future(self._woken.wait())
        try:
            await done_within(self._clock, self._poll_s, woken)
        finally:
            woken.cancel()


class PositionKeeper(Protocol):
    """Where a read model's position is kept while its process is down."""

    async def load(self) -> int:
        """Return the position that was saved last, 0 if none was."""
        ...

    async def save(self, position: int) -> None:
        """Keep a position; it is durable when this returns."""
        ...


class FilePosition:
    """A position in a file, which is replaced whole: a crash leaves the old one or the new one.

    One process at a time. `load` raises `BadInputError` for a file that holds something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    async def load(self) -> int:
        return await asyncio.to_thread(self._load)

    async def save(self, position: int) -> None:
        await asyncio.to_thread(self._save, position)

    def _load(self) -> int:
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        if not text.endswith(b"\n") or not text[:-1].isdigit():
            raise BadInputError(f"{self.path}: holds no position of a read model")
        return int(text)

    def _save(self, position: int) -> None:
        beside = self.path.with_name(self.path.name + ".new")
        with open(beside, "wb") as file:
            file.write(b"%d\n" % position)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class ReadModel:
    """Applies every durable event to something of yours, each at least once, in order, across restarts.

    `apply` is called with a `PositionedEvent` and may be a coroutine function. `position` keeps how far it
    has come: it is saved after every page (`page_events`), so a crash repeats at most a page. Make `apply`
    indifferent to repeats, or keep the position yourself, in the transaction that applies the event, and give
    a `position` whose `load` reads it there and whose `save` does nothing: then each event is applied once.
    The other options are those of `CatchUpReader`.
    """

    def __init__(
        self,
        store: EventStore,
        apply: Callable[[PositionedEvent], Awaitable[Any] | Any],
        position: PositionKeeper,
        *,
        page_events: int = 500,
        poll_s: float = 0.25,
        clock: Clock | None = None,
        on_unreadable: Callable[[StoreReadError], object] | None = None,
    ) -> None:
        self._store = store
        self._apply = apply
        self._position = position
        self._page_events = page_events
        self._poll_s = poll_s
        self._clock = clock
        self._on_unreadable = on_unreadable
        self._reader: CatchUpReader | None = None

    async def catch_up(self) -> int:
        """Apply what the store holds now, and return the position reached."""
        return await self._follow(wait=False)

    async def run(self) -> None:
        """Apply what the store holds and what is added to it, until cancelled.

        Raises what `apply`, `position` and the store raise; what was applied before is saved first, so that a
        new `run` goes on with the event that failed.
        """
        await self._follow(wait=True)

    def wake(self) -> None:
        """Look at the store now, if `run` waits. Call it on the loop that `run` is on."""
        if self._reader is not None:
            self._reader.wake()

    async def _follow(self, *, wait: bool) -> int:
        saved = await self._position.load()
        reader = self._reader = CatchUpReader(
            self._store,
            after=saved,
            page_events=self._page_events,
            wait=wait,
            poll_s=self._poll_s,
            clock=self._clock,
            on_unreadable=self._on_unreadable,
        )
        applied = saved
        try:
            async for placed in reader:
                result = self._apply(placed)
                if inspect.isawaitable(result):
                    await result
                applied = placed.position
                if not reader.page_left:
                    await self._position.save(applied)
                    saved = applied
        except Exception:
            if applied != saved:
                await self._position.save(applied)
            raise
        finally:
            self._reader = None
        if reader.position != saved:
            await self._position.save(reader.position)
        return reader.position
