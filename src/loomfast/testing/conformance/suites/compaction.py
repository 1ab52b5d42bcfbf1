"""Guarantees 9 and 10: what may be cut from the front of a log, and that what is gone is named."""

from __future__ import annotations

import dataclasses

import pytest

from loomfast._core.snapshots import snapshot_of, state_of
from loomfast._errors import (
    BadInputError,
    DuplicateSequenceError,
    PrefixTruncatedError,
    SnapshotNeededError,
    StaleFenceError,
    UnknownExecutionError,
)
from loomfast._kernels import Envelope, fold_events
from loomfast.stores import EventStore, PositionedEvent
from loomfast.testing.conformance._suite import Conformance, guarantee
from loomfast.testing.conformance.logs import GATED, event, log


async def save(store: EventStore, events: list[Envelope], at: int) -> None:
    """Save a snapshot of what a log folds to at a sequence."""
    await store.snapshots.save(snapshot_of(fold_events(None, events[: at + 1])))


async def truncated(store: EventStore, length: int, before: int) -> list[Envelope]:
    """Append a log of `length` and cut it; return the log as it was."""
    events = log("x", length)
    await store.append_batch(events)
    await save(store, events, before - 1)
    assert await store.truncate_prefix("x", before) == before - 1
    return events


class CompactionConformance(Conformance):
    """Cutting the front of a log."""

    @guarantee(9)
    @pytest.mark.parametrize("sequence", range(11))
    async def test_a_cut_needs_a_snapshot_that_covers_it(self, sequence: int) -> None:
        async with self.open_store() as store:
            events = log("x", 11)
            await store.append_batch(events)
            with pytest.raises(SnapshotNeededError) as caught:
                await store.truncate_prefix("x", 6)
            assert (caught.value.execution_id, caught.value.sequence) == (self.named("x"), 5)
            await save(store, events, sequence)
            if sequence < 5:
                with pytest.raises(SnapshotNeededError):
                    await store.truncate_prefix("x", 6)
                assert await store.read("x") == events
            else:
                assert await store.truncate_prefix("x", 6) == 5
                assert await store.read_from("x", 6) == events[6:]

    @guarantee(9)
    async def test_a_truncated_execution_still_exists_and_goes_on_where_it_was(self) -> None:
        async with self.open_store() as store:
            events = await truncated(store, 10, 8)
            assert await store.read_range("x", 0, 0) == events[:1]
            assert await store.last_sequence("x") == 9
            assert [(s.execution_id, s.flow_id, s.last_sequence) for s in await store.list_executions()] == [
                ("x", "guard", 9)
            ]
            for taken in (0, 1, 7, 9):
                with pytest.raises(DuplicateSequenceError):
                    await store.append(event("x", taken))
            more = log("x", 3, first=10)
            await store.append_batch(more)
            assert await store.read_from("x", 8) == events[8:] + more

    @guarantee(9)
    @pytest.mark.parametrize("before", [9, 10, 11, 2**40])
    async def test_the_newest_event_is_never_removed(self, before: int) -> None:
        async with self.open_store() as store:
            events = log("x", 10)
            await store.append_batch(events)
            await save(store, events, 9)
            newest = (await store.read_all())[-1]
            await store.truncate_prefix("x", before)
            assert await store.read_from("x", 9) == events[9:]
            assert (await store.read_all())[-1] == newest
            await store.append(event("y", 0))
            assert [p.event.id for p in await store.read_all(newest.position)] == ["y-0"]

    @guarantee(9)
    async def test_cutting_again_removes_what_is_left_and_nothing_twice(self) -> None:
        async with self.open_store() as store:
            events = await truncated(store, 10, 4)
            await save(store, events, 8)
            assert await store.truncate_prefix("x", 4) == 0
            assert await store.truncate_prefix("x", 0) == 0
            assert await store.truncate_prefix("x", 2) == 0
            assert await store.truncate_prefix("x", 7) == 3
            assert await store.truncate_prefix("x", 7) == 0
            assert await store.read_from("x", 7) == events[7:]

    @guarantee(9)
    async def test_cuts_that_cannot_be_are_refused(self) -> None:
        async with self.open_store() as store:
            with pytest.raises(UnknownExecutionError):
                await store.truncate_prefix("nobody", 3)
            await store.acquire_fence("fenced")
            with pytest.raises(UnknownExecutionError):
                await store.truncate_prefix("fenced", 3)
            with pytest.raises(BadInputError):
                await store.truncate_prefix("nobody", -1)
            await store.append(event("x", 0))
            assert await store.truncate_prefix("x", 1) == 0
            assert await store.truncate_prefix("x", 5) == 0

    @guarantee(4, 9)
    async def test_neither_fences_nor_other_executions_notice_a_cut(self) -> None:
        async with self.open_store() as store:
            other = log("y", 10)
            await store.append_batch(other)
            events = log("x", 10)
            await store.append_batch(events)
            token = await store.acquire_fence("x")
            await save(store, events, 9)
            await store.truncate_prefix("x", 6)
            with pytest.raises(StaleFenceError):
                await store.append(event("x", 10))
            await store.append(event("x", 10, fence=token))
            assert await store.read("y") == other

    @guarantee(9, 15, needs="damaged-snapshots")
    async def test_a_snapshot_that_is_damaged_covers_no_cut(self) -> None:
        async with self.open_store() as store:
            events = log("x", 10)
            await store.append_batch(events)
            sound = snapshot_of(fold_events(None, events))
            await store.snapshots.save(sound)
            await self.damage_snapshot(store, dataclasses.replace(sound, body=sound.body + b" "))
            with pytest.raises(SnapshotNeededError):
                await store.truncate_prefix("x", 5)
            await save(store, events, 6)
            assert await store.truncate_prefix("x", 5) == 4

    @guarantee(10)
    async def test_a_read_that_needs_what_is_gone_names_the_first_available(self) -> None:
        async with self.open_store() as store:
            events = await truncated(store, 10, 6)
            ranges = ((0, None, 1), (0, 1, 1), (1, 1, 1), (3, 7, 3), (5, 5, 5), (-4, 9, 1))
            for first, last, missing in ranges:
                with pytest.raises(PrefixTruncatedError) as caught:
                    await store.read_range("x", first, last)
                error = caught.value
                assert (error.execution_id, error.sequence, error.first_available) == (
                    self.named("x"),
                    missing,
                    6,
                )
            with pytest.raises(PrefixTruncatedError):
                await store.read("x")
            assert await store.read_range("x", -5, 0) == events[:1]
            assert await store.read_range("x", 0, -1) == []
            assert await store.read_range("x", 5, 4) == []
            assert await store.read_range("x", 6, 6) == events[6:7]
            assert await store.read_range("x", 6, None) == events[6:]
            assert await store.read_range("x", 7, 3) == []
            assert await store.read_range("x", 8, 2**40) == events[8:]
            assert await store.read_range("x", 10, None) == []

    @guarantee(10)
    async def test_a_fold_goes_on_from_a_snapshot_and_from_nothing_older(self) -> None:
        async with self.open_store() as store:
            events = await truncated(store, 30, 20)
            await save(store, events, 24)
            whole = fold_events(None, events)
            for state in (None, fold_events(None, events[:1]), fold_events(None, events[:19])):
                with pytest.raises(PrefixTruncatedError) as caught:
                    await store.fold("x", state)
                assert caught.value.first_available == 20
            for at_most in (19, 24, None):
                snapshot = await store.snapshots.latest("x", at_most)
                assert snapshot is not None
                assert await store.fold("x", state_of(snapshot)) == whole
            assert await store.fold("x", whole) == whole

    @guarantee(10)
    @pytest.mark.parametrize("sequence", range(len(GATED)))
    async def test_snapshot_and_rest_fold_to_what_the_log_did_wherever_it_is_cut(self, sequence: int) -> None:
        async with self.open_store() as store:
            await store.append_batch(GATED)
            await save(store, GATED, sequence)
            await store.truncate_prefix("s", sequence + 1)
            snapshot = await store.snapshots.latest("s")
            assert snapshot is not None
            assert await store.fold("s", state_of(snapshot)) == fold_events(None, GATED)

    @guarantee(7, 10)
    async def test_the_total_order_keeps_the_positions_of_what_is_left(self) -> None:
        async with self.open_store() as store:
            for n in range(10):
                await store.append_batch([event("x", n), event("y", n)])
            everything = await store.read_all()
            await save(store, log("x", 10), 9)
            await store.truncate_prefix("x", 7)
            left = [p for p in everything if p.event.execution_id == "y" or p.event.sequence in (0, 7, 8, 9)]
            assert await store.read_all() == left
            read: list[PositionedEvent] = []
            while page := await store.read_all(read[-1].position if read else 0, limit=3):
                read += page
            assert read == left
            await store.append(event("z", 0))
            assert [p.event.id for p in await store.read_all(read[-1].position)] == ["z-0"]

    @guarantee(9, 10)
    async def test_compacting_every_so_often_keeps_what_a_resume_reads_small(self) -> None:
        """F25: with a snapshot and a cut every K events a resume reads at most K + 1."""
        async with self.open_store() as store:
            state = None
            for first in range(0, 1_000, 50):
                events = log("x", 50, first)
                await store.append_batch(events)
                state = fold_events(state, events)
                await store.snapshots.save(snapshot_of(state))
                await store.truncate_prefix("x", first + 50)
                await store.snapshots.delete("x", first + 49)
            await store.append_batch(log("x", 20, 1_000))
            snapshot = await store.snapshots.latest("x")
            assert snapshot is not None
            assert len(await store.read_from("x", snapshot.sequence + 1)) == 20
            assert len(await store.read_all()) == 22  # the start, the newest that was cut at, and the rest
            assert await store.fold("x", state_of(snapshot)) == fold_events(None, log("x", 1_020))

    @guarantee(9, 10, needs="restart")
    async def test_a_cut_survives_a_restart(self) -> None:
        async with self.open_store() as store:
            events = await truncated(store, 10, 6)
            order = await store.read_all()
        async with self.open_store() as store:
            with pytest.raises(PrefixTruncatedError):
                await store.read("x")
            assert await store.read_range("x", 0, 0) == events[:1]
            assert await store.read_from("x", 6) == events[6:]
            assert await store.read_all() == order
            with pytest.raises(DuplicateSequenceError):
                await store.append(event("x", 3))
            await store.append(event("x", 10))
