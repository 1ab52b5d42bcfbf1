"""The dispatchers, which have executions driven by one worker or by several, and watch over them.

What lives here: `LocalDispatcher`, `SupervisingDispatcher`. What must not: what is tried again (attempts),
what a worker does with a dispatch (allocating).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from loomfast._core.arguments import count_argument
from loomfast._errors import RuntimeClosedError
from loomfast._nodes.allocating import Dispatch
from loomfast._nodes.attempts import Attempts, Dispatched, DispatchWorker
from loomfast._runtime.clock import Clock

# The pause after the first failed attempt, and the longest one, in seconds.
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0


class LocalDispatcher:
    """Dispatches to one worker.

    At most `max_attempts` attempts are made, with pauses from `initial_s` seconds, doubled each time, up to
    `max_s`, by the worker's clock.
    """

    def __init__(
        self,
        worker: DispatchWorker,
        *,
        max_attempts: int = 1,
        initial_s: float = FIRST_PAUSE_S,
        max_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self._attempts = Attempts((worker,), None, max_attempts, initial_s, max_s)

    async def dispatch(self, dispatch: Dispatch) -> Dispatched:
        """Have an execution started, or taken over, and wait until it rests.

        Raises nothing: what went wrong is the outcome. Tried again are failures of the store and of the
        worker; not what the flow or its input must be mended for (`BadInputError`, `FlowError`), and not a
        worker that has closed. Cancelled, an attempt that has begun goes on, and no further one is made.
        """
        return await self._attempts.make(dispatch)


class SupervisingDispatcher:
    """Dispatches to several workers, and watches over each execution until it rests.

    Each attempt goes to the worker that has the fewest under way, and after a failed one to another. A worker
    that has closed gets no more; that its attempts end is not counted against `max_attempts`. At most
    `concurrency` executions are watched at a time, others wait for their turn. `clock` is that of the first
    local worker unless given; otherwise as `LocalDispatcher`. Use it as an async context manager, or call
    `close`.
    """

    def __init__(
        self,
        workers: Sequence[DispatchWorker],
        *,
        max_attempts: int = 3,
        concurrency: int = 100,
        initial_s: float = FIRST_PAUSE_S,
        max_s: float = LONGEST_PAUSE_S,
        clock: Clock | None = None,
    ) -> None:
        count_argument("concurrency", concurrency)
        self._attempts = Attempts(workers, clock, max_attempts, initial_s, max_s)
        self._free = asyncio.Semaphore(concurrency)
        self._watched: dict[str, asyncio.Task[Dispatched]] = {}
        self._closed = False

    async def dispatch(self, dispatch: Dispatch) -> Dispatched:
        """As that of a `LocalDispatcher`, but cancelling the caller ends nothing.

        A repeat, while the execution is watched, waits for the same outcome: its input is not looked at.
        Raises `RuntimeClosedError` once this is closed.
        """
        execution_id = dispatch.execution_id
        watch = self._watched.get(execution_id)
        if watch is None:
            if self._closed:
                raise RuntimeClosedError(execution_id)
            watch = self._watched[execution_id] = asyncio.get_running_loop().create_task(
                self._watch(dispatch)
            )
            watch.add_done_callback(lambda _: self._watched.pop(execution_id))
        await asyncio.wait((watch,))
        if watch.cancelled():  # by `close`; whoever waits here has not been
            return Dispatched(execution_id, "failed", 0, None, RuntimeClosedError(execution_id))
        return watch.result()

    async def _watch(self, dispatch: Dispatch) -> Dispatched:
        async with self._free:
            return await self._attempts.make(dispatch)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Watch no longer. What waits is told `failed` with a `RuntimeClosedError`; what runs goes on."""
        self._closed = True
        watched = tuple(self._watched.values())
        for watch in watched:
            watch.cancel()
        if watched:
            await asyncio.wait(watched)
