"""The flows that a runtime may meet in its store, by id.

What lives here: `FlowTable`. What must not: executions. Invariant: an id stands for one function.
"""

from __future__ import annotations

from collections.abc import Iterable

from loomfast._core.definitions import FlowDefinition, FlowFunction
from loomfast._core.definitions import flow as define_flow
from loomfast._errors import BadInputError, UnknownFlowError
from loomfast._kernels import State
from loomfast._runtime.recorded import read_recorded


class FlowTable:
    """Flows by id."""

    def __init__(self, flows: Iterable[FlowDefinition | FlowFunction]) -> None:
        self._flows: dict[str, FlowDefinition] = {}
        for flow in flows:
            self.register(flow)

    def register(self, flow: FlowDefinition | FlowFunction) -> FlowDefinition:
        """Make a flow known. Raises `BadInputError` when its id stands for another function."""
        definition = flow if isinstance(flow, FlowDefinition) else define_flow(flow)
        known = self._flows.setdefault(definition.id, definition)
        if known.function is not definition.function:
            raise BadInputError(f"flow id {definition.id!r} stands for two different functions")
        return known

    def of(self, state: State) -> FlowDefinition:
        """Return the flow that an execution was started with. Raises `UnknownFlowError`, `StoreReadError`."""
        return self.named(read_recorded(state.execution_id, 0, lambda: state.flow_id), state.execution_id)

    def known(self, state: State) -> FlowDefinition | None:
        """Return the flow that an execution was started with, None unless it is known. Else as `of`."""
        try:
            return self.of(state)
        except UnknownFlowError:
            return None

    def named(self, flow_id: str, execution_id: str | None = None) -> FlowDefinition:
        """Return a flow by its id. Raises `UnknownFlowError`, for the execution that needs it."""
        flow = self._flows.get(flow_id)
        if flow is None:
            raise UnknownFlowError(flow_id, execution_id)
        return flow
