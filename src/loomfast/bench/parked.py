"""Benchmarks of many parked executions: starting them, listing a page, waking a thousand of them.

What lives here: measuring a few parked executions against many of them. What must not: limits (cases). The
pages have to be the right ones, and all that are woken have to end with their effect run once, before any of
it counts.

Each number of executions has a process of its own, on a fresh database, so that its memory can be told; the
rounds of the two take turns. Memory is what the system says is resident (RSS): whatever grows counts, also
the buffers of the driver, which no counter inside Python sees.

Run as `python -m loomfast.bench.parked PLACE NUMBER WOKEN ROUNDS`, it is such a process: it parks so many,
and plays a round for each line that it is sent.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from functools import lru_cache
from time import perf_counter
from typing import Any

import loomfast as lf
from loomfast.bench import logs
from loomfast.bench.memory import resident_bytes
from loomfast.stores import EventStore

AT_ONCE = 100
PAGE = 100
# What is measured in seconds, and in bytes.
TIMES = ("start", "front", "middle", "end", "idle", "passed", "wake")
MEMORY = ("parked", "woken")
# How many are started in each round.
STARTED = 1_000
# How often what takes microseconds is repeated; the fastest counts.
_REPEATS = 10
_DAY_MS = 24 * 60 * 60 * 1_000
_FAR_MS = 10_000 * _DAY_MS


def on_sqlite(few: int, many: int, woken: int, rounds: int, kinds: Iterable[str]) -> dict[str, float]:
    """Return what is measured of `kinds` for `few` executions and for `many`, on SQLite with `FULL`.

    In seconds: a start with a chosen id; a page at the front, in the middle and at the end of the listing;
    a look that finds nothing due; a wake until the last of `woken` has its gate passed, and until they have
    all ended. In bytes: the process with all of them parked, and after the wakes.
    """
    measured = _on_sqlite(few, many, woken, rounds)
    return {name: value for name, value in measured.items() if name.split()[0] in kinds}


def on_postgres(few: int, many: int, woken: int, rounds: int) -> dict[str, float]:
    """Return the seconds of the same on a PostgreSQL server of its own.

    Raises `ImportError` where no server is to be had.
    """
    import asyncpg  # noqa: F401  # so that a missing driver is known before a server is started

    from loomfast.testing.postgres import PostgresServer, PostgresServerError

    try:
        server = PostgresServer()
    except PostgresServerError as error:
        raise ImportError(str(error)) from error
    with server:
        measured = _compared({few: server.dsn, many: server.dsn}, woken, rounds)
    return {name: value for name, value in measured.items() if name.split()[0] in TIMES}


@lru_cache(maxsize=2)  # two cases are judged by it, and to park a million takes minutes
def _on_sqlite(few: int, many: int, woken: int, rounds: int) -> dict[str, float]:
    # In the working folder: the system's one for temporary files is often kept in memory, where FULL is free.
    with tempfile.TemporaryDirectory(prefix="loomfast-bench-", dir=os.getcwd()) as folder:
        places = {number: os.path.join(folder, f"{number}.db") for number in (few, many)}
        return _compared(places, woken, rounds)


def _compared(places: dict[int, str], woken: int, rounds: int) -> dict[str, float]:
    """The best of each part and number, the processes taking turns."""
    best: dict[str, float] = {}
    with ExitStack() as stack:
        processes = {
            number: stack.enter_context(_Process(place, number, woken, rounds))
            for number, place in places.items()
        }
        for _ in range(1 + rounds):
            for number, process in processes.items():
                for part, figure in process.play().items():
                    name = f"{part} {number}"
                    # Of the memory it is the last that counts: after everything that could have grown it.
                    best[name] = figure if part in MEMORY else min(best.get(name, figure), figure)
    return best


class _Process:
    """A process with its parked executions. The first `play` parks them, each further one is a round."""

    def __init__(self, place: str, *numbers: int) -> None:
        command = [sys.executable, "-m", "loomfast.bench.parked", place, *map(str, numbers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def play(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("on\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the process with the parked executions ended with {self._process.wait()}")
        figures: dict[str, float] = lf.decode(line.encode())
        if "fault" in figures:
            raise AssertionError(figures["fault"])
        return figures

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


# --- in the process ------------------------------------------------------------------------------

_ran: Counter[int] = Counter()


@lf.step
async def note(number: int) -> None:
    _ran[number] += 1


@lf.flow
async def waiting(ctx: lf.WorkflowContext, input: Any) -> None:
    number, wake_at = input
    await ctx.suspend("answer", wake_at=wake_at)
    await ctx.run(note, number)


class _Clock(lf.SystemClock):
    """The machine's clock, which can be set ahead."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


class _Parked:
    """So many parked executions in a store, `woken` of them due on each of the next days."""

    def __init__(self, store: EventStore, runtime: lf.WorkflowRuntime, clock: _Clock, number: int) -> None:
        self._store = store
        self._runtime = runtime
        self._clock = clock
        self._begun_ms = clock.now_ms()
        self._far_ms = self._begun_ms + _FAR_MS
        self._number = number
        self._started = 0
        self._woken = self._ended = 0
        self._all_ended = asyncio.Event()
        runtime.on_rest(self._rested)

    async def park(self, woken: int, rounds: int) -> dict[str, float]:
        """Start them all, those of a day spread evenly among the others."""
        between = self._number // woken
        assert rounds <= between
        assert self._number % woken == 0
        days = {day: self._begun_ms + (day + 1) * _DAY_MS for day in range(rounds)}
        await self._start(self._number, lambda number: days.get(number % between, self._far_ms))
        return {"parked": _resident()}

    async def _start(self, count: int, wake_at: Callable[[int], int]) -> None:
        """Start so many more, under ids that come in no order, as if customers had chosen them."""
        numbers = iter(range(self._started, self._started + count))
        self._started += count

        async def client() -> None:
            for number in numbers:
                input = [number, wake_at(number)]
                handle = await self._runtime.start(waiting, input, execution_id=_id_of(number))
                await handle.rest()

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))

    async def play(self, round_: int, woken: int) -> dict[str, float]:
        """Start some more, list, look, and wake those that are due on the day of this round."""
        begun = perf_counter()
        await self._start(STARTED, lambda number: self._far_ms)
        figures = {
            "start": (perf_counter() - begun) / STARTED,
            "front": await self._page(0),
            "middle": await self._page(self._number // 2),
            "end": await self._page(self._number - PAGE),
        }
        async with _service(self._runtime) as service:
            figures["idle"] = await _fastest(service.tick)
            _ran.clear()
            self._woken, self._ended = woken, 0
            self._all_ended.clear()
            self._clock.ahead_ms = round_ * _DAY_MS
            begun = perf_counter()
            await service.tick()
            figures["passed"] = (perf_counter() - begun) / woken
            await self._all_ended.wait()
            figures["wake"] = (perf_counter() - begun) / woken
        await self._check(round_, woken)
        return figures | {"woken": _resident()}

    async def _page(self, after: int) -> float:
        """The seconds of a page, once it is known to be the one that stands there."""

        async def read() -> list[Any]:
            return await self._store.list_executions(status="suspended", after=after, limit=PAGE)

        page = await read()
        if len(page) != PAGE or any(one.status != "suspended" or one.position <= after for one in page):
            raise AssertionError(f"the page behind {after} holds what does not belong there")
        return await _fastest(read)

    async def _check(self, round_: int, woken: int) -> None:
        between = self._number // woken
        due = range(round_ - 1, self._number, between)
        if _ran != Counter(due):
            raise AssertionError(f"{len(_ran)} effects ran {_ran.total()} times for {woken} that were due")
        ended = [await self._runtime.load_state(_id_of(number)) for number in due]
        if any(state is None or state.status != "completed" for state in ended):
            raise AssertionError("one that was woken has not completed")

    def _rested(self, execution_id: str, state: lf.State | None) -> None:
        if state is not None and state.ended is not None:
            self._ended += 1
            if self._ended == self._woken:
                self._all_ended.set()


def _id_of(number: int) -> str:
    return f"order-{logs.spread(number + 1):016x}"


def _resident() -> int:
    gc.collect()
    return resident_bytes()


async def _fastest(call: Any) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        begun = perf_counter()
        await call()
        best = min(best, perf_counter() - begun)
    return best


@asynccontextmanager
async def _service(runtime: lf.WorkflowRuntime) -> AsyncIterator[lf.TimerService]:
    """A timer service that looks when it is told to, and not by itself."""
    service = lf.TimerService(runtime)
    try:
        yield service
    finally:
        await service.close()


async def _opened(place: str, number: int) -> EventStore:
    if place.startswith("postgres"):
        from loomfast.stores import PostgresEventStore

        return await PostgresEventStore.open(place, schema=f"parked_{number}")
    return await lf.SqliteEventStore.open(place)


async def _serve(place: str, number: int, woken: int, rounds: int) -> None:
    clock = _Clock()
    async with await _opened(place, number) as store, lf.WorkflowRuntime(store, clock=clock) as runtime:
        parked = _Parked(store, runtime, clock, number)
        for round_ in range(1 + rounds):
            if not sys.stdin.readline():
                return
            try:
                figures: dict[str, Any]
                figures = await (parked.play(round_, woken) if round_ else parked.park(woken, rounds))
            except AssertionError as error:
                figures = {"fault": str(error)}
            print(lf.encode(figures).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], *map(int, sys.argv[2:])))
