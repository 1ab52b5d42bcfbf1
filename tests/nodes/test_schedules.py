"""Schedules: each occurrence starts once over all nodes, under the id of its instant (F41; D4, L12)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest

import loomfast as lf
from loomfast.testing import VirtualClock
from loomfast.testing.time import START_MS
from tests.conftest import OpenStore
from tests.nodes.harness import DAY, HOUR, MINUTE, Tokens, memory_store, node, virtually
from tests.runtime.harness import StillClock, kinds, turns

started: list[str] = []


@pytest.fixture(autouse=True)
def nothing_started() -> None:
    started.clear()


@lf.step
async def counted(name: str) -> str:
    started.append(name)
    return name


@lf.flow
async def report(ctx: lf.WorkflowContext, input: Any) -> Any:
    await ctx.run(counted, ctx.execution_id)
    return input


def an_object(value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError("must be an object")


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


async def executions(store: lf.EventStore) -> list[str]:
    return sorted(each.execution_id for each in await store.list_executions(limit=1000))


# --- on time -------------------------------------------------------------------------------------


def test_occurrences_start_at_their_nominal_instants_with_their_input() -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 1, report) as rt, lf.TimerService(rt) as timers:
            await timers.schedules.put("tick", report, {"n": 1}, trigger=lf.Every(15))
            await asyncio.sleep(60)
            [summary, *_] = await store.list_executions()
            first = lf.occurrence_of(summary.execution_id)
            assert first is not None
            assert first.schedule_id == "tick"
            assert first.at_ms % 15_000 == 0
            assert await rt.handle(summary.execution_id).result() == {"n": 1}
            events = [(await store.read(name))[0] for name in await executions(store)]
            assert len(events) == 4
            for event in events:
                due = lf.occurrence_of(event.execution_id)
                assert due is not None
                assert 0 <= event.timestamp - due.at_ms <= 10

    virtually(main)


@pytest.mark.parametrize(("day", "count"), [("2026-10-25", 100), ("2026-03-29", 92), ("2026-07-01", 96)])
def test_every_quarter_of_an_hour_through_a_day_on_which_clocks_change(day: str, count: int) -> None:
    """F41: 100 runs on the local 25 October, 92 on 29 March; each its own id."""
    midnight = {"2026-10-25": "+02:00", "2026-03-29": "+01:00", "2026-07-01": "+02:00"}[day]

    async def main() -> None:
        store = memory_store()
        async with node(store, 1, report) as rt, lf.TimerService(rt, poll_s=60) as timers:
            await timers.schedules.put("q", report, trigger=lf.Cron("*/15 * * * *", tz="Europe/Berlin"))
            await asyncio.sleep(count / 4 * HOUR)
            assert len(await executions(store)) == len(set(started)) == count
            assert sorted(started) == await executions(store)

    virtually(main, start_ms=ms(f"{day}T00:00:00{midnight}") - 500)


def test_a_daily_half_past_two_runs_once_when_the_hour_repeats_and_at_the_gaps_end_in_spring() -> None:
    """F41: 00:30Z and not 01:30Z on 25 October; 01:00Z on 29 March, or, if settled so, not at all."""

    async def main() -> None:
        store = memory_store()
        async with node(store, 1, report) as rt, lf.TimerService(rt, poll_s=600) as timers:
            for gap in ("run", "skip"):
                trigger = lf.Cron("30 2 * * *", tz="Europe/Berlin", gap=gap)
                await timers.schedules.put(gap, report, trigger=trigger)
            await asyncio.sleep(2 * DAY)

    virtually(main, start_ms=ms("2026-10-24T12:00:00+00:00"))
    assert sorted(started) == [
        f"{gap}@2026-10-{day}:30:00Z" for gap in ("run", "skip") for day in ("25T00", "26T01")
    ]
    started.clear()
    virtually(main, start_ms=ms("2026-03-28T12:00:00+00:00"))
    assert sorted(started) == [
        "run@2026-03-29T01:00:00Z",
        "run@2026-03-30T00:30:00Z",
        "skip@2026-03-30T00:30:00Z",
    ]


def test_a_clock_that_is_set_back_an_hour_starts_nothing_twice() -> None:
    """F41."""

    class Set(VirtualClock):
        offset_ms = 0

        def now_ms(self) -> int:
            return super().now_ms() + self.offset_ms

    async def main() -> None:
        clock, errors = Set(), list[Any]()
        store = lf.MemoryEventStore(now_ms=clock.now_ms)
        async with (
            node(store, 1, report, clock=clock) as rt,
            lf.TimerService(rt, on_error=lambda *error: errors.append(error)) as timers,
        ):
            await timers.schedules.put("tick", report, trigger=lf.Every(60))
            await asyncio.sleep(30 * MINUTE)
            assert len(started) == 30
            clock.offset_ms = -3_600_000
            await asyncio.sleep(HOUR)
            assert len(started) == 30
            await asyncio.sleep(10 * MINUTE)
            assert len(started) == len(set(started)) == 40
        assert errors == []

    virtually(main)


# --- many nodes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("leases", [False, True])
def test_of_three_nodes_one_starts_each_occurrence_and_the_others_are_silent(seed: int, leases: bool) -> None:
    """D4: no error is reported for a race that was lost, fenced or not, with leases or without."""

    async def main() -> None:
        store = Tokens()
        errors: list[Any] = []
        options = {"lease_ttl_s": 5.0} if leases else {}
        nodes = [node(store, number, report, **options) for number in range(3)]
        services = [
            lf.TimerService(rt, fenced=True, on_error=lambda *error: errors.append(error)) for rt in nodes
        ]
        for service in services:
            await service.__aenter__()
        for n in range(3):
            await services[n].schedules.put(f"s{n}", report, trigger=lf.Every(7, anchor_ms=n))
        await asyncio.sleep(70)
        for service, rt in zip(services, nodes, strict=True):
            await service.close()
            await rt.close()
        assert len(started) == len(set(started)) == 30
        assert sorted(started) == await executions(store)
        assert errors == []
        assert store.fences == [], "a start does not fence (L12)"

    virtually(main, seed=seed)


class Door(lf.EventStoreDecorator):
    """One node's way to the store: its bootstraps wait until it is opened."""

    def __init__(self, inner: lf.EventStore) -> None:
        super().__init__(inner)
        self.waiting = asyncio.Event()
        self.opened = asyncio.Event()

    async def append(self, envelope: lf.Envelope) -> None:
        self.waiting.set()
        await self.opened.wait()
        await super().append(envelope)


@pytest.mark.parametrize("late", ["before the winner's bootstrap", "behind the winner's effect"])
def test_both_orderings_of_the_fenced_race_refuse_the_loser_and_stop_nobody(late: str) -> None:
    """L12: two services that fence, one occurrence; the loser is refused as already started, without
    `on_error`, and the winner's effect runs once across the race and a recovery pass.
    """

    @lf.step
    async def audit(name: str) -> str:
        started.append(name)
        effect.set()
        await asyncio.sleep(1)
        return name

    @lf.flow
    async def audited(ctx: lf.WorkflowContext, input: Any) -> Any:
        return await ctx.run(audit, ctx.execution_id)

    effect = asyncio.Event()

    async def main() -> None:
        store = Tokens()
        doors = Door(store), Door(store)
        errors: list[Any] = []
        async with (
            node(doors[0], 1, audited) as winner,
            node(doors[1], 2, audited) as loser,
            node(store, 3, audited) as third,
        ):
            services = [
                lf.TimerService(rt, fenced=True, on_error=lambda *error: errors.append(error))
                for rt in (winner, loser)
            ]
            await services[0].schedules.put("nightly", audited, trigger=lf.Every(60))
            at_ms = START_MS + 60_000
            first, second = (
                asyncio.ensure_future(service.start_occurrence("nightly", at_ms)) for service in services
            )
            # Both have looked, and seen nothing.
            await asyncio.gather(doors[0].waiting.wait(), doors[1].waiting.wait())
            if late == "before the winner's bootstrap":
                doors[0].opened.set()
                doors[1].opened.set()
            else:
                doors[0].opened.set()
                await effect.wait()
                doors[1].opened.set()
            assert await first is True
            assert await second is False
            execution_id = lf.occurrence_id("nightly", at_ms)
            assert await winner.handle(execution_id).result() == execution_id
            assert await third.recover_abandoned() == []
            assert kinds(await store.read(execution_id)).count("STEP_STARTED") == 1
        assert started == [execution_id]
        assert errors == []
        assert store.fences == []

    virtually(main)


def test_a_missing_token_is_refused_once_a_fire_or_a_recovery_has_fenced_an_occurrence() -> None:
    """L12: the starter is unfenced until the first fence, which then fences it out."""

    @lf.flow
    async def naps(ctx: lf.WorkflowContext, input: Any) -> Any:
        await ctx.sleep(1)
        await ctx.run(counted, "woke")

    async def main() -> None:
        store = Tokens()
        async with node(store, 1, naps) as starter, node(store, 2, naps) as other:
            first = lf.TimerService(starter, fenced=True)
            await first.schedules.put("n", naps, trigger=lf.Every(60))
            await first.start_occurrence("n", START_MS)
            execution_id = lf.occurrence_id("n", START_MS)
            await starter.handle(execution_id).rest()
            await asyncio.sleep(1)
            assert await lf.TimerService(other, fenced=True).fire(execution_id)
            await other.handle(execution_id).result()
            assert store.fences == [1]
            log = await store.read(execution_id)
            assert [event.metadata.get("fence") for event in log] == [None, None, 1, 1, 1, 1, 1]
            extra = lf.Envelope.from_json(
                {**log[-1].to_json(), "sequence": 7, "id": f"{execution_id}-7", "metadata": {}}
            )
            with pytest.raises(lf.StaleFenceError):
                await store.append(extra)

    virtually(main)


# --- crashes -------------------------------------------------------------------------------------


def test_sequence_0_is_durable_before_the_mark_moves_and_a_crash_between_starts_nothing_twice() -> None:
    class Crashing(lf.MemoryEventStore):
        """Loses the process between a start and its mark."""

        crash = False

        def __init__(self) -> None:
            super().__init__()
            put = self.timers.put

            async def crashing(schedule: lf.ScheduleRow) -> lf.ScheduleRow | None:
                if self.crash:
                    seen.extend(await executions(self))
                    raise lf.StoreLostError(None, "the process is gone")
                return await put(schedule)

            self.timers.put = crashing  # type: ignore[method-assign]

    seen: list[str] = []

    async def main() -> None:
        store = Crashing()
        async with node(store, 1, report) as rt:
            timers = lf.TimerService(rt)
            schedule = await timers.schedules.put("s", report, trigger=lf.Every(60))
            await asyncio.sleep(61)
            store.crash = True
            await timers.tick()
            assert seen == [lf.occurrence_id("s", schedule.next_ms or 0)], "sequence 0 came before the mark"
            assert await store.timers.get("s") is not None
            assert (await timers.schedules.get("s")) == schedule
            await timers.close()
        store.crash = False
        errors: list[Any] = []
        async with node(store, 2, report) as rt:
            timers = lf.TimerService(rt, on_error=lambda *error: errors.append(error))
            await timers.tick()
            moved = await timers.schedules.get("s")
            assert moved is not None
            assert moved.next_ms == (schedule.next_ms or 0) + 60_000
            await timers.close()
        assert errors == []
        assert len(started) <= 1
        assert await executions(store) == seen

    virtually(main)


def test_one_schedule_that_cannot_start_is_reported_and_holds_up_no_other() -> None:
    """F15 for schedules: of an unknown flow, with an input that its flow refuses, unreadable."""

    @lf.flow(input=an_object)
    async def strict(ctx: lf.WorkflowContext, input: Any) -> Any:
        return await ctx.run(counted, ctx.execution_id)

    async def main() -> None:
        store = memory_store()
        async with node(store, 9) as elsewhere:  # which does not know the flow, and so cannot check its input
            there = lf.Schedules(elsewhere)
            await there.put("bad-input", strict.id, 7, trigger=lf.Every(60))
            await there.put("unknown", "no-such-flow", trigger=lf.Every(60))
        await store.timers.put(lf.ScheduleRow("unreadable", b"{}", START_MS))
        errors: dict[str, str] = {}
        async with (
            node(store, 1, report, strict) as rt,
            lf.TimerService(
                rt, on_error=lambda key, error: errors.update({key: type(error).__name__})
            ) as timers,
        ):
            await timers.schedules.put("zz", report, trigger=lf.Every(60))
            await asyncio.sleep(130)
            assert [lf.occurrence_of(name) is not None for name in started] == [True, True]
            assert errors == {
                "bad-input": "InputValidationError",
                "unknown": "UnknownFlowError",
                "unreadable": "StoreReadError",
            }
            # Put right, what it missed is made up for as it says: the newest of it.
            await timers.schedules.put("bad-input", strict, {}, trigger=lf.Every(60))
            await asyncio.sleep(1)
            assert [name for name in started if name.startswith("bad-input@")] == [
                lf.occurrence_id("bad-input", (START_MS + 130_000) // 60_000 * 60_000)
            ]

    virtually(main)


# --- downtime ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("catch_up", "made_up_for"),
    [("latest", [10]), ("skip", [10]), (1, [10]), (3, [8, 9, 10]), (100, list(range(1, 11)))],
)
def test_what_was_missed_is_made_up_for_as_the_schedule_says_oldest_first(
    catch_up: Any, made_up_for: list[int]
) -> None:
    """F41: bounded, oldest first, under the ids they would have had on time."""

    async def main() -> None:
        store = memory_store()
        async with node(store, 1, report) as rt:
            await lf.Schedules(rt).put(
                "s", report, trigger=lf.Every(60, anchor_ms=START_MS), catch_up=catch_up, grace_s=30
            )
        await asyncio.sleep(10 * MINUTE + 20)
        async with node(store, 2, report) as rt, lf.TimerService(rt):
            await turns(50)
            await asyncio.sleep(5)
            assert started == [lf.occurrence_id("s", START_MS + n * 60_000) for n in made_up_for]
            await asyncio.sleep(MINUTE)
            assert started[len(made_up_for) :] == [lf.occurrence_id("s", START_MS + 11 * 60_000)]

    virtually(main)


def test_what_is_older_than_the_grace_is_skipped_for_good() -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 1, report) as rt:
            schedules = lf.Schedules(rt)
            trigger = lf.Every(60, anchor_ms=START_MS)
            await schedules.put("s", report, trigger=trigger, catch_up="skip", grace_s=10)
            await asyncio.sleep(10 * MINUTE + 20)
            await lf.TimerService(rt).tick()
            assert started == []
            moved = await schedules.get("s")
            assert moved is not None
            assert moved.next_ms == START_MS + 11 * 60_000

    virtually(main)


# --- changing them -------------------------------------------------------------------------------


def test_put_again_as_it_is_changes_nothing_and_keeps_what_was_missed() -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 1, report) as rt:
            schedules = lf.Schedules(rt)
            made = await schedules.put("s", report, {"a": 1}, trigger=lf.Every(60))
            await asyncio.sleep(10 * MINUTE)
            assert await schedules.put("s", report, {"a": 1}, trigger=lf.Every(60)) == made
            edited = await schedules.put("s", report, {"a": 2}, trigger=lf.Every(60))
            assert (edited.next_ms, edited.input) == (made.next_ms, {"a": 2})
            assert edited.version > made.version
            moved = await schedules.put("s", report, {"a": 2}, trigger=lf.Every(90))
            assert moved.next_ms is not None
            assert moved.next_ms > VirtualClock().now_ms(), "another trigger begins from now on"

    virtually(main)


def test_a_paused_schedule_starts_nothing_and_what_it_would_have_is_not_made_up_for() -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 1, report) as rt, lf.TimerService(rt) as timers:
            trigger = lf.Every(60, anchor_ms=START_MS)
            await timers.schedules.put("s", report, trigger=trigger, catch_up=100)
            await asyncio.sleep(2 * MINUTE + 1)
            assert len(started) == 2
            paused = await timers.schedules.pause("s")
            assert (paused.paused, paused.next_ms) == (True, None)
            assert await timers.schedules.pause("s") == paused
            await asyncio.sleep(5 * MINUTE)
            edited = await timers.schedules.put("s", report, 5, trigger=trigger)
            assert (edited.paused, edited.next_ms) == (True, None)
            await asyncio.sleep(5 * MINUTE)
            assert len(started) == 2
            resumed = await timers.schedules.resume("s")
            assert resumed.next_ms == START_MS + 13 * 60_000
            assert await timers.schedules.resume("s") == resumed
            await asyncio.sleep(MINUTE)
            assert len(started) == 3

    virtually(main)


def test_schedules_are_listed_by_id_and_forgotten_when_deleted() -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 1, report) as rt, lf.TimerService(rt) as timers:
            for name in ("b", "a", "c"):
                await timers.schedules.put(name, report, trigger=lf.Every(60))
            assert [each.schedule_id for each in await timers.schedules.list(limit=2)] == ["a", "b"]
            assert [each.schedule_id for each in await timers.schedules.list(after="b")] == ["c"]
            assert await timers.schedules.delete("b")
            assert not await timers.schedules.delete("b")
            assert await timers.schedules.get("b") is None
            await asyncio.sleep(61)
            assert {name.partition("@")[0] for name in started} == {"a", "c"}
            for call in (timers.schedules.pause, timers.schedules.resume):
                with pytest.raises(lf.UnknownScheduleError, match="'b'"):
                    await call("b")
            with pytest.raises(lf.UnknownScheduleError, match="'b'"):
                await timers.start_occurrence("b", START_MS)

    virtually(main)


@pytest.mark.parametrize("seed", range(20))
def test_of_two_changes_at_once_neither_is_lost(seed: int) -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 1, report) as rt, node(store, 2, report) as other:
            one, two = lf.Schedules(rt), lf.Schedules(other)
            await one.put("s", report, 0, trigger=lf.Every(60))
            await asyncio.gather(one.pause("s"), two.put("s", report, 1, trigger=lf.Every(60)))
            end = await one.get("s")
            assert end is not None
            assert (end.paused, end.input, end.next_ms) == (True, 1, None)

    virtually(main, seed=seed)


def test_an_edit_in_the_middle_of_a_start_keeps_its_own_mark() -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 1, report) as rt:
            door = Door(store)
            async with node(door, 2, report) as slow:
                schedules = lf.Schedules(rt)
                await schedules.put("s", report, trigger=lf.Every(60))
                await asyncio.sleep(61)
                ticking = asyncio.ensure_future(lf.TimerService(slow).tick())
                await door.waiting.wait()
                edited = await schedules.put("s", report, trigger=lf.Every(3600))
                door.opened.set()
                await ticking
                assert await schedules.get("s") == edited

    virtually(main)


async def test_bad_schedules_are_refused_before_anything_is_written() -> None:
    @lf.flow(input=an_object)
    async def strict(ctx: lf.WorkflowContext, input: Any) -> None: ...

    store = lf.MemoryEventStore()
    async with lf.WorkflowRuntime(store, flows=[strict]) as rt:
        schedules = lf.Schedules(rt)
        every = lf.Every(60)
        with pytest.raises(lf.InputValidationError, match="input of flow 'strict'"):
            await schedules.put("s", strict, 7, trigger=every)
        with pytest.raises(lf.JsonFormError):
            await schedules.put("s", "other", object(), trigger=every)
        bad: Sequence[tuple[Any, ...]] = (
            ("", strict, {}, every),
            (None, strict, {}, every),
            ("s", "", {}, every),
            ("s", strict, {}, "0 0 * * *"),
        )
        for schedule_id, flow, input, trigger in bad:
            with pytest.raises(lf.BadInputError):
                await schedules.put(schedule_id, flow, input, trigger=trigger)
        with pytest.raises(lf.BadInputError, match="catch_up"):
            await schedules.put("s", strict, {}, trigger=every, catch_up="all")  # type: ignore[arg-type]
        assert await schedules.list() == []


async def test_schedules_are_kept_and_start_on_real_stores(open_store: OpenStore) -> None:
    async with open_store() as store:
        clock = StillClock()
        async with lf.WorkflowRuntime(store, flows=[report], clock=clock) as rt:
            schedules = lf.Schedules(rt)
            trigger = lf.Cron("30 2 * * *", tz="Europe/Berlin")
            made = await schedules.put("nightly", report, {"x": "ü\0"}, trigger=trigger, catch_up=2)
            assert await schedules.get("nightly") == made
            clock.time += 3 * 86_400_000
            timers = lf.TimerService(rt)
            await timers.tick()
            await asyncio.gather(*(rt.handle(name).result() for name in await executions(store)))
            assert len(started) == 2
            assert sorted(started) == await executions(store)
            await timers.close()
