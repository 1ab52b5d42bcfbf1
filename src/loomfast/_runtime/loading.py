"""Loading the state of an execution: from memory as far as it is known, and from the store for the rest.

A state is a value and a log only grows, so a state that was loaded before stays true: folding what was
appended since onto it gives the state of now. A bounded number of states is kept warm, those used last, so
that a session that is answered turn by turn does not fold its whole history at each turn. Nothing depends on
it: a parked execution may be forgotten at any time, and every decision is made on what the store says now.
"""

from __future__ import annotations

from collections import OrderedDict

from loomfast._errors import UnknownExecutionError
from loomfast._kernels import State
from loomfast.stores import EventStore

# How many map entries (steps, decisions, gates, stamps) the warm states may have in all: some 16 MiB.
WARM_ENTRIES = 200_000


class StateLoader:
    """Loads states, and keeps the ones used last."""

    def __init__(self, store: EventStore, *, warm_entries: int = WARM_ENTRIES) -> None:
        self._store = store
        self._limit = warm_entries
        self._warm: OrderedDict[str, State] = OrderedDict()
        self._entries = 0

    async def load(self, execution_id: str) -> State:
        """Return the durable state. Raises `UnknownExecutionError`, and what the store's reads raise."""
        state = await self.find(execution_id)
        if state is None:
            raise UnknownExecutionError(execution_id)
        return state

    async def find(self, execution_id: str) -> State | None:
        """Return the durable state, or None for an execution the store does not know."""
        state = await self._store.fold(execution_id, self._warm.get(execution_id))
        if state is not None:
            self.keep(state)
        return state

    def keep(self, state: State) -> None:
        """Keep a durable state warm, at the cost of those that were used longest ago."""
        self.forget(state.execution_id)
        if state.ended is not None or _entries(state) > self._limit:
            return
        self._warm[state.execution_id] = state
        self._entries += _entries(state)
        while self._entries > self._limit:
            self.forget(next(iter(self._warm)))

    def forget(self, execution_id: str) -> None:
        """Keep nothing of this execution."""
        state = self._warm.pop(execution_id, None)
        if state is not None:
            self._entries -= _entries(state)


def _entries(state: State) -> int:
    return 1 + len(state.steps) + len(state.decisions) + len(state.gates) + len(state.emits)
