"""Guarantee 7: one total order, in which nothing appears behind a reader's back."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from loomfast._errors import BadInputError, ConflictError, StoreReadError
from loomfast._kernels import Envelope
from loomfast.stores import EventStore, PositionedEvent
from loomfast.testing.conformance._suite import Conformance, guarantee
from loomfast.testing.conformance.logs import event, log


async def all_pages(store: EventStore, limit: int, after: int = 0) -> list[PositionedEvent]:
    """Return everything behind `after`, read in pages."""
    read: list[PositionedEvent] = []
    while page := await store.read_all(read[-1].position if read else after, limit=limit):
        assert len(page) <= limit
        read += page
    return read


# How many events each of many writers appends.
_EACH: Final = 128


class CatchUpConformance(Conformance):
    """Reading all logs in one order."""

    @guarantee(7)
    async def test_read_all_pages_through_every_event_once_in_commit_order(self) -> None:
        async with self.open_store() as store:
            await asyncio.gather(*(store.append_batch(log(f"x{n}", 5)) for n in range(30)))
            await store.append(event("last", 0))
            read = await all_pages(store, 7)
            positions = [placed.position for placed in read]
            assert positions == sorted(set(positions))
            assert positions[0] > 0
            assert len({placed.event.id for placed in read}) == len(read) == 151
            assert read[-1].event.id == "last-0"
            for n in range(30):
                assert [p.event for p in read if p.event.execution_id == f"x{n}"] == log(f"x{n}", 5)
            assert read == await store.read_all() == await all_pages(store, 1)

    @guarantee(7)
    async def test_a_position_is_where_reading_goes_on(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(log("x", 10))
            read = await store.read_all()
            for n, placed in enumerate(read):
                assert await store.read_all(placed.position) == read[n + 1 :]
            assert await store.read_all(read[-1].position) == []
            assert await store.read_all(2**40) == []

    @guarantee(7)
    async def test_a_refused_append_takes_no_place_and_holds_up_nobody(self) -> None:
        """F24: a hole that never fills is not waited for."""
        async with self.open_store() as store:
            await store.append(event("x", 0))
            with pytest.raises(ConflictError):
                await store.append_batch([event("y", 0), event("x", 0)])
            await store.append(event("x", 1))
            assert [placed.event.id for placed in await store.read_all()] == ["x-0", "x-1"]

    @guarantee(7)
    async def test_a_reader_beside_many_writers_sees_every_event_once(self) -> None:
        """F24."""
        async with self.open_store() as store:
            await _followed(store, [store])

    @guarantee(7, needs="sharing")
    async def test_a_reader_beside_writers_at_several_openings_sees_every_event_once(self) -> None:
        """F24: what commits late is not passed over."""
        async with self.open_store() as one, self.open_store() as two, self.open_store() as three:
            await _followed(one, [one, two, three])

    @guarantee(7, needs="restart")
    async def test_positions_are_the_same_after_a_restart(self) -> None:
        async with self.open_store() as store:
            await store.append_batch([*log("y", 2), *log("x", 2)])
            await store.append_batch(log("y", 3, 2))
            await store.append_batch(log("x", 3, 2))
            read = await store.read_all()
        async with self.open_store() as store:
            await store.append(event("z", 0))
            again = await store.read_all()
            assert again[:-1] == read
            assert [placed.event.id for placed in await store.read_all(read[-1].position)] == ["z-0"]

    @guarantee(7)
    async def test_pages_that_cannot_be_are_refused(self) -> None:
        async with self.open_store() as store:
            for after, limit in ((-1, 1), (0, 0), (0, -1)):
                with pytest.raises(BadInputError):
                    await store.read_all(after, limit=limit)
                with pytest.raises(BadInputError):
                    await store.list_executions(after=after, limit=limit)

    @guarantee(7, needs="damaged-events")
    async def test_a_damaged_event_ends_the_page_before_it_and_says_where_it_is(self) -> None:
        """F15: what cannot be read concerns its own execution; a reader can go on behind it."""
        async with self.open_store() as store:
            await store.append_batch(log("x", 3))
            await store.append_batch(log("bad", 3))
            await store.append_batch(log("y", 3))
            sound = await store.read_all()
            await self.damage_event(store, "bad", 1)
            assert await store.read_all() == sound[:4]
            with pytest.raises(StoreReadError) as caught:
                await store.read_all(sound[3].position)
            assert (caught.value.execution_id, caught.value.position) == (
                self.named("bad"),
                sound[4].position,
            )
            assert await store.read_all(sound[4].position) == sound[5:]
            with pytest.raises(StoreReadError) as caught:
                await store.read("bad")
            assert caught.value.execution_id == self.named("bad")
            assert await store.read("y") == log("y", 3)
            assert len(await store.list_executions()) == 3


async def _append_in_the_end(store: EventStore, batch: list[Envelope]) -> None:
    """Append a batch that nothing is in the way of; where it is rejected with others, try again."""
    for _ in range(100):
        try:
            await store.append_batch(batch)
            return
        except ConflictError:
            await asyncio.sleep(0)
    raise AssertionError(f"{batch[0].id} was rejected a hundred times, and nothing is in its way")


async def _followed(reader: EventStore, writers: list[EventStore]) -> None:
    """Let 16 writers append, some in vain, while a reader follows; it must see each event once, in order.

    Batches are of very different sizes, so that the small ones have the time to overtake the large ones.
    """
    await reader.append(event("taken", 0))

    async def write(n: int) -> None:
        store = writers[n % len(writers)]
        size = (2, 1, _EACH, 16)[n % 4]
        for first in range(0, _EACH, size):
            await _append_in_the_end(store, [event(f"x{n}", first + k) for k in range(size)])
            if n % 4 == 0:
                with pytest.raises(ConflictError):
                    await store.append_batch([event(f"x{n}", first + size), event("taken", 0)])

    read: list[PositionedEvent] = []
    writing = asyncio.gather(*(write(n) for n in range(16)))
    while True:
        over = writing.done()
        page = await reader.read_all(read[-1].position if read else 0, limit=50)
        read += page
        if over and not page:
            break
        await asyncio.sleep(0)
    await writing
    positions = [placed.position for placed in read]
    assert positions == sorted(set(positions))
    for n in range(16):
        assert [p.event.sequence for p in read if p.event.execution_id == f"x{n}"] == list(range(_EACH))
    assert len(read) == 16 * _EACH + 1
