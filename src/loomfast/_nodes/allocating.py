"""A worker that takes dispatches: it fences first, and then looks what there is to do (ADR 0103, L12).

What lives here: `Dispatch`, `Allocation`, and `LocalWorkerRuntime`, the worker around one runtime. What must
not: when a dispatch is tried again (attempts), how an execution is driven (`_runtime`).

Theory of operation
-------------------
To *allocate* is to take a token, to *execute* is to look and then to act under it: nothing there, start it;
running, take it over; at rest, leave it. Two workers may do so at once for one id, in any order. Their tokens
decide, since the look follows the fence:

    A fences 1   B fences 2   A finds nothing, and is refused at sequence 0: stale   B starts it
    A fences 1   B fences 2   B starts it   A finds it running, but its token is refused before anything runs
    A fences 1   A starts it   B fences 2   B finds it running and takes it over; A's next write is refused

In the last line somebody who was alive has been fenced out, but by one who drives: nothing tells a live
driver from a dead one. Leases do: with them the lease is asked before the fence, and B is told that it is
held. What this runtime drives itself is never fenced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from loomfast._core.definitions import FlowDefinition, FlowFunction
from loomfast._errors import StaleFenceError
from loomfast._events import RUNNING
from loomfast._runtime.clock import Clock
from loomfast._runtime.handle import ExecutionHandle
from loomfast._runtime.runtime import WorkflowRuntime


class Dispatch(NamedTuple):
    """What is to be executed: the arguments of `WorkflowRuntime.start`, with a chosen id."""

    execution_id: str
    flow: FlowDefinition | FlowFunction
    input: Any = None
    compute_target: str | None = None


class Allocation:
    """One dispatch, given to one worker. Whoever was given it executes it: others are fenced out.

    `fence` is the token it has, None where nothing needed to be fenced.
    """

    def __init__(self, runtime: WorkflowRuntime, dispatch: Dispatch, fence: int | ExecutionHandle) -> None:
        self._runtime = runtime
        self._dispatch = dispatch
        self._attached = fence if isinstance(fence, ExecutionHandle) else None
        self.fence = None if isinstance(fence, ExecutionHandle) else fence

    async def execute(self) -> ExecutionHandle:
        """Look, and start the execution, take it over, or leave it as it rests; return its handle.

        Raises as `WorkflowRuntime.start` and `recover` do. `ExecutionAlreadyExistsError`, `StaleFenceError`
        and `LeaseHeldError` say that somebody else drives it.
        """
        if self._attached is not None:
            return self._attached
        dispatch, runtime = self._dispatch, self._runtime
        if await runtime.load_state(dispatch.execution_id) is not None:
            return await runtime.recover(dispatch.execution_id, fence=self.fence)
        return await runtime.start(
            dispatch.flow,
            dispatch.input,
            execution_id=dispatch.execution_id,
            compute_target=dispatch.compute_target,
            fence=self.fence,
        )

    async def check(self) -> None:
        """Raise `StaleFenceError` if the execution runs by now under a newer token than this one.

        To be asked before another fence is taken for the same dispatch: who has written under a newer token
        drives it. One who has written nothing may be dead.
        """
        execution_id = self._dispatch.execution_id
        if self.fence is None:
            return
        state = await self._runtime.load_state(execution_id)
        if state is None or state.status != RUNNING:
            return
        last = (await self._runtime.store.primary.read_from(execution_id, state.sequence))[-1]
        if last.fence is not None and last.fence > self.fence:
            raise StaleFenceError(execution_id, self.fence, last.fence)


class LocalWorkerRuntime:
    """Takes dispatches for a runtime of this process."""

    def __init__(self, runtime: WorkflowRuntime) -> None:
        self.runtime = runtime

    @property
    def clock(self) -> Clock:
        """The runtime's."""
        return self.runtime.clock

    async def allocate(self, dispatch: Dispatch) -> Allocation:
        """Fence the execution, whether or not it exists, and return what executes the dispatch.

        One that this runtime drives, or that rests, is attached to. Raises `BadInputError`, and as
        `WorkflowRuntime.fence`.
        """
        self.runtime.register(dispatch.flow)
        return Allocation(self.runtime, dispatch, await self.runtime.fence(dispatch.execution_id))
