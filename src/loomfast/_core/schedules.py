"""When a schedule is due, and which of its occurrences are started: triggers, catch-up, and their ids.

What lives here: what a schedule is, as a value and as the JSON a store keeps. What must not: clocks, stores,
how an occurrence is started once over all nodes (`_nodes/occurrences.py`). How a cron expression meets the
changes of a zone's clocks is `cron.py`'s to say.

Invariant: an occurrence is an instant that follows from the trigger alone. When it is looked for, from where,
and in which direction change nothing about it, so its id is the same on every node and after any restart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice, takewhile
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

from loomfast._core import cron
from loomfast._core.arguments import shown, text_argument
from loomfast._errors import BadInputError, StoreReadError
from loomfast._kernels import decode, encode

CatchUp: TypeAlias = Literal["skip", "latest"] | int

# How many occurrences `due` returns at most: under "skip", and under any number.
MOST_ON_TIME: Final = 100
MOST_CAUGHT_UP: Final = 1_000

_EPOCH: Final = datetime(1970, 1, 1)
_MS: Final = timedelta(milliseconds=1)
# The years 1 to 9999, which have dates.
_EARLIEST_MS: Final = (datetime.min - _EPOCH) // _MS
_LATEST_MS: Final = (datetime.max - _EPOCH) // _MS

_OCCURRENCE = re.compile(
    r"(.+)@([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{3})?)Z", re.DOTALL
)
_MEMBERS: Final = {"flowId", "input", "trigger", "catchUp", "graceMs", "paused"}


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression in a time zone.

    `expression` has five fields, or six with seconds first; `tz` is an IANA name. Where clocks are changed it
    goes by the rules of Debian's cron (`docs/schedules.md`); `gap` says what becomes of a fixed local time
    that a change skips: it runs at the gap's end, or not at all. Raises `BadInputError` for an expression
    that cannot be read or never comes (31 February), and for an unknown zone.
    """

    expression: str
    tz: str = "UTC"
    gap: Literal["run", "skip"] = "run"

    def __post_init__(self) -> None:
        if not isinstance(self.gap, str) or self.gap not in ("run", "skip"):
            raise BadInputError(f"gap {shown(self.gap)}: must be 'run' or 'skip'")
        cron.check(self.expression, self.tz)

    def after(self, at_ms: int) -> int | None:
        """Return the first occurrence strictly after an instant, or None."""
        if not _has_date("at_ms", at_ms):
            return None
        at_s = self._walk().after(at_ms // 1000)
        return None if at_s is None else at_s * 1000

    def back_from(self, now_ms: int) -> Iterator[int]:
        """Yield the occurrences up to and with an instant, latest first."""
        if not _has_date("now_ms", now_ms):
            return iter(())
        return (at_s * 1000 for at_s in self._walk().back_from(now_ms // 1000))

    def _walk(self) -> cron.CronWalk:
        return cron.CronWalk(self.expression, self.tz, skips_gaps=self.gap == "skip")


@dataclass(frozen=True, slots=True)
class Every:
    """Every so many seconds, whatever clocks say: `anchor_ms + n * seconds` for whole n from 0.

    `seconds` is at least 1 and a whole number of milliseconds, `anchor_ms` an instant.
    """

    seconds: float
    anchor_ms: int = 0

    def __post_init__(self) -> None:
        _milliseconds("seconds", self.seconds, 1)
        if not _has_date("anchor_ms", self.anchor_ms):
            raise BadInputError(f"anchor_ms {shown(self.anchor_ms)}: must lie in the years 1 to 9999")

    def after(self, at_ms: int) -> int | None:
        """Return the first occurrence strictly after an instant, or None."""
        if not _has_date("at_ms", at_ms):
            return None
        step = round(self.seconds * 1000)
        at_ms = self.anchor_ms + max(0, (at_ms - self.anchor_ms) // step + 1) * step
        return at_ms if at_ms <= _LATEST_MS else None

    def back_from(self, now_ms: int) -> Iterator[int]:
        """Yield the occurrences up to and with an instant, latest first."""
        if not _has_date("now_ms", now_ms):
            return iter(())
        step = round(self.seconds * 1000)
        newest = now_ms - (now_ms - self.anchor_ms) % step
        return iter(range(newest, self.anchor_ms - 1, -step))


Trigger: TypeAlias = Cron | Every


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDefinition:
    """A schedule: which flow it starts, with which input, when, and what becomes of what was missed.

    `next_ms` is its mark: the earliest occurrence that has not been started; None while it is `paused`, and
    once the trigger never comes again. `catch_up` says which of the occurrences from the mark until now are
    started:

    - `"latest"`: the newest only;
    - a number up to 1,000: so many of the newest at most;
    - `"skip"`: those not older than `grace_s`, which count as on time; at most the newest 100.

    `input` is kept as its JSON form. Raises `BadInputError` for anything that is no schedule.
    """

    schedule_id: str
    flow_id: str
    input: Any
    trigger: Trigger
    catch_up: CatchUp = "latest"
    grace_s: float = 60.0
    next_ms: int | None
    paused: bool
    version: int = 0

    def __post_init__(self) -> None:
        text_argument("schedule_id", self.schedule_id)
        text_argument("flow_id", self.flow_id)
        object.__setattr__(self, "input", decode(encode(self.input)))
        if not isinstance(self.trigger, Cron | Every):
            raise BadInputError(f"trigger {shown(self.trigger)}: must be a Cron or an Every")
        _check_catch_up(self.catch_up)
        _milliseconds("grace_s", self.grace_s, 0)
        if not isinstance(self.paused, bool):
            raise BadInputError(f"paused {shown(self.paused)}: must be True or False")
        if self.next_ms is not None:
            _whole("next_ms", self.next_ms)
            if self.paused:
                raise BadInputError(f"next_ms {shown(self.next_ms)}: must be None, the schedule is paused")
        _whole("version", self.version)
        if self.version < 0:
            raise BadInputError(f"version {shown(self.version)}: must be 0 or more")

    def to_body(self) -> bytes:
        """Return the body that a store keeps: JSON, without the schedule's id, mark and version."""
        trigger = self.trigger
        return encode(
            {
                "flowId": self.flow_id,
                "input": self.input,
                "trigger": {"cron": trigger.expression, "tz": trigger.tz, "gap": trigger.gap}
                if isinstance(trigger, Cron)
                else {"everyMs": round(trigger.seconds * 1000), "anchorMs": trigger.anchor_ms},
                "catchUp": self.catch_up,
                "graceMs": round(self.grace_s * 1000),
                "paused": self.paused,
            }
        )

    @classmethod
    def from_body(cls, schedule_id: str, body: bytes, next_ms: int | None, version: int) -> Self:
        """Return the schedule that a store keeps.

        Raises `StoreReadError`, which names the schedule, for a body that `to_body` does not write, and for a
        zone that this machine does not know.
        """
        try:
            fields = decode(body)
            _exactly(fields, _MEMBERS)
            return cls(
                schedule_id=schedule_id,
                flow_id=fields["flowId"],
                input=fields["input"],
                trigger=_trigger(fields["trigger"]),
                catch_up=fields["catchUp"],
                grace_s=_seconds(fields["graceMs"]),
                next_ms=next_ms,
                paused=fields["paused"],
                version=version,
            )
        except BadInputError as error:
            raise StoreReadError(
                None, f"schedule {shown(schedule_id)}: its definition cannot be read: {error}"
            ) from error

    def due(self, now_ms: int) -> list[int]:
        """Return the occurrences to start now, oldest first, as `catch_up` says.

        Walks back from now, so its work is bounded by how many it returns, not by how long nobody looked.
        What it leaves out is not to be made up for: the mark goes on to `after(now_ms)`. Empty outside of the
        years 1 to 9999.
        """
        if not _has_date("now_ms", now_ms) or self.next_ms is None or now_ms < self.next_ms:
            return []
        oldest, most = self.next_ms, 1
        if self.catch_up == "skip":
            oldest, most = max(oldest, now_ms - round(self.grace_s * 1000)), MOST_ON_TIME
        elif self.catch_up != "latest":
            most = self.catch_up
        missed = takewhile(lambda at_ms: at_ms >= oldest, self.trigger.back_from(now_ms))
        return [*islice(missed, most)][::-1]

    def after(self, at_ms: int) -> int | None:
        """Return the first occurrence strictly after an instant, or None.

        None where the trigger has no further one (within 50 years), and outside of the years 1 to 9999.
        """
        return self.trigger.after(at_ms)


class Occurrence(NamedTuple):
    """One occurrence of a schedule: the instant, in ms since the epoch, at which it was to start."""

    schedule_id: str
    at_ms: int


def occurrence_id(schedule_id: str, at_ms: int) -> str:
    """Return the id of the execution that an occurrence starts: `nightly@2026-10-25T00:30:00Z`.

    The instant is in UTC, so the two copies of a repeated hour differ; milliseconds stand there if there are
    any (`00:30:00.500Z`). Raises `BadInputError` for an empty id and outside of the years 1 to 9999.
    """
    text_argument("schedule_id", schedule_id)
    if not _has_date("at_ms", at_ms):
        raise BadInputError(f"at_ms {shown(at_ms)}: must lie in the years 1 to 9999")
    precision = "milliseconds" if at_ms % 1000 else "seconds"
    return f"{schedule_id}@{(_EPOCH + at_ms * _MS).isoformat(timespec=precision)}Z"


def occurrence_of(execution_id: str) -> Occurrence | None:
    """Return the occurrence that an execution is of; None for an id that `occurrence_id` does not make."""
    match = _OCCURRENCE.fullmatch(execution_id)
    if match is None:
        return None
    try:
        at_ms = (datetime.fromisoformat(match[2]) - _EPOCH) // _MS
    except ValueError:
        return None  # the 30th of February
    occurrence = Occurrence(match[1], at_ms)
    return occurrence if occurrence_id(*occurrence) == execution_id else None


def _whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadInputError(f"{name} {shown(value)}: must be a whole number")


def _has_date(name: str, at_ms: int) -> bool:
    _whole(name, at_ms)
    return _EARLIEST_MS <= at_ms <= _LATEST_MS


def _milliseconds(name: str, seconds: object, least: int) -> None:
    """Refuse what is not a time in seconds that is a whole number of milliseconds."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise BadInputError(f"{name} {shown(seconds)}: must be a number of seconds")
    if not least <= seconds <= _LATEST_MS // 1000:
        raise BadInputError(
            f"{name} {shown(seconds)}: must be {least} or more, and no longer than 8,000 years"
        )
    if round(seconds * 1000) / 1000 != seconds:
        raise BadInputError(f"{name} {shown(seconds)}: must be a whole number of milliseconds")


def _check_catch_up(catch_up: object) -> None:
    if isinstance(catch_up, str):
        known = catch_up in ("skip", "latest")
    else:
        known = isinstance(catch_up, int) and catch_up is not True and 1 <= catch_up <= MOST_CAUGHT_UP
    if not known:
        raise BadInputError(
            f"catch_up {shown(catch_up)}: must be 'skip', 'latest', or a number from 1 to {MOST_CAUGHT_UP:,}"
        )


def _trigger(fields: Any) -> Trigger:
    if isinstance(fields, dict) and "cron" in fields:
        _exactly(fields, {"cron", "tz", "gap"})
        return Cron(fields["cron"], fields["tz"], fields["gap"])
    _exactly(fields, {"everyMs", "anchorMs"})
    return Every(_seconds(fields["everyMs"]), fields["anchorMs"])


def _seconds(ms: Any) -> float:
    _whole("a time in ms", ms)
    if not 0 <= ms <= _LATEST_MS:
        raise BadInputError(f"a time in ms {shown(ms)}: must be 0 or more, and no longer than 8,000 years")
    return float(ms / 1000)


def _exactly(fields: Any, members: set[str]) -> None:
    """Refuse what is not an object of these members: one that is missing was lost, one more is not ours."""
    if not isinstance(fields, dict) or set(fields) != members:
        raise BadInputError(f"{shown(fields)}: must be an object of {', '.join(sorted(members))}")
