"""How a store's threads and the callers' event loops meet.

What lives here: `Call`, one awaited request; `deliver`, which answers many calls with one wake-up per event
loop; `Worker`, a thread that serves calls from a queue. What must not: SQL.

Theory of operation. A caller makes a `Call`, puts it into a worker's queue and awaits the call's future.
Only the loop that owns a future touches it: the worker hands `(call, outcome)` pairs to that loop with
`call_soon_threadsafe`. An outcome that is an error travels as the future's *result* and is raised by the
awaiting coroutine, so a caller that was cancelled leaves no exception that nobody retrieves.

Workers are not daemons: what was queued before `stop` is finished, also at the end of the program. A store
that was never closed would then keep the process alive, so one small daemon thread waits for the main
thread to end and stops the workers that are left.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Final

# How many callers are answered before the event loop gets its turn.
ANSWERS_A_TURN: Final = 8


class Call:
    """One request, made on the event loop that awaits its answer."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    async def answer(self) -> Any:
        """Wait for the outcome; raise it if it is an error. Cancelling does not recall the request."""
        outcome = await self.future
        del self.future  # an error's traceback may lead to this call; it must not lead back to the error
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome  # or the traceback and this frame would keep each other alive
        return outcome


def deliver(outcomes: Iterable[tuple[Call, Any]]) -> None:
    """Answer calls from a worker thread. Those whose loop is closed are dropped: nobody waits there."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, Any]]] = defaultdict(list)
    for call, outcome in outcomes:
        by_loop[call._loop].append((call, outcome))
    for loop, answered in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, loop, iter(answered))
        except RuntimeError:
            if not loop.is_closed():
                raise


def _settle(loop: asyncio.AbstractEventLoop, answered: Iterator[tuple[Call, Any]]) -> None:
    """Answer some, and the others in the loop's next turn: each has work to do, and more waits beside it."""
    for left, (call, outcome) in zip(reversed(range(ANSWERS_A_TURN)), answered, strict=False):
        if not call.future.done():  # done already: its caller was cancelled
            call.future.set_result(outcome)
        if not left:
            loop.call_soon(_settle, loop, answered)


class Worker(ABC):
    """A thread, or a few, that serve calls in the order they were submitted.

    A thread's connection lives in the local variables of `run` only. A forked child has no such thread, so
    there nothing can use the connection or close it.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self.queue: SimpleQueue[Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        self._threads = [threading.Thread(target=self.run, name=name, daemon=False) for _ in range(threads)]

    def start(self) -> None:
        _stop_at_exit(self)
        for thread in self._threads:
            thread.start()

    def submit(self, call: Call) -> bool:
        """Queue a call. False when the worker has been stopped: it will not be served."""
        with self._lock:
            if self._stopped:
                return False
            self.queue.put(call)
            return True

    def stop(self) -> None:
        """Let the threads end once everything queued so far is served."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                for _ in self._threads:
                    self.queue.put(None)

    def join(self) -> None:
        """Wait until the threads of a stopped worker have ended. Not on an event loop."""
        for thread in self._threads:
            thread.join()

    def drain(self, first: Call, limit: int) -> tuple[list[Call], bool]:
        """Return `first` and what is queued behind it, up to `limit` calls, and whether to end after them."""
        calls = [first]
        try:
            while len(calls) < limit:
                call = self.queue.get_nowait()
                if call is None:
                    return calls, True
                calls.append(call)
        except Empty:
            pass
        return calls, False

    @abstractmethod
    def run(self) -> None:
        """Serve `queue` until None comes."""


async def stopped(*workers: Worker) -> None:
    """Stop workers, each once the one before it has ended, without blocking the event loop.

    Cancelling it leaves that to a thread, which goes on.
    """
    call = Call()
    threading.Thread(target=_stop_in_turn, args=(workers, call), name="loomfast-closing").start()
    await call.answer()


def _stop_in_turn(workers: tuple[Worker, ...], call: Call) -> None:
    for worker in workers:
        worker.stop()
        worker.join()
    deliver([(call, None)])


_running: Final[weakref.WeakSet[Worker]] = weakref.WeakSet()
_watch_lock = threading.Lock()
_watched_pid = 0


def _stop_at_exit(worker: Worker) -> None:
    global _watched_pid, _watch_lock
    if _watched_pid not in (0, os.getpid()):  # a forked child: the parent's workers and lock are not ours
        _watch_lock = threading.Lock()
        _running.clear()
    with _watch_lock:
        _running.add(worker)
        if _watched_pid != os.getpid():
            _watched_pid = os.getpid()
            threading.Thread(target=_watch_main_thread, name="loomfast-exit", daemon=True).start()


def _watch_main_thread() -> None:
    threading.main_thread().join()
    for worker in list(_running):
        worker.stop()
