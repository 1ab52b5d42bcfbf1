"""Calls that reach a context from another thread, such as that of a sync step.

A context belongs to the loop its run is on. A call from elsewhere is handed to that loop and waited for, so
that it takes its place in the one order of events; an error it raises is raised to its caller.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
        """Run `function` on the loop and wait for its result; only from another thread."""
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def deliver() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        self._loop.call_soon_threadsafe(deliver)
        return result.result()
