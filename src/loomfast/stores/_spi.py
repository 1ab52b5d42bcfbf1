"""The contract every event store keeps, whoever wrote it.

What lives here: `EventStore` and the values its methods return. What every event store has one of
(`SnapshotStore`, `BranchRegistry`, `LeaseStore`, `RecoveryStore`, `TimerStore`) is in the files beside this
one, in that order, and they go on numbering the guarantees; the last is of arguments (`_spi_arguments.py`).
What must not: any store.

The guarantees, each with tests in `loomfast.testing.conformance` that run on any store:

 1. `append_batch` is all or nothing, for any number of envelopes, and keeps their order.
 2. An append that returned is durable by the store's own standard, and every later read sees it.
 3. Two appends of one `(execution, sequence)` never both succeed: the loser gets `DuplicateSequenceError`.
    A log has no gaps either: an append beyond the next sequence is refused with `MalformedEventError`.
 4. Once a fence has been acquired for an execution, an append without a token, or with an older one, is
    refused with `StaleFenceError`; the token is checked before the slot, on every envelope.
 5. Tokens of one execution increase strictly and survive a restart.
 6. Events come back equal: payload bytes, key order, NUL, lone surrogates and the sign of zero included.
 7. `read_all` yields every event once, in one total order, and never passes over one that commits late. A
    damaged one ends the page before it; asked for it, `read_all` raises `StoreReadError` with its `position`,
    so that a reader can go on behind it.
 8. No call blocks the event loop. Cancelling a caller leaves no half transaction: its write happens whole
    or not at all.
 9. `truncate_prefix` never takes what cannot be had otherwise: it needs a sound snapshot that covers the
    cut, and it leaves sequence 0 and the newest event. So a truncated execution still reads as existing, by
    `read_range(id, 0, 0)` as by `last_sequence`; its flow and input stay readable; sequences do not restart.
10. What was truncated is never missing in silence: a read or a fold that needs it raises
    `PrefixTruncatedError` with the first sequence available. `read_all` yields what is left, at the
    positions it always had.
11. `copy_prefix` copies a whole prefix or nothing, for any length: the same payloads, timestamps and stamps,
    ids of its own, `forkOf` merged into each event's metadata, and nobody's fence. The source is unchanged.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from loomfast._kernels import Envelope, State, fold_events
from loomfast.stores._spi_arguments import check_some
from loomfast.stores._spi_branches import BranchRegistry
from loomfast.stores._spi_leases import Lease, LeaseStore
from loomfast.stores._spi_recoveries import RecoveryStore
from loomfast.stores._spi_snapshots import SnapshotStore
from loomfast.stores._spi_timers import TimerStore


class ExecutionSummary(NamedTuple):
    """One row of a listing. `position` is where the execution stands in the listing's order."""

    execution_id: str
    flow_id: str
    status: str
    last_sequence: int
    position: int


class PositionedEvent(NamedTuple):
    """An event and its place in the store's total order, from 1."""

    position: int
    event: Envelope


class EventStore(ABC):
    """An append-only store of event logs, one per execution.

    `persists_json` says whether payloads are kept as JSON text; a store of Python objects also takes payloads
    that have no JSON form (`Opaque`).
    """

    persists_json: bool = True

    @property
    def primary(self) -> EventStore:
        """The store to ask when something is decided by the answer: it has seen every append that returned.

        The store itself, unless its plain reads may lag behind (`ReplicaReadEventStore`).
        """
        return self

    def __init_subclass__(cls, **options: Any) -> None:
        """Whoever changes how batches go changes how single appends go, and either changes how writes go.

        What is inherited would skip the change.
        """
        super().__init_subclass__(**options)
        own = cls.__dict__
        if "append" not in own and "append_batch" in own:
            cls.append = EventStore.append  # type: ignore[method-assign]
        if "write" not in own and ("append" in own or "append_batch" in own):
            cls.write = EventStore.write  # type: ignore[method-assign]

    async def append(self, envelope: Envelope) -> None:
        """Append one event.

        Raises, with nothing written: `StaleFenceError`, `DuplicateSequenceError`, `DuplicateEnvelopeIdError`,
        `MalformedEventError` for a gap, `UnsupportedTypeError` for a payload that the store cannot keep,
        `StoreClosedError`, `StoreBusyError` (safe to repeat), `StorageWriteError`.
        """
        await self.append_batch((envelope,))

    @abstractmethod
    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        """Append events, of one or several executions, all or nothing. Raises as `append`."""

    def write(self, envelopes: Sequence[Envelope]) -> asyncio.Future[Exception | None] | None:
        """Begin an append for a caller that writes behind, and return at once.

        None if it is durable already. Otherwise a future of what `append` would raise, as its result, or None
        once it is durable. Raises what can be told without waiting. Cancelling the future recalls nothing.

        A store overrides this to do without a task for each append. Raises `BadInputError` for no events.
        """
        check_some(envelopes)
        return asyncio.get_running_loop().create_task(self._outcome(envelopes))

    async def _outcome(self, envelopes: Sequence[Envelope]) -> Exception | None:
        try:
            if len(envelopes) == 1:
                await self.append(envelopes[0])
            else:
                await self.append_batch(envelopes)
        except Exception as error:
            return error
        return None

    @abstractmethod
    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[Envelope]:
        """Return the events with `first <= sequence <= last`, in order; `last=None` reads to the end.

        Empty for an unknown execution. Raises `PrefixTruncatedError` if one of them was truncated,
        `StoreReadError` for a row that is not as it was written.
        """

    async def read(self, execution_id: str) -> list[Envelope]:
        """Return the whole log; empty for an unknown execution."""
        return await self.read_range(execution_id, 0, None)

    async def read_from(self, execution_id: str, sequence: int) -> list[Envelope]:
        """Return the events from `sequence` on."""
        return await self.read_range(execution_id, sequence, None)

    async def fold(self, execution_id: str, state: State | None = None) -> State | None:
        """Fold what the log holds after `state` onto it; None for an unknown execution.

        Raises `PrefixTruncatedError` if an event between `state` and the rest was truncated: take a snapshot
        as `state` (guarantee 10).

        A store overrides this to fold rows without building events, off the event loop.
        """
        first = 0 if state is None else state.sequence + 1
        events = await self.read_from(execution_id, first)
        return fold_events(state, events) if events else state

    @abstractmethod
    async def last_sequence(self, execution_id: str) -> int | None:
        """Return the highest sequence ever written, or None for an unknown execution."""

    @abstractmethod
    async def list_executions(
        self, *, status: str | None = None, after: int = 0, limit: int = 100
    ) -> list[ExecutionSummary]:
        """Return at most `limit` executions, oldest first, whose `position` is beyond `after`."""

    @abstractmethod
    async def acquire_fence(self, execution_id: str, *, lease: Lease | None = None) -> int:
        """Return a token newer than every earlier one of this execution; older holders' appends are refused.

        The execution need not exist yet. With a `lease` of `store.leases` the token is given only while that
        lease is held; otherwise raises `LeaseLostError`, with nothing changed (guarantee 26).
        """

    @abstractmethod
    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        """Return at most `limit` events beyond position `after`, in the store's total order."""

    @abstractmethod
    async def truncate_prefix(self, execution_id: str, before: int) -> int:
        """Remove the events with `0 < sequence < before`, and return how many were removed.

        Sequence 0 and the newest event stay, however large `before` is; what is gone already is not counted.
        Fences are not judged: what a snapshot covers is the same for every writer.

        Raises, with nothing removed: `SnapshotNeededError` unless a snapshot of `store.snapshots` that passes
        its checksum covers `before - 1` or more; `UnknownExecutionError`; `BadInputError` for a negative
        `before`; and as `append` for failing storage. ADR 0102, D5.
        """

    @abstractmethod
    async def copy_prefix(
        self,
        source_id: str,
        target_id: str,
        through: int,
        *,
        fork_metadata: Mapping[str, object] | None = None,
        branch_name: str | None = None,
    ) -> None:
        """Copy the events 0 to `through` of one execution into a new one, all or nothing.

        `forkOf: {executionId, sequence}` is merged into each copy's metadata, over an older one; so are the
        members of `fork_metadata`, which may name another `forkOf`. Fences are dropped; the target's status
        is that of the copied prefix. With `branch_name` the target is also registered in `store.branches`,
        in the same transaction.

        Raises, with nothing written: `UnknownExecutionError` for the source, `BeyondLogError` if it ends
        before `through`, `PrefixTruncatedError` if part of the prefix is gone, `DuplicateSequenceError` if
        the target exists, `StaleFenceError` if somebody has fenced it, `BranchExistsError`, `BadInputError`
        for a negative `through` or `fork_metadata` that names `fence` or `flowEmit`, `StoreReadError` for a
        damaged source, and as `append` for failing storage. ADR 0102, D5.
        """

    @property
    @abstractmethod
    def snapshots(self) -> SnapshotStore:
        """The snapshots kept beside the logs."""

    @property
    @abstractmethod
    def branches(self) -> BranchRegistry:
        """The names of forks, and where each comes from."""

    @property
    @abstractmethod
    def leases(self) -> LeaseStore:
        """Who may act on what, for a while."""

    @property
    @abstractmethod
    def recoveries(self) -> RecoveryStore:
        """The account of executions that crashed."""

    @property
    @abstractmethod
    def timers(self) -> TimerStore:
        """What is due, and the schedules."""

    async def check_storage(self) -> list[str]:
        """Return what the storage finds wrong with itself, a sentence each; nothing if it has no way to look.

        May read all of it, so takes long. Raises `StoreReadError`. A decorator passes it on.
        """
        return []

    def watch(self, execution_id: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` when the status of an execution may have changed; return what ends that.

        Best effort: a change may go unnoticed and `wake` be called without one, so whoever waits still polls.
        `wake` may be called on any thread, must return at once and must not raise. A store that cannot tell
        calls nobody.
        """
        return _nothing

    async def close(self) -> None:  # noqa: B027  # a store without resources has nothing to close
        """Release what the store holds. Idempotent; pending appends are finished first."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _nothing() -> None:
    """What ends a watch that was none."""
