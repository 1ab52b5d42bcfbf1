"""What reaches the event loop of a run from other threads.

What lives here: `LoopCalls`, for calls of a context from the thread of a sync step, and `waker`, for a store
that tells of changes on a thread of its own. What must not: what is called.

A context belongs to the loop its run is on. A call from elsewhere is handed to that loop and waited for, so
that it takes its place in the one order of events; an error it raises is raised to its caller.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from loomfast._errors import RunOverError

T = TypeVar("T")

# How often a waiting thread looks whether the loop is still there.
LOOK_S = 0.5


class LoopCalls:
    """Knows the loop and thread of a run."""

    __slots__ = ("_loop", "_thread")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def here(self) -> bool:
        """Whether the caller is on the run's own thread."""
        return threading.get_ident() == self._thread

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the loop and wait for its result; only from another thread.

        Raises `RunOverError` when the loop is gone.
        """
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(_deliver, result, function)
        except RuntimeError:
            raise RunOverError("the event loop of this run is closed") from None
        try:
            # A loop that stops now never delivers, and tells nobody.
            while not concurrent.futures.wait((result,), LOOK_S).done:
                if self._loop.is_closed():
                    raise RunOverError("the event loop of this run is closed")
            return result.result()
        finally:
            del result  # it holds the failure, whose traceback holds this frame


def _deliver(result: concurrent.futures.Future[T], function: Callable[[], T]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)
    finally:
        del result


def waker(watcher: asyncio.Future[None]) -> Callable[[], None]:
    """Return a function that completes a future of the running loop, from any thread, any number of times."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
            loop.call_soon_threadsafe(_complete, watcher)

    return wake


def _complete(watcher: asyncio.Future[None]) -> None:
    if not watcher.done():
        watcher.set_result(None)
