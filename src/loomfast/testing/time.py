"""Virtual time: an event loop whose clock jumps, and everything random drawn from one seed.

What lives here: `run_virtual`, which runs a coroutine on such a loop; `VirtualLoop`, the loop;
`VirtualClock`, its time as a loomfast `Clock`; seeded entropy and counted ids. What must not: anything about
flows or stores.

Theory of operation
-------------------
*Time.* When nothing is ready the loop does not wait for its next timer, it moves its clock there. An hour of
`asyncio.sleep` costs a microsecond, and two timers are always due in the order of their times.

*Order.* A program of one thread has one freedom left: in which order tasks go on that became ready at the
same instant. asyncio takes them first come, first served; a seed other than 0 shuffles them. Only tasks that
wake up from WAITING are shuffled, since when an answer arrives is a matter of the outside. The first step of
a task, a bare `sleep(0)` and plain callbacks keep their places, for programs may rely on those: the keys of
two steps in a `gather` follow from the order in which their tasks begin. So the same seed gives the same
interleaving, and an interleaving that fails is replayed by its seed.

*Threads* live in real time. Two rules keep them from spoiling the above. Outside work runs one piece at a
time, in the order asked for: `outside()` is a turn, and the loop's executor takes one for each function. And
while a piece of outside work is under way the loop does nothing else until it hears from it, so that it takes
no virtual time and its answer always comes at the same place:

    ready: A, B     outside work: asked for by A
    A runs          → the work starts in its thread
    B runs
    (waits, in real time, for a call from the thread)
    the answer is delivered, then whatever A and B made ready

A call from a thread that nobody took a turn for is refused: time may have run past it, and nothing would
replay it. Sockets and pipes are refused for the same reason. When nothing is ready, no timer is set and no
outside work is under way, nothing can ever happen again: that is an error, not a hang.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import Context
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from loomfast._errors import LoomError

T = TypeVar("T")

# When virtual time begins, unless told otherwise: a moment of the year 2026, in ms since the epoch.
START_MS = 1_790_000_000_000
# Two moments as close as this are one.
RESOLUTION_S = 1e-6
# How long, in real seconds, outside work may keep a loop that has nothing else to do.
STALL_S = 60.0
# How long it may keep one that has: it may be waiting for what the loop would do next.
PATIENCE_S = 0.5


class VirtualTimeError(LoomError):
    """The program does what cannot be repeated under virtual time, or can never go on."""

    code = "virtual-time"
    hint = "Wrap what answers from another thread in `async with loop.outside()`."


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop under virtual time; see the top of this file.

    `time()` starts at 0 and is in seconds; `start_ms` is the wall-clock time (ms) at that moment. `seed` 0
    keeps asyncio's own order.
    """

    def __init__(self, *, seed: int = 0, start_ms: int = START_MS) -> None:
        self.seed = seed
        self.start_ms = start_ms
        self._virtual_s = 0.0
        self._order = random.Random(seed) if seed else None
        self._arrivals: SimpleQueue[asyncio.Handle] = SimpleQueue()
        self._turns: deque[Callable[[], object]] = deque()
        self._turn_taken = False
        self._owed = False  # whether the outside work of this turn has yet to be heard of
        self._orphan = False  # whether whoever asked for it has gone
        self._in_thread = False  # whether it is a function in a thread, which may call more than once
        self._pool: VirtualExecutor | None = None
        self._owner = threading.get_ident()
        self._refused: VirtualTimeError | None = None
        super().__init__(_JumpSelector(self))
        # A timer is due within this of now; in a distant year, floats are no finer.
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        return self._virtual_s

    def now_ms(self) -> int:
        """Return the virtual wall-clock time in whole milliseconds."""
        return self.start_ms + round(self._virtual_s * 1_000_000) // 1_000

    # --- outside work ----------------------------------------------------------------------------

    @asynccontextmanager
    async def outside(self) -> AsyncIterator[None]:
        """Take the one turn of outside work: what is awaited inside is answered from another thread."""
        if self._turn_taken:
            turn = self.create_future()
            self._turns.append(lambda: self._hand_over(turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.turn_over()
                raise
        self._turn_taken = self._owed = True
        try:
            yield
        except asyncio.CancelledError:
            self._orphan = self._owed  # the answer is still to come, and the turn ends with it
            raise
        finally:
            if not self._orphan:
                self.turn_over()

    def take_turn(self, start: Callable[[], bool]) -> None:
        """Call `start` when it is its turn. It returns whether it set a thread to work, which then ends with
        `turn_over`, called on the loop.
        """

        def turn() -> None:
            self._turn_taken = self._owed = self._in_thread = True
            if not start():
                self.turn_over()

        if self._turn_taken:
            self._turns.append(turn)
        else:
            turn()

    def _hand_over(self, turn: asyncio.Future[None]) -> None:
        if turn.done():  # whoever waited for it has been cancelled
            self.turn_over()
        else:
            turn.set_result(None)

    def turn_over(self) -> None:
        """Give the turn to the next who waits for it."""
        self._owed = self._orphan = self._in_thread = False
        self._turn_taken = bool(self._turns)
        if self._turns:
            self._turns.popleft()()

    def executor(self) -> VirtualExecutor:
        """Return the loop's executor: real threads, each function in a turn of its own."""
        if self._pool is None:
            self._pool = VirtualExecutor(self)
        return self._pool

    def run_in_executor(  # type: ignore[override]  # asyncio types its variadic arguments one by one
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        return asyncio.wrap_future(self.executor().submit(func, *args), loop=self)

    def call_soon_threadsafe(  # type: ignore[override]  # likewise
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        if threading.get_ident() == self._owner:
            return self.call_soon(callback, *args, context=context)
        if not self._turn_taken and self._refused is None:
            self._refused = VirtualTimeError(
                f"thread {threading.current_thread().name!r} called {callback!r} outside of any turn: it "
                "answers in real time, and the same seed would not give the same run"
            )
        handle = asyncio.Handle(callback, args, self, context)
        self._arrivals.put(handle)
        return handle

    # --- what happens between two passes ---------------------------------------------------------

    def _between(self, timeout: float | None) -> None:
        """Decide what comes next: hear from outside, shuffle, or let time jump."""
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]  # asyncio has no other door
        if self._turn_taken and (self._owed or timeout != 0):
            # With something to do besides, wait only so long: the thread may need just that.
            patient = timeout != 0 and not self._orphan
            self._hear(ready, STALL_S if patient else PATIENCE_S, idle=timeout != 0)
        elif self._turn_taken:
            pass  # the answer has been heard and is on its way to whoever holds the turn
        elif self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        elif timeout is None:
            raise VirtualTimeError(
                "nothing is ready, no timer is set and no outside work is under way: the program waits for "
                "something that can never happen"
            )
        else:
            self._virtual_s += timeout
        if self._order is not None and len(ready) > 1:
            self._shuffle(ready, self._order)

    def _hear(self, ready: deque[asyncio.Handle], seconds: float, *, idle: bool) -> None:
        """Wait for one call from outside; one at a time, so that it does not matter how fast they come."""
        try:
            ready.append(self._arrivals.get(timeout=seconds))
            self._owed = self._in_thread
        except Empty:
            if idle and not self._orphan:
                raise VirtualTimeError(
                    f"outside work has not answered within {seconds:g} real seconds"
                ) from None
        if self._orphan:
            self.turn_over()

    @staticmethod
    def _shuffle(ready: deque[asyncio.Handle], order: random.Random) -> None:
        """Shuffle each unbroken stretch of tasks that wake up; everything else keeps its place."""
        handles = list(ready)
        first = 0
        while first < len(handles):
            last = first
            while last < len(handles) and _wakes_a_task(handles[last]):
                last += 1
            if last - first > 1:
                stretch = handles[first:last]
                order.shuffle(stretch)
                handles[first:last] = stretch
            first = last + 1
        ready.clear()
        ready.extend(handles)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        super().close()


def _wakes_a_task(handle: asyncio.Handle) -> bool:
    callback: Any = handle._callback  # type: ignore[attr-defined]  # asyncio names its owner nowhere else
    return isinstance(getattr(callback, "__self__", None), asyncio.Task) and "wakeup" in getattr(
        callback, "__name__", ""
    )


class _JumpSelector(selectors.DefaultSelector):
    """Never waits: what happens between two passes is the loop's to decide."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self.get_map():  # what is there already is the loop's own wake-up pipe
            raise VirtualTimeError("a socket or pipe answers in real time: it cannot be waited for here")
        return super().register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop._between(timeout)
        return []


class VirtualExecutor(Executor):
    """Runs functions in a real thread, one at a time, while virtual time stands still."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loomfast-virtual")

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        outcome: Future[T] = Future()

        def work() -> None:
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                failure = error
            self._loop.call_soon_threadsafe(self._finish, outcome, result, failure)

        def start() -> bool:
            if not outcome.set_running_or_notify_cancel():
                return False
            self._pool.submit(work)
            return True

        self._loop.take_turn(start)
        return outcome

    def _finish(self, outcome: Future[Any], result: object, failure: BaseException | None) -> None:
        # On the loop, so that the one call from the thread carries everything that follows from it.
        if failure is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(failure)
        self._loop.turn_over()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


class VirtualClock:
    """The virtual time of the running loop, as a loomfast `Clock`."""

    def now_ms(self) -> int:
        return running_loop().now_ms()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def running_loop() -> VirtualLoop:
    """Return the running loop; raises `VirtualTimeError` unless it is under virtual time."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise VirtualTimeError(f"{type(loop).__name__} is not under virtual time; start with run_virtual")
    return loop


def run_virtual(coro: Coroutine[Any, Any, T], *, seed: int = 0, start_ms: int = START_MS) -> T:
    """Run a coroutine under virtual time and return its result; the same seed gives the same run.

    As `asyncio.run` it cancels what is left over at the end. Raises `VirtualTimeError` when the program waits
    for what can never happen or cannot be repeated, `RuntimeError` from within a running loop.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed=seed, start_ms=start_ms)) as runner:
        return runner.run(coro)


def seeded_entropy(seed: int) -> Callable[[int], bytes]:
    """Return a source of bytes for `WorkflowRuntime(entropy=…)` that a seed repeats."""
    return random.Random(seed).randbytes


def counted_ids(prefix: str = "exec") -> Callable[[], str]:
    """Return an id factory: `prefix-1`, `prefix-2`, …"""
    count = itertools.count(1)
    return lambda: f"{prefix}-{next(count)}"
