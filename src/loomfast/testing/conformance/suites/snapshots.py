"""Guarantees 12 to 15: snapshots are durable, never ahead of their log, and found out when damaged."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from loomfast._core.snapshots import Snapshot, snapshot_of, state_of
from loomfast._errors import BadSnapshotError, BeyondLogError, SnapshotNeededError, UnknownExecutionError
from loomfast._kernels import fold_events
from loomfast.stores import EventStore
from loomfast.testing.conformance._suite import Conformance, guarantee
from loomfast.testing.conformance.logs import event, log

EVENTS = log("x", 20)


def at(sequence: int) -> Snapshot:
    """Return the snapshot of `EVENTS` at a sequence."""
    return snapshot_of(fold_events(None, EVENTS[: sequence + 1]))


async def filled(store: EventStore, *sequences: int) -> None:
    """Append `EVENTS`, and save snapshots at these sequences."""
    await store.append_batch(EVENTS)
    for sequence in sequences:
        await store.snapshots.save(at(sequence))


async def kept(store: EventStore) -> list[int]:
    """Return the sequences of the snapshots that there are."""
    return [summary.sequence for summary in await store.snapshots.list("x")]


class SnapshotConformance(Conformance):
    """Snapshots kept beside the logs."""

    @guarantee(12, 14)
    async def test_the_newest_snapshot_up_to_a_bound_comes_back_as_it_was(self) -> None:
        async with self.open_store() as store:
            await filled(store, 12, 3, 7)
            for at_most, found in ((None, 12), (12, 12), (11, 7), (3, 3), (2**40, 12)):
                snapshot = await store.snapshots.latest("x", at_most)
                assert snapshot == at(found)
                assert state_of(snapshot) == fold_events(None, EVENTS[: found + 1])
            assert await store.snapshots.latest("x", 2) is None
            assert await store.snapshots.latest("x", -1) is None
            assert await store.snapshots.latest("y") is None

    @guarantee(12)
    async def test_the_snapshots_of_an_execution_are_listed_oldest_first(self) -> None:
        async with self.open_store() as store:
            await filled(store, 12, 3, 7)
            await store.append(event("y", 0))
            await store.snapshots.save(snapshot_of(fold_events(None, [event("y", 0)])))
            assert await store.snapshots.list("x") == [
                ("x", n, "1.19.0", len(at(n).body)) for n in (3, 7, 12)
            ]
            assert await store.snapshots.list("nobody") == []

    @guarantee(12, needs="damaged-snapshots")
    async def test_a_second_snapshot_at_a_sequence_takes_the_first_ones_place(self) -> None:
        async with self.open_store() as store:
            await filled(store, 5, 5)
            assert await kept(store) == [5]
            await self.damage_snapshot(store, dataclasses.replace(at(5), body=b"{}"))
            await store.snapshots.save(at(5))
            assert await store.snapshots.latest("x") == at(5)

    @guarantee(12)
    async def test_snapshots_below_a_sequence_can_be_removed(self) -> None:
        async with self.open_store() as store:
            await filled(store, 3, 7, 12)
            assert await store.snapshots.delete("x", -5) == 0
            assert await store.snapshots.delete("x", 3) == 0
            assert await store.snapshots.delete("x", 8) == 2
            assert await kept(store) == [12]
            assert await store.snapshots.delete("x", 2**40) == 1
            assert await store.snapshots.delete("x", 2**40) == 0
            assert await store.snapshots.delete("nobody", 5) == 0

    @guarantee(12)
    async def test_snapshots_of_odd_ids_keep_apart(self) -> None:
        async with self.open_store() as store:
            for name in ("\ud800", "é", "a\x00b", "a"):
                state = fold_events(None, [event(name, 0)])
                await store.append(event(name, 0))
                await store.snapshots.save(snapshot_of(state))
                snapshot = await store.snapshots.latest(name)
                assert snapshot is not None
                assert state_of(snapshot) == state
                assert (await store.snapshots.list(name))[0].execution_id == name
            assert await store.snapshots.verify() == []

    @guarantee(12)
    async def test_many_savers_and_appenders_share_the_store(self) -> None:
        async with self.open_store() as store:

            async def live(name: str) -> None:
                state = None
                for n in range(10):
                    events = [event(name, n)]
                    await store.append_batch(events)
                    state = fold_events(state, events)
                    await store.snapshots.save(snapshot_of(state))

            await asyncio.gather(*(live(f"x{n}") for n in range(20)))
            for n in range(20):
                assert len(await store.snapshots.list(f"x{n}")) == 10
            assert await store.snapshots.verify() == []

    @guarantee(13)
    async def test_a_snapshot_never_runs_ahead_of_its_log(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(EVENTS[:5])
            with pytest.raises(BeyondLogError) as caught:
                await store.snapshots.save(at(5))
            assert (caught.value.execution_id, caught.value.sequence, caught.value.last_sequence) == (
                self.named("x"),
                5,
                4,
            )
            await store.snapshots.save(at(4))
            await store.acquire_fence("y")
            for unknown in ("y", "z"):
                with pytest.raises(UnknownExecutionError):
                    await store.snapshots.save(snapshot_of(fold_events(None, [event(unknown, 0)])))
            assert await store.snapshots.latest("y") is None

    @guarantee(13)
    @pytest.mark.parametrize("change", [{"sequence": 6}, {"schema_version": "999"}, {"body": b"{}"}])
    async def test_what_does_not_pass_its_checksum_is_never_saved(self, change: dict[str, object]) -> None:
        async with self.open_store() as store:
            await filled(store)
            with pytest.raises(BadSnapshotError):
                await store.snapshots.save(dataclasses.replace(at(5), **change))  # type: ignore[arg-type]  # a test's
            assert await kept(store) == []

    @guarantee(14, needs="damaged-snapshots")
    async def test_a_damaged_snapshot_is_found_by_its_reader_who_falls_back(self) -> None:
        """F07: to an older snapshot, or to the log."""
        async with self.open_store() as store:
            await filled(store, 5, 12)
            bad = at(12)
            await self.damage_snapshot(
                store, dataclasses.replace(bad, body=bad.body.replace(b"running", b"runnyng"))
            )
            snapshot = await store.snapshots.latest("x")
            assert snapshot is not None
            with pytest.raises(BadSnapshotError) as caught:
                state_of(snapshot)
            assert (caught.value.execution_id, caught.value.sequence) == ("x", 12)
            older = await store.snapshots.latest("x", 11)
            assert older is not None
            assert await store.fold("x", state_of(older)) == fold_events(None, EVENTS)
            assert await store.fold("x") == fold_events(None, EVENTS)

    @guarantee(14, needs="damaged-snapshots")
    async def test_verifying_names_the_bad_ones_and_no_others(self) -> None:
        async with self.open_store() as store:
            await filled(store, 5, 9, 12)
            assert await store.snapshots.verify() == []
            await self.damage_snapshot(store, dataclasses.replace(at(9), body=b"nothing"))
            for faults in (await store.snapshots.verify(), await store.snapshots.verify("x")):
                assert [(f.execution_id, f.sequence, f.field) for f in faults] == [
                    (self.named("x"), 9, "checksum")
                ]
            assert await store.snapshots.verify("y") == []

    @guarantee(15, needs="damaged-snapshots")
    async def test_a_truncated_log_keeps_a_sound_snapshot_that_covers_its_cut(self) -> None:
        async with self.open_store() as store:
            await filled(store, 3, 9, 12)
            await store.truncate_prefix("x", 8)
            with pytest.raises(SnapshotNeededError) as caught:
                await store.snapshots.delete("x", 13)
            assert (caught.value.execution_id, caught.value.sequence) == (self.named("x"), 7)
            await self.damage_snapshot(store, dataclasses.replace(at(12), body=b"{}"))
            with pytest.raises(SnapshotNeededError):
                await store.snapshots.delete("x", 10)
            assert await kept(store) == [3, 9, 12]
            assert await store.snapshots.delete("x", 9) == 1
            snapshot = await store.snapshots.latest("x", 11)
            assert snapshot is not None
            assert await store.fold("x", state_of(snapshot)) == fold_events(None, EVENTS)

    @guarantee(12, needs="restart")
    async def test_snapshots_survive_a_restart(self) -> None:
        async with self.open_store() as store:
            await filled(store, 3, 12)
            await store.snapshots.delete("x", 4)
        async with self.open_store() as store:
            assert await kept(store) == [12]
            assert await store.snapshots.latest("x") == at(12)
