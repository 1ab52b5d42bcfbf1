"""What is due in a store, done in time.

What lives here: `DueLoop`, which looks, hands out what is due, and knows when to look again. What must not:
what is done about it (`timers`, `worker`).

Theory of operation
-------------------
The store knows what is due, in order, at a cost that does not depend on how much is parked. So nothing is
kept here per sleeper. A look reads what is due now, and then the one time at which something is due next; the
loop sleeps until then, or for `poll_s` seconds if that is sooner, and looks again:

    look at 12:00:00.000 → fires A (due 11:59:58), B (12:00:00.000); next is C at 12:00:00.300
    look at 12:00:00.300 → fires C; nothing within a second
    an execution rests here, to be woken at 12:00:00.750: `expect` brings the next look forward
    look at 12:00:00.750 → fires it

What other processes park is seen `poll_s` after at the latest. No wait is longer than that, so it does not
matter how far off a time lies, or that the clock is set; whether something is due is asked of the clock anew.

What is due and cannot be done now stays in the store, and in front. A look therefore goes on behind what the
last one has seen, and starts over from the front every `poll_s`; what failed is left alone for a while
(`BackOff`), so that a thousand executions nobody here can run cost one page a second, and hide nothing.
Gates and schedules come first in turn, since what comes first takes what room there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from logging import DEBUG, WARNING
from typing import TypeAlias, TypeVar

from loomfast._core.arguments import count_argument
from loomfast._errors import BadInputError, RuntimeClosedError
from loomfast._kernels import State
from loomfast._nodes.backoff import BackOff
from loomfast._runtime.clock import Clock, done_within
from loomfast._runtime.hooks import call, logger
from loomfast.stores import ScheduleRow, TimerStore, Wake

Due = TypeVar("Due", Wake, ScheduleRow)
# What is due, whose, and which one of it: another one has not failed yet.
Key: TypeAlias = tuple[str, str, int]

# How many rows one question to the store returns.
PAGE = 500
# Looks are at least so far apart, which is how late something may be done for it.
BETWEEN_LOOKS_S = 0.005
# How long to wait after the store could not be asked, at most.
LONGEST_PAUSE_S = 5.0


def check_period(name: str, seconds: float) -> None:
    """Refuse what is no time between two looks at a store. Raises `BadInputError`."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.01 <= seconds <= 3600:
        raise BadInputError(f"{name}={seconds!r}: must be a number of seconds from 0.01 to 3600")


class DueLoop:
    """Does what is due.

    `fire` is called with each due gate, `begin` with each due schedule, at most `concurrency` of them at a
    time, and never twice at a time for one id. What is still due behind that is offered again at the next
    look from the front. What they raise is passed to `on_error` with the id, and tried again after a pause.
    While there is no room at all (`full`) a look ends where it is; `expect` is to be called once there is.
    """

    def __init__(
        self,
        timers: TimerStore,
        clock: Clock,
        fire: Callable[[Wake], Awaitable[object]],
        begin: Callable[[ScheduleRow], Awaitable[object]],
        *,
        poll_s: float,
        concurrency: int,
        on_error: Callable[[str, Exception], object],
        full: Callable[[], bool] = lambda: False,
    ) -> None:
        check_period("poll_s", poll_s)
        count_argument("concurrency", concurrency)
        self._timers = timers
        self._clock = clock
        self._fire = fire
        self._begin = begin
        self._poll_s = poll_s
        self._on_error = on_error
        self._full = full
        self._schedules_first = True
        self._room = asyncio.Semaphore(concurrency)
        self._busy: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._back_off = BackOff()
        self._seen: tuple[Wake | None, ScheduleRow | None] = (None, None)
        self._front_ms = 0  # when to look from the front again
        self._look_ms = 0  # when to look again at all
        self._earlier: asyncio.Future[None] | None = None
        self.looked_ms: int | None = None  # when a look last succeeded

    def expect(self, at_ms: int) -> None:
        """Something will be due at `at_ms`, perhaps in front of what has been seen."""
        if at_ms <= self._clock.now_ms():
            self._front_ms = 0
        if at_ms >= self._look_ms:
            return
        self._look_ms = at_ms
        if self._earlier is not None and not self._earlier.done():
            self._earlier.set_result(None)

    def expect_wake(self, state: State | None) -> None:
        """An execution has come to rest in this state: expect the time of its gate, if that has one."""
        if state is not None and state.pending is not None and state.pending.wake_at is not None:
            self.expect(state.pending.wake_at)

    @property
    def failing(self) -> int:
        """How many could not go on when they were last tried."""
        return self._back_off.count(self._clock.now_ms())

    async def run(self) -> None:
        """Look, and wait, until cancelled or the runtime is closed. What has begun goes on: see `finish`."""
        pause_s = 0.0
        while True:
            try:
                await self.look()
            except RuntimeClosedError:
                return
            except Exception as error:
                pause_s = min(max(2 * pause_s, self._poll_s), LONGEST_PAUSE_S)
                logger.warning("what is due could not be read: %s: %s", type(error).__name__, error)
                self._front_ms = 0
                await self._clock.sleep(pause_s)
                continue
            pause_s = 0.0
            await self._until_next()

    async def look(self) -> None:
        """Begin all that is due now. Raises what the store raises."""
        now_ms = self._clock.now_ms()
        poll_ms = max(1, int(self._poll_s * 1000))
        wake, schedule = self._seen
        if not 0 < self._front_ms - now_ms <= poll_ms:
            self._front_ms = now_ms + poll_ms
            wake = schedule = None
        self._look_ms = self._front_ms
        if not self._full():
            self._schedules_first = not self._schedules_first
        if self._schedules_first:
            schedule = await self._offer_schedules(now_ms, schedule)
        wake = await self._offer_wakes(now_ms, wake)
        if not self._schedules_first:
            schedule = await self._offer_schedules(now_ms, schedule)
        self._seen = wake, schedule
        if not self._full():
            for next_wake in await self._timers.due_wakes(self._front_ms, after=wake, limit=1):
                self.expect(next_wake.wake_at)
            for next_one in await self._timers.due_schedules(self._front_ms, after=schedule, limit=1):
                self.expect(next_one.next_ms or now_ms)
        self.looked_ms = now_ms

    async def _offer_due(
        self,
        now_ms: int,
        seen: Due | None,
        read: Callable[..., Awaitable[list[Due]]],
        key_of: Callable[[Due], Key],
        do: Callable[[Due], Awaitable[object]],
    ) -> Due | None:
        """Offer what is due behind `seen`, as far as there is room, and return what was seen last."""
        more = True
        while more:
            page = await read(now_ms, after=seen, limit=PAGE)
            for due in page:
                if self._full():
                    return seen
                await self._offer(key_of(due), do, due, now_ms)
                seen = due
            more = len(page) == PAGE
        return seen

    async def _offer_wakes(self, now_ms: int, seen: Wake | None) -> Wake | None:
        return await self._offer_due(now_ms, seen, self._timers.due_wakes, _wake_key, self._fire)

    async def _offer_schedules(self, now_ms: int, seen: ScheduleRow | None) -> ScheduleRow | None:
        return await self._offer_due(now_ms, seen, self._timers.due_schedules, _schedule_key, self._begin)

    async def finish(self) -> None:
        """Wait until what has begun is done."""
        while self._busy:
            await asyncio.wait(tuple(self._busy.values()))

    async def _offer(self, key: Key, do: Callable[[Due], Awaitable[object]], due: Due, now_ms: int) -> None:
        if key[:2] in self._busy or self._back_off.waits(key, now_ms):
            return
        await self._room.acquire()
        self._busy[key[:2]] = asyncio.get_running_loop().create_task(self._do(key, do, due))

    async def _do(self, key: Key, do: Callable[[Due], Awaitable[object]], due: Due) -> None:
        try:
            await do(due)
            self._back_off.succeeded(key)
        except RuntimeClosedError:
            pass  # whoever goes on will look for itself
        except Exception as error:
            level = WARNING if self._back_off.failed(key, self._clock.now_ms()) else DEBUG
            message = "%s %r is due and could not go on: %s: %s"
            logger.log(level, message, *key[:2], type(error).__name__, error)
            call(partial(self._on_error, key[1]), error)
        finally:
            del self._busy[key[:2]]
            self._room.release()

    async def _until_next(self) -> None:
        await self._clock.sleep(BETWEEN_LOOKS_S)  # so that a thousand timers a second are not as many looks
        left_ms = self._look_ms - self._clock.now_ms()
        if left_ms <= 0:
            return
        self._earlier = asyncio.get_running_loop().create_future()
        try:
            await done_within(self._clock, min(left_ms / 1000, self._poll_s), self._earlier)
        finally:
            self._earlier = None


def _wake_key(wake: Wake) -> Key:
    return "gate", wake.execution_id, wake.wake_at


def _schedule_key(schedule: ScheduleRow) -> Key:
    return "schedule", schedule.schedule_id, schedule.version
