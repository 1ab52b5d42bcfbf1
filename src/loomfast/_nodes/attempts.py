"""The attempts at one dispatch: what is tried again, when, and what never is (ADR 0103, L20).

What lives here: `Attempts`, `Dispatched`, and the rule, `superseded`. What must not: what a worker does with
a dispatch (allocating), who watches over many (dispatching).

Theory of operation
-------------------
An attempt lasts from the fence until the execution rests. One that fails is made anew, under a new token,
which fences out whoever drives the execution by then. So what must never be tried again is an attempt that
failed because somebody else drives it: two dispatchers would fence each other out, time and again, and each
time the flow's effects would run once more. Such a dispatch is *superseded*, and the other one brings it to
its end.

One refusal looks like that and is none: `StartFencedOutError`. There the newer token's holder has written
nothing, and may be dead. It is tried again, and since the holder may also have been slow, every further
attempt first asks whether the execution runs under a newer token by now (`Allocation.check`).

The pause before a further attempt depends on the token of the failed one: two dispatchers of one execution
never pause in step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from loomfast._core.arguments import count_argument
from loomfast._core.retry import RetryPolicy
from loomfast._errors import (
    BadInputError,
    ExecutionAlreadyExistsError,
    ExecutionSetAsideError,
    FlowError,
    LeaseHeldError,
    LeaseLostError,
    RuntimeClosedError,
    StaleFenceError,
    StartFencedOutError,
)
from loomfast._kernels import State
from loomfast._nodes.allocating import Allocation, Dispatch, LocalWorkerRuntime
from loomfast._runtime.bootstrap import is_a
from loomfast._runtime.clock import Clock, SystemClock
from loomfast._runtime.handle import ExecutionHandle
from loomfast._runtime.hooks import logger
from loomfast.stores._tenant_scope import names

_DRIVEN_ELSEWHERE = (ExecutionAlreadyExistsError, StaleFenceError, LeaseHeldError, LeaseLostError)


class Dispatched(NamedTuple):
    """What became of one dispatch, after so many attempts.

    `rested`: the execution rests, in `state`, be it suspended, completed, failed or cancelled. `superseded`:
    somebody else drives it. `set-aside`: it has crashed too often, and is not run any more. `failed`: no
    attempt was left. `error` is why.
    """

    execution_id: str
    outcome: Literal["rested", "superseded", "set-aside", "failed"]
    attempts: int
    state: State | None = None
    error: Exception | None = None


class DispatchWorker(Protocol):
    """Whoever takes dispatches."""

    async def allocate(self, dispatch: Dispatch) -> Allocation:
        """Fence the execution and return what executes the dispatch."""
        ...


class _Place:
    """A worker among others."""

    def __init__(self, worker: DispatchWorker) -> None:
        self.worker = worker
        self.busy = 0
        self.closed = False


class Attempts:
    """Makes attempts at these workers, by this clock or the first local worker's, until one counts."""

    def __init__(
        self,
        workers: Sequence[DispatchWorker],
        clock: Clock | None,
        max_attempts: int,
        initial_s: float,
        max_s: float,
    ) -> None:
        if not workers:
            raise BadInputError("a dispatcher needs a worker")
        count_argument("max_attempts", max_attempts)
        # The last failure has no pause, but a worker that closed may: that it did is no failure.
        self._pauses = RetryPolicy(max_attempts + 1, initial_s=initial_s, max_s=max_s)
        self._max_attempts = max_attempts
        self._places = [_Place(worker) for worker in workers]
        local = (worker.clock for worker in workers if isinstance(worker, LocalWorkerRuntime))
        self._clock = clock or next(local, SystemClock())
        self._beginning: set[asyncio.Task[ExecutionHandle]] = set()

    async def make(self, dispatch: Dispatch) -> Dispatched:
        """Attempt a dispatch until it is decided what became of it."""
        dispatching = _Dispatching(dispatch)
        attempts = failed = 0
        place: _Place | None = None
        while True:
            place = self._least_busy(place)
            attempts += 1
            place.busy += 1
            try:
                handle = await self._begin(dispatching, place.worker)
                return Dispatched(dispatch.execution_id, "rested", attempts, await handle.rest())
            except Exception as cause:
                error = cause.with_traceback(None)
            finally:
                place.busy -= 1
            if is_a(error, RuntimeClosedError):
                place.closed = True
            else:
                failed += 1
            outcome = self._outcome(dispatch.execution_id, error, failed)
            if outcome is not None:
                if outcome == "failed":
                    logger.warning(
                        "the dispatch of execution %r failed after %d attempts: %s: %s",
                        dispatch.execution_id,
                        attempts,
                        type(error).__name__,
                        error,
                    )
                return Dispatched(dispatch.execution_id, outcome, attempts, None, error)
            await self._clock.sleep(self._pause_s(dispatching, failed))

    async def _begin(self, dispatching: _Dispatching, worker: DispatchWorker) -> ExecutionHandle:
        """Begin an attempt, to the end even if the caller is cancelled: who fences must drive."""
        task = asyncio.get_running_loop().create_task(dispatching.begin(worker))
        self._beginning.add(task)
        task.add_done_callback(self._begun)
        return await asyncio.shield(task)

    def _begun(self, task: asyncio.Task[ExecutionHandle]) -> None:
        self._beginning.discard(task)
        if not task.cancelled():
            task.exception()  # seen here, in case the caller is gone

    def _outcome(
        self, execution_id: str, error: Exception, failed: int
    ) -> Literal["superseded", "set-aside", "failed"] | None:
        """Return what a failed attempt makes of a dispatch; None if there is to be another."""
        if superseded(error, execution_id):
            return "superseded"
        if is_a(error, ExecutionSetAsideError):
            return "set-aside"
        if is_a(error, BadInputError) or is_a(error, FlowError):
            return "failed"
        if failed >= self._max_attempts or all(place.closed for place in self._places):
            return "failed"
        return None

    def _least_busy(self, but: _Place | None) -> _Place:
        open_places = [place for place in self._places if not place.closed] or self._places
        others = [place for place in open_places if place is not but] or open_places
        return min(others, key=lambda place: place.busy)

    def _pause_s(self, dispatching: _Dispatching, failed: int) -> float:
        fence = None if dispatching.allocation is None else dispatching.allocation.fence
        key = f"dispatch under fence {fence}"
        return self._pauses.delay_s(dispatching.dispatch.execution_id, key, max(failed, 1)) or 0.0


class _Dispatching:
    """A dispatch that attempts are made at, and the newest allocation of it."""

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch
        self.allocation: Allocation | None = None

    async def begin(self, worker: DispatchWorker) -> ExecutionHandle:
        if self.allocation is not None:
            await self.allocation.check()
        self.allocation = await worker.allocate(self.dispatch)
        return await self.allocation.execute()


def superseded(error: BaseException, execution_id: str) -> bool:
    """Whether an attempt failed because somebody else drives this execution: then it is never tried again.

    Matched wherever it stands in the chain of causes, by class and by class name (ADR 0103, D2). A refusal
    that names another execution came from a neighbour in a shared batch, and says nothing about this one.
    """
    for cause in _chain(error):
        if is_a(cause, StartFencedOutError):
            return False
        if any(is_a(cause, kind) for kind in _DRIVEN_ELSEWHERE):
            named = getattr(cause, "execution_id", None)
            return not isinstance(named, str) or names(named, execution_id)
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
