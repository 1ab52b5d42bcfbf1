"""Guarantee 24: schedules, of which two writers never both replace the same version."""

from __future__ import annotations

import asyncio

import pytest

from loomfast._errors import BadInputError
from loomfast.stores import EventStore, ScheduleRow
from loomfast.testing.conformance._suite import Conformance, guarantee


async def put(store: EventStore, schedule: ScheduleRow) -> ScheduleRow:
    """Put a schedule that nothing is in the way of."""
    kept = await store.timers.put(schedule)
    assert kept is not None
    assert kept == schedule._replace(version=kept.version)
    assert kept.version > schedule.version
    return kept


class ScheduleConformance(Conformance):
    """Schedules."""

    @guarantee(24)
    async def test_a_schedule_is_kept_replaced_and_forgotten(self) -> None:
        async with self.open_store() as store:
            assert await store.timers.get("s") is None
            kept = await put(store, ScheduleRow("s", b'{"a": 1, "b": "\\ud800"}', 5_000))
            assert await store.timers.get("s") == kept
            paused = await put(store, kept._replace(body=b"{}", next_ms=None))
            assert await store.timers.get("s") == paused
            assert await store.timers.delete("s") is True
            assert await store.timers.delete("s") is False
            assert await store.timers.get("s") is None
            await put(store, ScheduleRow("s", b"{}", None))

    @guarantee(24)
    async def test_an_older_version_replaces_nothing(self) -> None:
        async with self.open_store() as store:
            first = await put(store, ScheduleRow("s", b"1", 1))
            second = await put(store, first._replace(body=b"2"))
            for stale in (ScheduleRow("s", b"3", 3), first._replace(body=b"3"), second._replace(version=99)):
                assert await store.timers.put(stale) is None
            assert await store.timers.get("s") == second
            assert await store.timers.put(ScheduleRow("t", b"4", 4, version=1)) is None  # 0 is for none
            assert await store.timers.get("t") is None

    @guarantee(24)
    async def test_of_many_that_replace_one_version_exactly_one_succeeds(self) -> None:
        async with self.open_store() as store:
            kept = await put(store, ScheduleRow("s", b"0", 0))
            for _ in range(5):
                results = await asyncio.gather(
                    *(store.timers.put(kept._replace(next_ms=n)) for n in range(20))
                )
                [kept] = [result for result in results if result is not None]
                assert await store.timers.get("s") == kept

    @guarantee(24)
    async def test_schedules_that_are_due_come_earliest_first(self) -> None:
        async with self.open_store() as store:
            for name, next_ms in (("b", 3_000), ("a", 3_000), ("c", 1_000), ("d", None), ("e", 9_000)):
                await put(store, ScheduleRow(name, b"{}", next_ms))
            due = await store.timers.due_schedules(3_000)
            assert [schedule.schedule_id for schedule in due] == ["c", "a", "b"]
            assert await store.timers.due_schedules(3_000, limit=1) == due[:1]
            assert await store.timers.due_schedules(999) == []
            await put(store, due[0]._replace(next_ms=4_000))
            assert [s.schedule_id for s in await store.timers.due_schedules(3_000)] == ["a", "b"]

    @guarantee(24)
    async def test_schedules_that_are_due_are_paged_and_those_of_one_time_stand_by_code_point(self) -> None:
        async with self.open_store() as store:
            names = ["\U0001f600", "\ud800", "a", "é", "a\x00b", "1:a:b", *(f"s{n}" for n in range(14))]
            for n, name in enumerate(names):
                await put(store, ScheduleRow(name, b"{}", 1_000 * (1 + n * 7 % 4)))
            await put(store, ScheduleRow("paused", b"{}", None))
            kept = [schedule for schedule in await store.timers.list() if schedule.next_ms is not None]
            assert len(kept) == len(names)
            expected = sorted(kept, key=lambda one: (one.next_ms, one.schedule_id))
            assert await store.timers.due_schedules(9_999) == expected
            for limit in (1, 3, 20, 21):
                read: list[ScheduleRow] = []
                while page := await store.timers.due_schedules(
                    9_999, after=read[-1] if read else None, limit=limit
                ):
                    assert len(page) <= limit
                    read += page
                assert read == expected
            early = [schedule for schedule in expected if (schedule.next_ms or 0) <= 2_000]
            await put(store, early[3]._replace(next_ms=9_999))
            assert await store.timers.due_schedules(2_000, after=early[3]) == early[4:]  # as it was read
            await store.timers.delete(early[3].schedule_id)
            assert await store.timers.due_schedules(2_000, after=early[3]) == early[4:]  # though it is gone

    @guarantee(24)
    async def test_a_version_is_never_given_twice_for_one_id(self) -> None:
        async with self.open_store() as store:
            old: list[ScheduleRow] = []
            for n in range(6):
                kept = await put(store, ScheduleRow("s", b"%d" % n, n))
                if n % 2:
                    kept = await put(store, kept._replace(next_ms=9))
                for other in old:  # a node that read it before it was deleted, and is slow
                    assert await store.timers.put(other._replace(body=b"stale")) is None
                assert await store.timers.get("s") == kept
                old.append(kept)
                assert await store.timers.delete("s")
            versions = [schedule.version for schedule in old]
            assert versions == sorted(set(versions))

    @guarantee(24)
    async def test_schedules_are_listed_by_code_point_in_pages(self) -> None:
        async with self.open_store() as store:
            names = ["\U0001f600", "b", "\ud800", "a", "é", "a\x00b", "aa", " ", "1:a:b"]
            for name in names:
                await put(store, ScheduleRow(name, name.encode("utf-8", "surrogatepass"), None))
            listed: list[str] = []
            while page := await store.timers.list(after=listed[-1] if listed else "", limit=2):
                listed += [schedule.schedule_id for schedule in page]
            assert listed == sorted(names)
            assert await store.timers.list(after="\U0001f600") == []
            assert [schedule.schedule_id for schedule in await store.timers.list()] == listed

    @guarantee(24)
    async def test_schedules_that_cannot_be_are_refused(self) -> None:
        async with self.open_store() as store:
            with pytest.raises(BadInputError):
                await store.timers.put(ScheduleRow("", b"{}", None))
            for limit in (0, -1):
                with pytest.raises(BadInputError):
                    await store.timers.list(limit=limit)
                with pytest.raises(BadInputError):
                    await store.timers.due_schedules(0, limit=limit)
            with pytest.raises(BadInputError):
                await store.timers.due_schedules(0, after=ScheduleRow("s", b"{}", None, 1))
            assert await store.timers.list() == []

    @guarantee(24, needs="restart")
    async def test_schedules_survive_a_restart(self) -> None:
        async with self.open_store() as store:
            kept = await put(store, ScheduleRow("s", b"{}", 5))
            gone = await put(store, ScheduleRow("t", b"{}", 5))
            await store.timers.delete(gone.schedule_id)
        async with self.open_store() as store:
            assert await store.timers.list() == await store.timers.due_schedules(5) == [kept]
            assert await store.timers.put(ScheduleRow("s", b"{}", 6)) is None
            assert (await put(store, ScheduleRow("t", b"{}", None))).version > gone.version
            await put(store, kept._replace(next_ms=6))

    @guarantee(24, needs="sharing")
    async def test_two_openings_never_both_replace_a_version(self) -> None:
        async with self.open_store() as one, self.open_store() as other:
            kept = await put(one, ScheduleRow("s", b"{}", 0))
            for n in range(1, 6):
                results = await asyncio.gather(
                    *(store.timers.put(kept._replace(next_ms=n)) for store in (one, other))
                )
                [kept] = [result for result in results if result is not None]
