"""Loading the state of an execution: from memory as far as it is known, and from the store for the rest.

A state is a value and a log only grows, so a state that was loaded before stays true: folding what was
appended since onto it gives the state of now. A bounded number of states is kept warm, those used last, so
that a session that is answered turn by turn does not fold its whole history at each turn. Nothing depends on
it: a parked execution may be forgotten at any time, and every decision is made on what the store says now.

A parked execution costs no memory. One with a short log is not kept at all, since folding it takes no longer
than asking the store what is new; and however many have long ones, no more than `WARM_STATES` are.

A snapshot is read only where the log before it has been truncated: folding a log is quicker than parsing a
snapshot of it, and what is folded from the log cannot be stale or damaged. A snapshot that is not sound is
reported and the next older one is tried; the rest of the log is folded onto it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from loomfast._core.snapshots import Snapshot, snapshot_of, state_of
from loomfast._errors import BadSnapshotError, PrefixTruncatedError, UnknownExecutionError
from loomfast._kernels import State
from loomfast._runtime.hooks import logger
from loomfast.stores import EventStore

# How many map entries (steps, decisions, gates, stamps) the warm states may have in all: some 16 MiB, and
# what steps and answers returned. A state is 1 KB by itself, so that they are bounded in number too.
WARM_ENTRIES = 200_000
WARM_STATES = 1_000
# From how many events on a log is long enough for its state to be kept.
LONG_LOG = 32


class StateLoader:
    """Loads states, and keeps the ones used last."""

    def __init__(
        self, store: EventStore, *, warm_entries: int = WARM_ENTRIES, warm_states: int = WARM_STATES
    ) -> None:
        self._store = store
        self._limit = warm_entries
        self._most = warm_states
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
        base = self._warm.get(execution_id)
        while True:
            try:
                state = await self._store.fold(execution_id, base)
                break
            except PrefixTruncatedError as truncated:
                # Cut beyond what is known here, perhaps again since the snapshot was read.
                newer = await self._from_snapshot(execution_id, truncated)
                if base is not None and newer.sequence <= base.sequence:
                    raise
                base = newer
        if state is not None:
            self.keep(state)
        return state

    async def snapshot(self, execution_id: str) -> Snapshot:
        """Save a snapshot of the durable state, and return it. Raises as `load`, and `TooDeepError`."""
        state = await self.load(execution_id)
        snapshot = await asyncio.to_thread(snapshot_of, state)
        await self._store.snapshots.save(snapshot)
        return snapshot

    async def _from_snapshot(self, execution_id: str, truncated: PrefixTruncatedError) -> State:
        refused: BadSnapshotError | None = None
        snapshot = await self._store.snapshots.latest(execution_id)
        while snapshot is not None:
            try:
                return await asyncio.to_thread(state_of, snapshot)
            except BadSnapshotError as error:
                logger.warning("an unsound snapshot is passed over: %s", error)
                refused = refused or error
            snapshot = await self._store.snapshots.latest(execution_id, snapshot.sequence - 1)
        raise refused or truncated

    def keep(self, state: State) -> None:
        """Keep a durable state of a long log warm, at the cost of those that were used longest ago."""
        self.forget(state.execution_id)
        if state.ended is not None or state.sequence + 1 < LONG_LOG or _entries(state) > self._limit:
            return
        self._warm[state.execution_id] = state
        self._entries += _entries(state)
        while self._entries > self._limit or len(self._warm) > self._most:
            self.forget(next(iter(self._warm)))

    def forget(self, execution_id: str) -> None:
        """Keep nothing of this execution."""
        state = self._warm.pop(execution_id, None)
        if state is not None:
            self._entries -= _entries(state)


def _entries(state: State) -> int:
    return 1 + len(state.steps) + len(state.decisions) + len(state.gates) + len(state.emits)
