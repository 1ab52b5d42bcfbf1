"""A handle: a way to wait for an execution, wherever it is driven."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loomfast._errors import ExecutionCancelledError, ExecutionFailedError
from loomfast._events import CANCELLED, COMPLETED, FAILED
from loomfast._kernels import State

if TYPE_CHECKING:
    from loomfast._runtime.runtime import WorkflowRuntime


class ExecutionHandle:
    """Refers to one execution by its id. It holds nothing else: keeping one costs nothing."""

    __slots__ = ("_runtime", "execution_id")

    def __init__(self, runtime: WorkflowRuntime, execution_id: str) -> None:
        self._runtime = runtime
        self.execution_id = execution_id

    async def rest(self) -> State:
        """Wait until the execution rests (suspended or ended) and return its durable state.

        Raises `StorageWriteError` when it rests because a write failed, `UnknownExecutionError` when there is no
        such execution. Cancelling the wait does not touch the execution.
        """
        return await self._runtime.wait_for(self.execution_id, lambda state: state.status != "running")

    async def result(self) -> Any:
        """Wait until the execution has ended and return its output.

        Raises `ExecutionFailedError` or `ExecutionCancelledError` when it ended so; otherwise as `rest`.
        """
        ended = (COMPLETED, FAILED, CANCELLED)
        state = await self._runtime.wait_for(self.execution_id, lambda state: state.status in ended)
        if state.status == FAILED:
            raise ExecutionFailedError(self.execution_id, state.error)
        if state.status == CANCELLED:
            raise ExecutionCancelledError(self.execution_id, state.reason)
        return state.output

    def __repr__(self) -> str:
        return f"<ExecutionHandle {self.execution_id}>"
