"""Which instants a cron expression names in a time zone: the walk over them, forwards and backwards.

What lives here: reading an expression and a zone's name, and the walk. What must not: which occurrences are
started, clocks. Only `schedules.py` imports this file.

Theory of operation
-------------------
cronsim knows the calendar: it says which local times, without a zone, an expression names. This file lays
them on the time line. Between two changes of a zone's clocks local and real time differ by a constant, so the
walk goes stretch by stretch: it takes local times from cronsim while they fall into the stretch, then starts
again in the next one. Stretches meet in one of two ways:

    Europe/Berlin, 2026-10-25: 03:00 +02:00 becomes 02:00 +01:00     02:00-03:00 comes twice
    Europe/Berlin, 2026-03-29: 02:00 +01:00 becomes 03:00 +02:00     02:00-03:00 does not come: a gap

An expression *follows real time* if its minute or hour field begins with a star: what comes twice runs twice,
what does not come does not run. Any other names *fixed* times, and they run once: the second copy is passed
over, and what fell into a gap runs once at its end (or, with `gap="skip"`, not at all). These are the rules
of Debian's cron; the form with seconds has the same.

    30 2 * * *     fixed: 00:30Z on 2026-10-25; 01:00Z, the gap's end, on 2026-03-29
    30 2,3 * * *   fixed: on 2026-03-29 01:00Z, and 01:30Z, which is 03:30 and as real as on any other day
    */30 2 * * *   real:  00:00Z 00:30Z 01:00Z 01:30Z on 2026-10-25; none on 2026-03-29

cronsim has these rules too, but its answers depend on where the walk begins: backwards from the second copy
of an hour it misses the first one's, and changes of half an hour or at midnight throw it off.

Invariants: both directions visit the same instants, each once, in order, wherever they begin. An instant is
whole seconds. The walk ends where datetime's years do.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from loomfast._core.arguments import shown
from loomfast._errors import BadInputError

_EPOCH: Final = datetime(1970, 1, 1)
_SECOND: Final = timedelta(seconds=1)
# No zone has ever changed its clocks and changed them back within three days and a half.
_STRIDE: Final = timedelta(days=2)
# What the calendar has at all, it has within the 50 years for which cronsim looks.
_FROM: Final = datetime(2000, 1, 1)
# What these names mean differs from machine to machine, or counts leap seconds.
_NOT_IANA: Final = ("localtime", "posixrules", "right/", "posix/")


def check(expression: str, tz: str) -> None:
    """Refuse an expression that is none or never comes, and a zone that is not known, by `BadInputError`."""
    if not isinstance(expression, str):
        raise BadInputError(f"cron expression {shown(expression)}: must be a text, such as '30 2 * * *'")
    try:
        comes = any(True for _ in _named(expression, _FROM))
    except (CronSimError, ValueError) as error:
        raise BadInputError(
            f"cron expression {shown(expression)}: {_reason(error)}; write five fields (minute, hour, day of"
            " month, month, day of week), such as '30 2 * * *', or six with seconds first"
        ) from error
    if not comes:
        raise BadInputError(
            f"cron expression {shown(expression)}: no day matches it; correct its days and months"
        )
    if not isinstance(tz, str):
        raise BadInputError(f"tz {shown(tz)}: must be a text, such as 'Europe/Berlin'")
    try:
        if tz.startswith(_NOT_IANA):
            raise ValueError("not a zone's name in the IANA database")
        ZoneInfo(tz)
    except (LookupError, ValueError, TypeError, OSError, ImportError) as error:
        raise BadInputError(
            f"tz {shown(tz)}: no such time zone; write an IANA name, such as 'Europe/Berlin' or 'UTC'"
        ) from error


class CronWalk:
    """The instants, in seconds since the epoch, that a checked expression names in a checked zone."""

    def __init__(self, expression: str, tz: str, *, skips_gaps: bool) -> None:
        minute, hour = expression.split()[-5:-3]
        self._expression = expression
        self._zone = ZoneInfo(tz)
        self._fixed = not (minute.startswith("*") or hour.startswith("*"))
        self._fills_gaps = self._fixed and not skips_gaps

    def after(self, at_s: int) -> int | None:
        """Return the first occurrence strictly after an instant, or None."""
        try:
            found = self._after(_EPOCH + at_s * _SECOND)
        except OverflowError:
            return None  # behind the year 9999
        return None if found is None else _seconds(found)

    def back_from(self, until_s: int) -> Iterator[int]:
        """Yield the occurrences up to and with an instant, latest first."""
        try:
            yield from map(_seconds, self._back_from(_EPOCH + until_s * _SECOND))
        except OverflowError:
            return  # before the year 1

    # Instants are datetimes without a zone, in UTC; so are local times, which are `instant + offset`.

    def _after(self, at: datetime) -> datetime | None:
        since = at + self._offset(at)
        while True:
            offset = self._offset(at)
            change = None
            for local in _named(self._expression, since):
                found = local - offset
                change = self._first_change(at, found)
                if change is not None:
                    break
                if not self._passes_over(found):
                    return found
                at = found
            if change is None or self._ends_gap(change):
                return change
            at, since = change, change + self._offset(change) - _SECOND

    def _back_from(self, at: datetime) -> Iterator[datetime]:
        last = None
        while True:
            offset = self._offset(at)
            change = None
            for local in _named(self._expression, at + offset + _SECOND, reverse=True):
                found = local - offset
                change = self._last_change(found, at)
                if change is not None:
                    break
                at = found
                if not self._passes_over(found):
                    last = found
                    yield found
            if change is None:
                return
            if change != last and self._ends_gap(change):
                yield change
            at = change - _SECOND

    def _offset(self, instant: datetime) -> timedelta:
        return self._local(instant).replace(tzinfo=None) - instant

    def _local(self, instant: datetime) -> datetime:
        return self._zone.fromutc(instant.replace(tzinfo=self._zone))

    def _passes_over(self, instant: datetime) -> bool:
        """Whether a fixed time has come before: this is its second copy."""
        return self._fixed and self._local(instant).fold == 1

    def _ends_gap(self, change: datetime) -> bool:
        """Whether this change ends a gap into which a fixed time fell that is to run now."""
        if not self._fills_gaps:
            return False
        start, end = change + self._offset(change - _SECOND), change + self._offset(change)
        return next(_named(self._expression, start - _SECOND), end) < end

    def _first_change(self, low: datetime, high: datetime) -> datetime | None:
        """Return the first instant behind `low`, up to `high`, at which the clocks are changed."""
        offset = self._offset(low)
        while low < high:
            step = min(low + _STRIDE, high)
            if self._offset(step) != offset:
                return self._change(low, step)
            low = step
        return None

    def _last_change(self, low: datetime, high: datetime) -> datetime | None:
        """Return the last instant behind `low`, up to `high`, at which the clocks are changed."""
        offset = self._offset(high)
        while low < high:
            step = max(high - _STRIDE, low)
            if self._offset(step) != offset:
                return self._change(step, high)
            high = step
        return None

    def _change(self, low: datetime, high: datetime) -> datetime:
        """Halve what lies between two instants with one change between them."""
        offset = self._offset(low)
        while high - low > _SECOND:
            middle = low + (high - low) // _SECOND // 2 * _SECOND
            if self._offset(middle) == offset:
                low = middle
            else:
                high = middle
        return high


def _named(expression: str, local: datetime, *, reverse: bool = False) -> Iterator[datetime]:
    """Yield the local times that an expression names, behind one, or before it."""
    return CronSim(expression, local, reverse)


def _seconds(instant: datetime) -> int:
    return (instant - _EPOCH) // _SECOND


def _reason(error: Exception) -> str:
    """Say in our words what cronsim says as `Bad day-of-month` or `Wrong number of fields`."""
    text = str(error)
    if text == "Bad day-of-month":
        return "its day of the month cannot be read, or does not come in its months"
    if text.startswith("Bad "):
        return f"its field for the {text.removeprefix('Bad ').replace('-', ' ')} cannot be read"
    return "it has the wrong number of fields" if isinstance(error, CronSimError) else "it cannot be read"
