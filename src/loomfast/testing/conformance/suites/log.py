"""Guarantees 1 to 3: batches are whole, what returned is seen, and a sequence is taken once."""

from __future__ import annotations

import asyncio

import pytest

from loomfast._errors import DuplicateSequenceError, MalformedEventError
from loomfast._kernels import Envelope
from loomfast.stores import EventStore
from loomfast.testing.conformance._suite import Conformance, guarantee
from loomfast.testing.conformance.logs import event, log


class LogConformance(Conformance):
    """Appending, and reading one log."""

    @guarantee(1)
    async def test_a_batch_of_any_size_is_stored_whole_and_in_order(self) -> None:
        """F23."""
        async with self.open_store() as store:
            after = 0
            for size in self.sizes:
                batch = log(f"x{size}", size)
                await store.append_batch(batch)
                assert await store.read(f"x{size}") == batch
                placed = await store.read_all(after, limit=size + 1)
                assert [p.event for p in placed] == batch
                after = placed[-1].position

    @guarantee(3)
    async def test_ids_that_look_alike_are_different_executions(self) -> None:
        long = "i" * 1_000
        ids = [
            "a",
            "A",
            "a ",
            " a",
            "a\x00",
            "\u00e9",
            "e\u0301",
            "\ud800",
            "\ud801",
            f"{long}1",
            f"{long}2",
        ]
        async with self.open_store() as store:
            for n, name in enumerate(ids):
                await store.append_batch(log(name, n + 1))
            for n, name in enumerate(ids):
                assert await store.read(name) == log(name, n + 1)
                assert await store.last_sequence(name) == n
            assert [one.execution_id for one in await store.list_executions()] == ids

    @guarantee(1)
    async def test_a_conflict_on_the_last_event_of_a_batch_leaves_none_of_it(self) -> None:
        """F23."""
        async with self.open_store() as store:
            await store.append(event("taken", 0))
            for size in self.sizes:
                with pytest.raises(DuplicateSequenceError) as caught:
                    await store.append_batch([*log("x", size - 1), event("taken", 0)])
                assert (caught.value.execution_id, caught.value.sequence) == (self.named("taken"), 0)
                assert await store.read("x") == []
                assert await store.last_sequence("x") is None
                assert len(await store.read_all()) == 1
            assert [summary.execution_id for summary in await store.list_executions()] == ["taken"]
            await store.append_batch(log("x", 3))

    @guarantee(1)
    async def test_a_batch_may_hold_several_executions_interleaved(self) -> None:
        async with self.open_store() as store:
            batch = [event("a", 0), event("b", 0), event("a", 1), event("b", 1)]
            await store.append_batch(batch)
            assert [p.event for p in await store.read_all()] == batch
            assert await store.read("b") == [batch[1], batch[3]]

    @guarantee(1, 3)
    async def test_a_batch_that_repeats_a_sequence_within_itself_is_refused_whole(self) -> None:
        async with self.open_store() as store:
            with pytest.raises(DuplicateSequenceError):
                await store.append_batch([event("x", 0), event("x", 1), event("x", 1)])
            assert await store.read("x") == []

    @guarantee(1)
    async def test_an_empty_batch_is_no_append(self) -> None:
        async with self.open_store() as store:
            await store.append_batch([])
            assert await store.read_all() == []

    @guarantee(2)
    async def test_an_append_that_returned_is_seen_by_every_kind_of_read(self) -> None:
        async with self.open_store() as store:
            after = 0
            for n in range(20):
                await store.append(event("x", n))
                assert (await store.read_from("x", n))[0].sequence == n
                assert await store.last_sequence("x") == n
                [placed] = await store.read_all(after)
                assert placed.event.sequence == n
                after = placed.position
                assert (await store.list_executions())[0].last_sequence == n
                state = await store.fold("x")
                assert state is not None
                assert state.sequence == n

    @guarantee(1, 2)
    async def test_a_write_that_is_not_waited_for_is_an_append_like_others(self) -> None:
        async with self.open_store() as store:
            begun = [store.write(tuple(log("x", 3))), store.write((event("y", 0),))]
            for answer in begun:
                assert answer is None or await answer is None
            assert await store.read("x") == log("x", 3)
            assert await store.last_sequence("y") == 0

    @guarantee(3)
    async def test_a_write_that_is_refused_says_so_and_leaves_nothing(self) -> None:
        async with self.open_store() as store:
            await store.append(event("taken", 0))
            for batch in ((event("x", 0), event("taken", 0)), (event("taken", 0),)):
                refused = await _refusal(store, batch)
                assert isinstance(refused, DuplicateSequenceError)
                assert (refused.execution_id, refused.sequence) == (self.named("taken"), 0)
            assert await store.last_sequence("x") is None

    @guarantee(2)
    async def test_ranges_are_inclusive_and_may_lie_outside_the_log(self) -> None:
        async with self.open_store() as store:
            events = log("x", 10)
            await store.append_batch([*events, *log("y", 3)])
            assert await store.read_range("x", 2, 4) == events[2:5]
            assert await store.read_range("x", -5, 0) == events[:1]
            assert await store.read_range("x", 8, 2**40) == events[8:]
            assert await store.read_range("x", 5, 4) == []
            assert await store.read_range("x", 0, -1) == []
            assert await store.read_from("x", 10) == []
            assert await store.read_from("x", 2**32) == []
            assert await store.read("unknown") == []

    @guarantee(2, needs="restart")
    async def test_what_returned_is_there_after_a_restart_and_nothing_that_was_refused(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(log("x", 30))
            await store.append(event("y", 0))
            with pytest.raises(DuplicateSequenceError):
                await store.append_batch([event("z", 0), event("y", 0)])
            before = [await store.read_all(), await store.list_executions(), await store.fold("x")]
        async with self.open_store() as store:
            assert [await store.read_all(), await store.list_executions(), await store.fold("x")] == before
            assert await store.read("x") == log("x", 30)
            await store.append(event("x", 30))

    @guarantee(3)
    @pytest.mark.parametrize("sequence", [2, 7])
    async def test_an_event_that_would_leave_a_gap_is_refused(self, sequence: int) -> None:
        async with self.open_store() as store:
            await store.append(event("x", 0))
            with pytest.raises(MalformedEventError) as caught:
                await store.append(event("x", sequence))
            assert (caught.value.execution_id, caught.value.sequence) == (self.named("x"), sequence)
            with pytest.raises(MalformedEventError):
                await store.append(event("fresh", 1))
            assert await store.last_sequence("x") == 0
            assert await store.last_sequence("fresh") is None

    @guarantee(3, needs="isolation")
    async def test_of_many_appends_of_one_sequence_exactly_one_succeeds(self) -> None:
        async with self.open_store() as store:
            results = await asyncio.gather(
                *(store.append(event("x", 0)) for _ in range(50)), return_exceptions=True
            )
            assert results.count(None) == 1
            assert all(r is None or isinstance(r, DuplicateSequenceError) for r in results)
            assert len(await store.read("x")) == 1

    @guarantee(3)
    async def test_of_many_appends_of_one_sequence_never_two_succeed(self) -> None:
        async with self.open_store() as store:
            for n in range(10):
                results = await asyncio.gather(
                    *(store.append(event("x", n, payload={"by": by})) for by in range(8)),
                    return_exceptions=True,
                )
                won = [by for by, result in enumerate(results) if result is None]
                if not won:  # they were rejected together; what was first is then for a repeat to say
                    await store.append(event("x", n, payload={"by": 0}))
                    won = [0]
                assert len(won) == 1
                [kept] = await store.read_from("x", n)
                assert n == 0 or kept.payload == {"by": won[0]}

    @guarantee(3, needs="sharing")
    async def test_two_openings_never_both_take_a_sequence(self) -> None:
        async with self.open_store() as one, self.open_store() as other:
            for n in range(10):
                results = await asyncio.gather(
                    *(store.append(event("x", n)) for store in (one, other)), return_exceptions=True
                )
                assert [type(result) for result in results if result is not None] == [DuplicateSequenceError]
            assert await one.read("x") == await other.read("x")
            assert await other.last_sequence("x") == 9

    @guarantee(3, needs="isolation")
    async def test_a_conflict_rejects_only_the_caller_it_belongs_to(self) -> None:
        async with self.open_store() as store:
            await store.append(event("x30", 0))
            results = await asyncio.gather(
                *(store.append_batch(log(f"x{n}", 3)) for n in range(64)), return_exceptions=True
            )
            assert [n for n, result in enumerate(results) if result is not None] == [30]
            assert isinstance(results[30], DuplicateSequenceError)
            assert len(await store.read_all()) == 1 + 63 * 3

    @guarantee(3)
    async def test_sequence_numbers_repeat_across_executions(self) -> None:
        async with self.open_store() as store:
            await store.append_batch([event("a", 0), event("a-0", 0), event("a-0-0", 0)])
            assert {p.event.id for p in await store.read_all()} == {"a-0", "a-0-0", "a-0-0-0"}


async def _refusal(store: EventStore, batch: tuple[Envelope, ...]) -> Exception | None:
    """Return what a write that is not waited for is refused with, at once or later."""
    try:
        answer = store.write(batch)
    except Exception as error:
        return error
    return None if answer is None else await answer
