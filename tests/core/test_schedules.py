"""When schedules are due: triggers around clock changes, catch-up and the ids of occurrences (F41)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise, takewhile
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import loomfast as lf
from loomfast._core.arguments import shown
from loomfast._core.schedules import (
    MOST_CAUGHT_UP,
    MOST_ON_TIME,
    Cron,
    Every,
    Occurrence,
    ScheduleDefinition,
    Trigger,
    occurrence_id,
    occurrence_of,
)

BERLIN = "Europe/Berlin"
DAY_MS = 86_400_000
EARLIEST_MS, LATEST_MS = -62_135_596_800_000, 253_402_300_799_999


def ms(text: str) -> int:
    """The instant that a text names, such as `2026-10-25 00:30`, in UTC."""
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def utc(instants: list[int]) -> list[str]:
    epoch = datetime(1970, 1, 1)
    return [f"{epoch + timedelta(milliseconds=at_ms):%Y-%m-%d %H:%M:%S}" for at_ms in instants]


def forward(trigger: Trigger, start_ms: int, end_ms: int) -> list[int]:
    """Walk from `start_ms` to before `end_ms` by `after` alone."""
    found, at_ms = [], trigger.after(start_ms - 1)
    while at_ms is not None and at_ms < end_ms:
        found.append(at_ms)
        at_ms = trigger.after(at_ms)
    return found


def backward(trigger: Trigger, start_ms: int, end_ms: int) -> list[int]:
    return [*takewhile(lambda at_ms: at_ms >= start_ms, trigger.back_from(end_ms - 1))][::-1]


def local_day(trigger: Cron, day: str) -> list[int]:
    """The occurrences of a local day, walked in both directions."""
    start = datetime.fromisoformat(day)
    bounds = [start.replace(tzinfo=ZoneInfo(trigger.tz)), start + timedelta(days=1)]
    start_ms, end_ms = (
        round(bound.replace(tzinfo=ZoneInfo(trigger.tz)).timestamp() * 1000) for bound in bounds
    )
    found = forward(trigger, start_ms, end_ms)
    assert backward(trigger, start_ms, end_ms) == found
    return found


def schedule(trigger: Trigger = Every(60), next_ms: int | None = 0, **fields: Any) -> ScheduleDefinition:  # noqa: B008  # a value
    fields = {"schedule_id": "s", "flow_id": "f", "input": None, "paused": False} | fields
    return ScheduleDefinition(trigger=trigger, next_ms=next_ms, **fields)


# --- clock changes -------------------------------------------------------------------------------


def test_a_fixed_time_runs_once_in_a_repeated_hour_F41() -> None:
    assert utc(local_day(Cron("30 2 * * *", BERLIN), "2026-10-25")) == ["2026-10-25 00:30:00"]


def test_a_fixed_time_that_does_not_exist_runs_at_the_gaps_end_or_not_at_all_F41() -> None:
    assert utc(local_day(Cron("30 2 * * *", BERLIN), "2026-03-29")) == ["2026-03-29 01:00:00"]
    assert local_day(Cron("30 2 * * *", BERLIN, gap="skip"), "2026-03-29") == []


@pytest.mark.parametrize(("day", "count"), [("2026-10-25", 100), ("2026-03-29", 92), ("2026-10-26", 96)])
def test_what_runs_every_quarter_of_an_hour_follows_real_time_F41(day: str, count: int) -> None:
    found = local_day(Cron("*/15 * * * *", BERLIN), day)
    assert len(found) == count
    assert len({occurrence_id("s", at_ms) for at_ms in found}) == count
    assert {later - at_ms for at_ms, later in pairwise(found)} == {900_000}


def test_what_runs_every_15_seconds_does_not_pause_in_a_repeated_hour_F41() -> None:
    assert len(local_day(Cron("*/15 * * * * *", BERLIN), "2026-10-25")) == 25 * 240


@pytest.mark.parametrize(
    ("expression", "gap", "times"),
    [
        ("30 2,3 * * *", "run", ["01:00", "01:30"]),
        ("30 2,3 * * *", "skip", ["01:30"]),
        ("0,30 2 * * *", "run", ["01:00"]),  # two that were skipped are made up for once
        ("0 2,3 * * *", "run", ["01:00"]),  # the real 03:00 is there too
        ("0 2,3 * * *", "skip", ["01:00"]),
        ("0 3 * * *", "skip", ["01:00"]),
        ("0 */2 * * *", "run", ["23:00", "02:00", "04:00"]),  # a star: real time, and 02:00 is none
        ("*/30 2 * * *", "run", []),
        ("10 30 2 * * *", "run", ["01:00"]),
        ("10 30 2 * * *", "skip", []),
    ],
)
def test_only_fixed_times_are_made_up_for_at_the_end_of_a_gap_F41(
    expression: str, gap: Any, times: list[str]
) -> None:
    found = local_day(Cron(expression, BERLIN, gap), "2026-03-29")
    assert [text[11:16] for text in utc(found) if text < "2026-03-29 05"] == times


@pytest.mark.parametrize(
    ("expression", "times"),
    [
        ("30 2,3 * * *", ["00:30", "02:30"]),
        ("0 */2 * * *", ["22:00", "00:00", "01:00", "03:00"]),
        ("*/30 2 * * *", ["00:00", "00:30", "01:00", "01:30"]),
        ("0 30 2 * * *", ["00:30"]),
        ("59 1-3 * * *", ["23:59", "00:59", "02:59"]),
    ],
)
def test_only_what_follows_real_time_runs_in_both_copies_of_an_hour_F41(
    expression: str, times: list[str]
) -> None:
    found = local_day(Cron(expression, BERLIN), "2026-10-25")
    assert [text[11:16] for text in utc(found) if text < "2026-10-25 04"] == times


@pytest.mark.parametrize(
    ("tz", "expression", "start", "end", "found"),
    [
        # Half an hour: 02:00 becomes 02:30 in spring, and 01:30 in autumn.
        (
            "Australia/Lord_Howe",
            "10 2 * * *",
            "2026-10-03 14:00",
            "2026-10-03 20:00",
            ["2026-10-03 15:30:00"],
        ),
        (
            "Australia/Lord_Howe",
            "45 1 * * *",
            "2026-04-04 13:00",
            "2026-04-04 20:00",
            ["2026-04-04 14:45:00"],
        ),
        # No midnight on that day.
        ("America/Santiago", "0 0 * * *", "2026-09-06 00:00", "2026-09-06 12:00", ["2026-09-06 04:00:00"]),
        ("America/Santiago", "* 0 * * 0", "2026-09-06 00:00", "2026-09-06 12:00", []),
        ("Asia/Beirut", "0 0 27 3 *", "2022-03-26 12:00", "2022-03-28 12:00", ["2022-03-26 22:00:00"]),
        # No such day.
        ("Pacific/Apia", "0 12 30 12 *", "2011-12-29 00:00", "2012-01-01 00:00", ["2011-12-30 10:00:00"]),
        ("Pacific/Apia", "0 * 30 12 *", "2011-12-29 00:00", "2012-01-01 00:00", []),
        # A gap of 44 minutes and 30 seconds.
        ("Africa/Monrovia", "5 0 7 1 *", "1972-01-06 00:00", "1972-01-08 00:00", ["1972-01-07 00:44:30"]),
    ],
)
def test_zones_that_change_by_half_an_hour_at_midnight_or_by_a_day_F41(
    tz: str, expression: str, start: str, end: str, found: list[str]
) -> None:
    trigger = Cron(expression, tz)
    assert utc(forward(trigger, ms(start), ms(end))) == found
    assert utc(backward(trigger, ms(start), ms(end))) == found


@pytest.mark.parametrize(
    ("expression", "times"),
    [("30 2 25 10 *", ["00:30"]), ("*/30 2 25 10 *", ["00:00", "00:30", "01:00", "01:30"])],
)
def test_a_walk_over_half_a_year_sees_the_changes_between_F41(expression: str, times: list[str]) -> None:
    start_ms, end_ms = ms("2026-01-01"), ms("2027-07-01")
    for walk in (forward, backward):
        found = utc(walk(Cron(expression, BERLIN), start_ms, end_ms))
        assert found == [f"2026-10-25 {time}:00" for time in times]


# Windows around changes of every kind, in UTC.
WINDOWS = [
    ("UTC", "2026-02-28"),
    (BERLIN, "2026-03-29"),
    (BERLIN, "2026-10-25"),
    ("America/New_York", "2026-03-08"),
    ("America/New_York", "2026-11-01"),
    ("Australia/Lord_Howe", "2026-10-03"),
    ("Australia/Lord_Howe", "2026-04-04"),
    ("America/Santiago", "2026-09-06"),
    ("America/Santiago", "2026-04-05"),
    ("Asia/Beirut", "2022-03-26"),
    ("Asia/Beirut", "2021-10-30"),
    ("Antarctica/Troll", "2026-03-29"),
    ("Antarctica/Troll", "2026-10-25"),
    ("Africa/Casablanca", "2026-02-15"),
    ("Africa/Casablanca", "2026-03-22"),
    ("Asia/Kathmandu", "1985-12-31"),
    ("America/Caracas", "2007-12-09"),
    ("America/Caracas", "2016-05-01"),
    ("Pacific/Apia", "2011-12-30"),
    ("Pacific/Kwajalein", "1993-08-21"),
    ("Pacific/Kwajalein", "1969-09-30"),
    ("Africa/Monrovia", "1972-01-07"),
]


def matcher(field: str, least: int, most: int) -> set[int]:
    """Read a simple field: a star, numbers, ranges, and steps of these."""
    found: set[int] = set()
    for term in field.split(","):
        values, _, step = term.partition("/")
        first, _, last = ("0-0" if values == "*" else values).partition("-")
        low, high = (least, most) if values == "*" else (int(first), int(last or (most if step else first)))
        found |= set(range(low, high + 1, int(step or 1)))
    return found


def scanned(trigger: Cron, start_ms: int, end_ms: int) -> list[int]:
    """Look at every half minute of real time, and at every local time that a change of the clocks skipped."""
    minute, hour, day, _, weekday = trigger.expression.split()
    minutes, hours, days = matcher(minute, 0, 59), matcher(hour, 0, 23), matcher(day, 1, 31)
    weekdays = {number % 7 for number in matcher(weekday, 0, 6)}
    both = day.startswith("*") or weekday.startswith("*")
    fixed = not minute.startswith("*") and not hour.startswith("*")

    def named(local: datetime) -> bool:
        on_day, on_weekday = local.day in days, local.isoweekday() % 7 in weekdays
        of_day = on_day and on_weekday if both else on_day or on_weekday
        return local.second == 0 and local.minute in minutes and local.hour in hours and of_day

    def instants() -> Iterator[int]:
        zone, step = ZoneInfo(trigger.tz), timedelta(seconds=30)
        instant = datetime.fromtimestamp(start_ms / 1000, UTC)
        before = (instant - step).astimezone(zone)
        for at_ms in range(start_ms, end_ms, 30_000):
            local = instant.astimezone(zone)
            skipped = before.replace(tzinfo=None) + step
            lost = False
            while fixed and trigger.gap == "run" and skipped < local.replace(tzinfo=None):
                lost = lost or named(skipped)
                skipped += step
            if lost or (named(local) and not (fixed and local.fold)):
                yield at_ms
            before, instant = local, instant + step

    return list(instants())


def field(least: int, most: int) -> st.SearchStrategy[str]:
    number = st.integers(least, most)
    spans = st.lists(number, min_size=2, max_size=2, unique=True).map(lambda ends: f"{min(ends)}-{max(ends)}")
    steps = st.integers(1, 20)
    return st.one_of(
        st.just("*"),
        steps.map(lambda step: f"*/{step}"),
        st.lists(number.map(str) | spans, min_size=1, max_size=3).map(",".join),
        st.tuples(spans, steps).map(lambda pair: f"{pair[0]}/{pair[1]}"),
    )


# Most expressions meet the hours at which clocks are changed, on most days.
EXPRESSIONS = st.tuples(
    field(0, 59),
    field(0, 3) | field(0, 23),
    st.just("*") | field(1, 31),
    st.just("*"),
    st.just("*") | field(0, 6),
).map(" ".join)


@settings(max_examples=150, deadline=None, derandomize=True)
@example((BERLIN, "2026-03-29"), "30 2,3 * * *", "skip", 3000, 2000)
@example(("Australia/Lord_Howe", "2026-10-03"), "45 * * * *", "run", 2880, 1800)
@example(("Australia/Lord_Howe", "2026-04-04"), "* 3 * * *", "run", 2880, 1800)
@example(("Africa/Monrovia", "1972-01-07"), "0,1,44,45 0 * * *", "run", 2880, 1440)
@given(
    st.sampled_from(WINDOWS),
    EXPRESSIONS,
    st.sampled_from(["run", "skip"]),
    st.integers(1, 2 * 2880),
    st.integers(0, 2880),
)
def test_both_directions_find_what_a_scan_of_every_instant_finds_F41(
    window: tuple[str, str], expression: str, gap: Any, length: int, shift: int
) -> None:
    tz, day = window
    trigger = Cron(expression, tz, gap)
    start_ms = ms(day) - DAY_MS + shift * 30_000
    end_ms = start_ms + length * 30_000
    expected = scanned(trigger, start_ms, end_ms)
    assert forward(trigger, start_ms, end_ms) == expected
    assert backward(trigger, start_ms, end_ms) == expected
    for most in (1, 7):
        definition = schedule(trigger, start_ms, catch_up=most)
        assert definition.due(end_ms - 1) == expected[-most:]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(WINDOWS), EXPRESSIONS, st.integers(-2 * DAY_MS, 2 * DAY_MS))
def test_a_walk_from_anywhere_lands_on_the_same_instants(
    window: tuple[str, str], expression: str, shift_ms: int
) -> None:
    trigger = Cron(expression, window[0])
    at_ms = ms(window[1]) + shift_ms
    later = trigger.after(at_ms)
    earlier = next(trigger.back_from(at_ms))
    assert later is not None
    assert earlier <= at_ms < later
    assert trigger.after(earlier) == later
    assert list(islice(trigger.back_from(later), 2)) == [later, earlier]


@pytest.mark.parametrize("expression", ["0 2 * * *", "*/7 1-3 * * *", "30 */6 * * 1"])
def test_seconds_of_zero_in_front_change_nothing(expression: str) -> None:
    start_ms, end_ms = ms("2026-10-20"), ms("2026-10-30")
    plain, six = Cron(expression, BERLIN), Cron(f"0 {expression}", BERLIN)
    assert forward(six, start_ms, end_ms) == forward(plain, start_ms, end_ms) != []


# --- catch-up ------------------------------------------------------------------------------------


def test_three_days_of_downtime_on_a_minutely_schedule_give_the_newest_10_oldest_first_F41() -> None:
    mark, now = ms("2026-10-24 00:00"), ms("2026-10-27 00:00:30")
    for trigger in (Cron("* * * * *", BERLIN), Every(60)):
        due = schedule(trigger, mark, catch_up=10).due(now)
        assert due == [ms("2026-10-26 23:51") + n * 60_000 for n in range(10)]
        assert schedule(trigger, mark, catch_up="latest").due(now) == due[-1:]


def test_a_number_gives_all_that_were_missed_if_they_are_fewer() -> None:
    assert schedule(Every(60), 60_000, catch_up=10).due(180_000) == [60_000, 120_000, 180_000]


def test_skip_gives_all_that_are_on_time_and_none_that_is_late() -> None:
    quarter = schedule(Every(15), 0, catch_up="skip", grace_s=45)
    assert quarter.due(100_000) == [60_000, 75_000, 90_000]
    assert quarter.due(105_000) == [60_000, 75_000, 90_000, 105_000]  # exactly as old as the grace
    daily = schedule(Cron("0 0 * * *"), 0, catch_up="skip")
    assert daily.due(DAY_MS + 60_000) == [DAY_MS]
    assert daily.due(DAY_MS + 60_001) == []
    assert daily.after(DAY_MS + 60_001) == 2 * DAY_MS
    assert len(schedule(Every(1), 0, catch_up="skip", grace_s=3600).due(DAY_MS)) == MOST_ON_TIME


def test_nothing_is_due_before_the_mark_or_while_paused_F41() -> None:
    assert schedule(Every(60), 120_000, catch_up=5).due(119_999) == []
    assert schedule(Every(60), 120_000, catch_up=5).due(120_000) == [120_000]
    assert schedule(Every(60), None, paused=True, catch_up=5).due(DAY_MS) == []
    assert schedule(Every(60), None).due(DAY_MS) == []


def test_a_clock_that_is_set_back_an_hour_makes_nothing_due_twice_F41() -> None:
    now = ms("2026-10-25 12:00")
    for trigger in (Cron("*/5 * * * *", BERLIN), Every(300)):
        kept = schedule(trigger, now - 3_600_000, catch_up=100)
        started = kept.due(now)
        kept = dataclasses.replace(kept, next_ms=kept.after(now))
        for minute in range(-60, 60):
            again = kept.due(now + minute * 60_000)
            started += again
            if again:
                kept = dataclasses.replace(kept, next_ms=kept.after(again[-1]))
        assert len(started) == len(set(started)) == 13 + 11
        assert started == sorted(started)


def test_the_work_after_a_year_of_downtime_is_that_of_what_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from loomfast._core import cron

    steps = 0

    class Counted(cron.CronSim):
        def __next__(self) -> datetime:
            nonlocal steps
            steps += 1
            return super().__next__()

    monkeypatch.setattr(cron, "CronSim", Counted)
    now = ms("2026-10-25 02:00")
    kept = schedule(Cron("* * * * * *", BERLIN), now - 365 * DAY_MS, catch_up=50)
    assert len(kept.due(now)) == 50
    assert steps < 60


# --- intervals -----------------------------------------------------------------------------------


@given(
    st.integers(1000, 10**9),
    st.integers(-(10**13), 10**13),
    st.integers(-(10**13), 10**13),
)
@settings(deadline=None, derandomize=True)
def test_an_interval_counts_from_its_anchor_in_both_directions(step: int, anchor: int, at: int) -> None:
    trigger = Every(step / 1000, anchor)
    later = trigger.after(at)
    assert later is not None
    assert later >= anchor
    assert later > at
    assert (later - anchor) % step == 0
    earlier = next(trigger.back_from(at), None)
    assert later == (anchor if earlier is None else earlier + step)
    assert earlier is None or earlier <= at


def test_an_interval_of_milliseconds_is_exact() -> None:
    assert forward(Every(1.001, 500), 0, 5000) == [500, 1501, 2502, 3503, 4504]


# --- the ends of time ----------------------------------------------------------------------------

TRIGGERS = [
    Every(3600, EARLIEST_MS),
    Cron("* * * * * *", "Pacific/Kiritimati"),
    Cron("0 0 1 1 *", "Pacific/Pago_Pago"),
    Cron("0 0 31 12 *", BERLIN),
    Cron("0 0 29 2 */7", BERLIN),
]


@pytest.mark.parametrize("trigger", TRIGGERS, ids=repr)
@pytest.mark.parametrize("end_ms", [EARLIEST_MS, LATEST_MS])
def test_at_the_ends_of_the_calendar_a_walk_ends(trigger: Trigger, end_ms: int) -> None:
    for days in (0, 1, 2, 31, 400):
        at_ms = end_ms + days * DAY_MS * (1 if end_ms < 0 else -1)
        later = trigger.after(at_ms)
        assert later is None or at_ms < later <= LATEST_MS
        earlier = next(trigger.back_from(at_ms), None)
        assert earlier is None or EARLIEST_MS <= earlier <= at_ms


@pytest.mark.parametrize("trigger", TRIGGERS, ids=repr)
def test_beyond_the_calendar_nothing_is_due_and_nothing_follows(trigger: Trigger) -> None:
    kept = schedule(trigger, ms("2026-01-01"), catch_up=3)
    for at_ms in (EARLIEST_MS - 1, LATEST_MS + 1, 10**30, -(10**30), 10**5000):
        assert kept.after(at_ms) is None
        assert kept.due(at_ms) == []
        assert list(trigger.back_from(at_ms)) == []
    assert kept.after(LATEST_MS) is None


# --- ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule_id", "at_ms", "written"),
    [
        ("nightly", ms("2026-10-25 00:30"), "nightly@2026-10-25T00:30:00Z"),
        ("a@b", 1500, "a@b@1970-01-01T00:00:01.500Z"),
        ("s", -1, "s@1969-12-31T23:59:59.999Z"),
        ("s", EARLIEST_MS, "s@0001-01-01T00:00:00Z"),
        ("s", LATEST_MS, "s@9999-12-31T23:59:59.999Z"),
        ("x@1970-01-01T00:00:00Z", 0, "x@1970-01-01T00:00:00Z@1970-01-01T00:00:00Z"),
        ("line\nbreak\ud800", 0, "line\nbreak\ud800@1970-01-01T00:00:00Z"),
    ],
)
def test_an_occurrence_has_one_id_and_is_read_back_from_it(
    schedule_id: str, at_ms: int, written: str
) -> None:
    assert occurrence_id(schedule_id, at_ms) == written
    assert occurrence_of(written) == Occurrence(schedule_id, at_ms)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "order-7",
        "@1970-01-01T00:00:00Z",
        "s@1970-01-01T00:00:00",
        "s@1970-01-01T00:00:00z",
        "s@1970-01-01 00:00:00Z",
        "s@1970-01-01T00:00:00Z ",
        "s@1970-01-01T00:00:00Z\n",
        "s@1970-01-01T00:00:00.000Z",
        "s@1970-01-01T00:00:00.5Z",
        "s@1970-01-01T00:00:00.500000Z",
        "s@1970-01-01T00:00:00+00:00",
        "s@1970-01-01T24:00:00Z",
        "s@1970-02-30T00:00:00Z",
        "s@0000-01-01T00:00:00Z",
        "s@19700101T000000Z",
        "s@١٩٧٠-01-01T00:00:00Z",
    ],
)
def test_an_id_of_another_form_is_no_occurrence(text: str) -> None:
    assert occurrence_of(text) is None


@given(st.text() | st.from_regex(r".*@\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z", fullmatch=True))
@settings(deadline=None, derandomize=True)
def test_whatever_is_read_as_an_occurrence_is_written_so(text: str) -> None:
    occurrence = occurrence_of(text)
    assert occurrence is None or occurrence_id(*occurrence) == text


@pytest.mark.parametrize("at_ms", [EARLIEST_MS - 1, LATEST_MS + 1, 10**5000, 1.0, True, None], ids=shown)
def test_an_instant_that_has_no_date_has_no_id(at_ms: Any) -> None:
    with pytest.raises(lf.BadInputError, match="at_ms"):
        occurrence_id("s", at_ms)


# --- what is refused -----------------------------------------------------------------------------

HUGE = 10**5000


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("", "wrong number of fields"),
        ("* * * *", "wrong number of fields"),
        ("* * * * * * *", "wrong number of fields"),
        ("@daily", "wrong number of fields"),
        ("60 * * * *", "minute"),
        ("* 24 * * *", "hour"),
        ("* * * 13 *", "month"),
        ("* * * * MOO", "day of week"),
        ("61 * * * * *", "second"),
        ("5-1 * * * *", "minute"),
        ("*/0 * * * *", "minute"),
        ("\0 * * * *", "minute"),
        (f"{'9' * 5000} * * * *", "cannot be read"),
        ("0 0 31 2 *", "does not come in its months"),
        ("0 0 */10 2 1#5", "no day matches"),
        (None, "must be a text"),
        (b"* * * * *", "must be a text"),
        (HUGE, "must be a text"),
    ],
    ids=shown,
)
def test_an_expression_that_is_none_or_never_comes_is_refused(expression: Any, says: str) -> None:
    with pytest.raises(lf.BadInputError, match=says) as refused:
        Cron(expression)
    assert len(str(refused.value)) < 400


@given(st.text("0123456789*/,-#LW MONFEBx\0\ud800ß²", max_size=14).map(lambda text: f"{text} * 1 * 1"))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_text_is_an_expression_or_bad_input(expression: str) -> None:
    try:
        trigger = Cron(expression)
    except lf.BadInputError:
        return
    assert trigger.after(0) is not None


@pytest.mark.parametrize(
    "tz",
    [
        "",
        "Mars/Olympus",
        "Europe",
        "Europe/Berlin\0",
        "../etc/passwd",
        "/etc/localtime",
        "Europe/../Europe/Berlin",
        "zone.tab",
        "localtime",
        "right/Europe/Berlin",
        "\ud800",
        "x" * 5000,
        "a..b",
        ".",
        None,
        7,
        ZoneInfo("UTC"),
    ],
    ids=shown,
)
def test_a_zone_that_is_not_known_is_refused(tz: Any) -> None:
    with pytest.raises(lf.BadInputError, match=r"^tz "):
        Cron("* * * * *", tz)


@pytest.mark.parametrize("gap", ["", "Run", None, 1, ["run"], HUGE], ids=shown)
def test_a_gap_is_run_or_skip(gap: Any) -> None:
    with pytest.raises(lf.BadInputError, match="must be 'run' or 'skip'"):
        Cron("* * * * *", "UTC", gap)


@pytest.mark.parametrize(
    "seconds", [0, 0.999, -1, 1.0005, float("nan"), float("inf"), 1e300, HUGE, True, "60", None], ids=shown
)
def test_an_interval_below_a_second_or_not_of_whole_milliseconds_is_refused(seconds: Any) -> None:
    with pytest.raises(lf.BadInputError, match=r"^seconds "):
        Every(seconds)


@pytest.mark.parametrize("anchor_ms", [1.5, None, True, "0", HUGE, LATEST_MS + 1, EARLIEST_MS - 1], ids=shown)
def test_an_anchor_is_an_instant(anchor_ms: Any) -> None:
    with pytest.raises(lf.BadInputError, match=r"^anchor_ms "):
        Every(60, anchor_ms)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("schedule_id", ["", None, 7, HUGE]),
        ("flow_id", ["", None, 7, HUGE]),
        ("trigger", [None, "* * * * *", {}, Cron]),
        ("catch_up", ["", "all", "Latest", 0, -1, MOST_CAUGHT_UP + 1, HUGE, True, 1.0, None, []]),
        ("grace_s", [-0.001, 0.0005, float("nan"), float("inf"), HUGE, "60", None, False]),
        ("next_ms", [1.0, "0", True]),
        ("version", [-1, 1.0, None, True, -HUGE]),
        ("paused", [None, 0, 1, "no"]),
    ],
)
def test_a_schedule_says_what_is_wrong_with_it(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(lf.BadInputError, match=rf"^{field} ") as refused:
            schedule(**{field: value})
        assert len(str(refused.value)) < 200


def test_a_schedule_that_is_paused_has_no_mark_and_its_input_has_a_json_form() -> None:
    with pytest.raises(lf.BadInputError, match="paused"):
        schedule(Every(60), 0, paused=True)
    with pytest.raises(lf.UnsupportedTypeError):
        schedule(input={"a": object()})


@pytest.mark.parametrize("now", [1.0, None, "0", True])
def test_now_is_whole_milliseconds(now: Any) -> None:
    for ask in (schedule().due, schedule().after, Every(60).back_from, Cron("* * * * *").back_from):
        with pytest.raises(lf.BadInputError, match="must be a whole number"):
            ask(now)


# --- the stored form -----------------------------------------------------------------------------


def test_the_body_is_language_neutral() -> None:
    cron = schedule(Cron("30 2 * * *", BERLIN, "skip"), 5, input={"b": 1, "a": (2,)}, catch_up=10)
    assert cron.to_body() == (
        b'{"flowId":"f","input":{"b":1,"a":[2]},'
        b'"trigger":{"cron":"30 2 * * *","tz":"Europe/Berlin","gap":"skip"},'
        b'"catchUp":10,"graceMs":60000,"paused":false}'
    )
    every = schedule(Every(1.5, -7), None, catch_up="skip", grace_s=0.25, paused=True)
    assert every.to_body() == (
        b'{"flowId":"f","input":null,"trigger":{"everyMs":1500,"anchorMs":-7},'
        b'"catchUp":"skip","graceMs":250,"paused":true}'
    )


@pytest.mark.parametrize(
    "trigger", [*TRIGGERS, Every(1.001, 3), Cron("5 4 * * SUN", BERLIN, "skip")], ids=repr
)
@pytest.mark.parametrize("catch_up", ["skip", "latest", 3])
@pytest.mark.parametrize("next_ms", [None, 77])
def test_a_schedule_comes_back_from_its_body(trigger: Trigger, catch_up: Any, next_ms: int | None) -> None:
    kept = schedule(
        trigger,
        next_ms,
        schedule_id="s@1",
        input=[{"n": 2**70}, 1.0, "\ud800"],
        catch_up=catch_up,
        grace_s=1.5,
        paused=next_ms is None,
        version=4,
    )
    read = ScheduleDefinition.from_body("s@1", kept.to_body(), next_ms, 4)
    assert read == kept
    assert read.to_body() == kept.to_body()


def test_what_the_caller_does_to_the_input_afterwards_changes_nothing() -> None:
    given: dict[str, Any] = {"orders": [1]}
    kept = schedule(input=given)
    given["orders"].append(2)
    assert kept.input == {"orders": [1]}


BODY = schedule(Cron("30 2 * * *", BERLIN)).to_body()
EVERY = schedule(Every(60)).to_body()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        BODY[:-1],
        b"[" * 2000,
        BODY.replace(b"flowId", b"flowID"),
        BODY.replace(b'"f"', b"7"),
        BODY.replace(b'"paused":false', b'"paused":false,"more":1'),
        BODY.replace(b'"paused":false', b'"paused":0'),
        BODY.replace(b"30 2", b"30 25"),
        BODY.replace(b"Berlin", b"Atlantis"),
        BODY.replace(b'"gap":"run"', b'"gap":"walk"'),
        BODY.replace(b',"gap":"run"', b""),
        BODY.replace(b"60000", b"60000.5"),
        BODY.replace(b"60000", b"-1"),
        BODY.replace(b'"latest"', b'"newest"'),
        BODY.replace(b'"latest"', b"0"),
        EVERY.replace(b'"everyMs":60000', b'"everyMs":999'),
        EVERY.replace(b'"everyMs":60000', b'"everyMs":"60000"'),
        EVERY.replace(b'"everyMs":60000', b'"everyMs":1' + b"0" * 5000),
        EVERY.replace(b'"anchorMs":0', b'"anchorMs":1.5'),
        EVERY.replace(b'{"everyMs":60000,"anchorMs":0}', b'[1,"cron"]'),
        EVERY.replace(b'{"everyMs":60000,"anchorMs":0}', b'"cron"'),
    ],
)
def test_a_damaged_body_is_a_storage_fault_that_names_the_schedule(body: bytes) -> None:
    assert body not in (BODY, EVERY)
    with pytest.raises(
        lf.StoreReadError, match=r"^schedule 'nightly': its definition cannot be read: "
    ) as fault:
        ScheduleDefinition.from_body("nightly", body, 0, 1)
    assert len(str(fault.value)) < 900


@given(st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_body_with_any_byte_changed_is_read_or_refused(data: st.DataObject) -> None:
    body = bytearray(data.draw(st.sampled_from([BODY, EVERY])))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = ScheduleDefinition.from_body("s", bytes(body), 0, 1)
    except lf.StoreReadError:
        return
    assert ScheduleDefinition.from_body("s", read.to_body(), 0, 1) == read


# --- what it costs -------------------------------------------------------------------------------


def test_importing_loomfast_imports_no_cron_and_no_zones() -> None:
    costly = {"cronsim", "zoneinfo", "loomfast._core.cron"}
    ask = f"import sys, loomfast; print({costly} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"
