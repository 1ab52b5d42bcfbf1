"""The journal: folds at once, writes behind.

What lives here: the one ordered queue of an execution's events on their way to the store. What must not: any
opinion about which events a flow makes.

Theory of operation
-------------------
`commit` gives an event the next sequence, folds it into `state`, tells `on_event`, and queues it; it does not
wait. What has queued up by one of the loop's next turns (`Flushes`), or by the time somebody waits for it, is
appended, in order, one batch at a time, so that the log on the store is always a prefix of the log in memory.
No task does this: `store.write` begins an append, and its future calls back. Between `hold` and `go` nothing
goes out by itself: a start and the first step's beginning are one append. `drain` waits until the queue is
empty: a suspension, a completion or an at-most-once effect is acknowledged only behind it.

A failed write is final. The journal keeps the error, drops the queue and calls `on_failure`; from then on
every `commit` raises `AbortSignal`, whatever the flow has caught. What was folded beyond the last durable
event never happened, and dies with the run.

An *outcome* is an event that decides how later calls go: how an attempt ended, a decision, an answer.
`outcomes_durable` waits for those alone. A live effect begins behind it, so that no effect ever acts on an
outcome that a crash could still undo.

`adopt` takes in an event that is durable already (a bootstrap, the answer to a gate): everything that
`commit` does, except the append (ADR 0103, D1).

Memory is bounded by the callers: whoever commits in a loop awaits `room`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import NoReturn, Protocol

from loomfast._core.answers import Draft
from loomfast._errors import (
    ConflictError,
    LeaseLostError,
    MalformedEventError,
    RunOverError,
    StorageWriteError,
    StoreBusyError,
    StoreFullError,
    StoreReadOnlyError,
)
from loomfast._events import OUTCOMES, Opaque
from loomfast._kernels import Envelope, State, fold_events
from loomfast._runtime.clock import Clock
from loomfast._runtime.flushing import GATHER_TURNS, Flushes
from loomfast._runtime.hooks import Hooks, call
from loomfast._runtime.signals import AbortSignal

# How many events one append takes unless told otherwise (a group that must be whole may be larger), and how
# many may wait before `room` makes its caller wait too.
BATCH_EVENTS = 512
QUEUE_EVENTS = 8_192


class Writes(Protocol):
    """What a journal writes to: an event store, as far as it begins appends."""

    def write(self, envelopes: Sequence[Envelope]) -> asyncio.Future[Exception | None] | None: ...


class ExecutionJournal:
    """The journal of one execution, in one process.

    `state` is the fold of everything committed or adopted so far; `failure` is the first failed write.
    `on_durable` is called with the execution's id whenever an append has become durable.
    `check_lease` raises `LeaseLostError` once the lease that the execution is driven under is not ours: it is
    called before each append, and before each effect.
    """

    def __init__(
        self,
        execution_id: str,
        store: Writes,
        clock: Clock,
        hooks: Hooks,
        *,
        state: State | None = None,
        fence: int | None = None,
        batch_events: int = BATCH_EVENTS,
        on_durable: Callable[[str], object] | None = None,
        check_lease: Callable[[], object] | None = None,
        flushes: Flushes | None = None,
    ) -> None:
        self.execution_id = execution_id
        self.fence = fence
        self.failure: StorageWriteError | None = None
        self.closed = False
        self.on_failure: Callable[[], object] | None = None
        self._on_durable = on_durable
        self._state = state
        self._next = 0 if state is None else state.sequence + 1
        self._store = store
        self._clock = clock
        self._hooks = hooks
        self._durable = self._next - 1
        self._outcome = self._durable
        self._batch_events = batch_events
        self._check_lease = check_lease
        self._queue: list[Envelope] = []  # what no append has taken yet
        self._groups: Sequence[tuple[int, int]] = ()  # first and last sequence of what must not be parted
        self._held = False
        self._turns = 0  # how many turns of the loop a flush may still be put off
        self._seen = self._next
        self._flushes = flushes or Flushes()
        self._due = False  # the loop will call `flush_due`, or `go` will have it do so
        self._writing: asyncio.Future[Exception | None] | None = None
        self._batch: Sequence[Envelope] = ()  # what is being written
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []  # for a sequence to be durable

    @property
    def state(self) -> State:
        """The state after the latest event. A journal has one from its first event on."""
        assert self._state is not None
        return self._state

    def envelope(
        self,
        event_type: str,
        body: bytes | Opaque,
        subject: str | None = None,
        stamp: int | None = None,
        *,
        ahead: int = 0,
        extra: bytes | None = None,
    ) -> Envelope:
        """Build the envelope that would come next (`ahead` places further on).

        The one builder of envelopes.
        """
        return Envelope(
            self.execution_id,
            self._next + ahead,
            event_type,
            body,
            int(self._clock.now_ms()),
            subject,
            stamp,
            self.fence,
            extra,
        )

    def envelopes(self, drafts: Sequence[Draft]) -> tuple[Envelope, ...]:
        """Build the envelopes that would come next, in the order of their drafts."""
        return tuple(
            self.envelope(*draft[:4], ahead=place, extra=draft.extra) for place, draft in enumerate(drafts)
        )

    def commit(
        self,
        event_type: str,
        body: bytes | Opaque,
        subject: str | None = None,
        stamp: int | None = None,
        *,
        extra: bytes | None = None,
    ) -> Envelope:
        """Fold one event and queue its append. Raises `AbortSignal` once a write has failed."""
        if self.failure is not None or self.closed:
            self._refuse()
        envelope = self.envelope(event_type, body, subject, stamp, extra=extra)
        self._fold(envelope)
        self._queue.append(envelope)
        if not self._due and self._writing is None:
            self._soon()
        if self._hooks.on_event is not None:
            # Last, when everything stands: a hook may come back with an event of its own.
            call(self._hooks.on_event, envelope)
        return envelope

    def commit_group(self, drafts: Sequence[Draft]) -> None:
        """Fold several events and queue them as one append that is all or nothing."""
        if self.failure is not None or self.closed:
            self._refuse()
        group = self.envelopes(drafts)
        for envelope in group:
            self._fold(envelope)
        self._queue.extend(group)
        self._groups = (*self._groups, (group[0].sequence, group[-1].sequence))
        if not self._due and self._writing is None:
            self._soon()
        for envelope in group:
            call(self._hooks.on_event, envelope)

    def hold(self) -> None:
        """Keep what is committed from now on in the queue until `go`: it goes out with what follows it.

        Whoever waits for an event has it written all the same.
        """
        self._due = self._held = True

    def go(self) -> None:
        """End a `hold`."""
        if self._held:
            self._due = self._held = False
            if self._queue and self._writing is None:
                self._soon()

    def adopt(self, envelope: Envelope) -> None:
        """Take in an event that is durable already. Refuses any sequence but the next one."""
        if envelope.sequence != self._next:
            raise MalformedEventError(
                self.execution_id, envelope.sequence, "sequence", f"must be {self._next} to be adopted"
            )
        self._fold(envelope)
        self._durable = envelope.sequence
        call(self._hooks.on_event, envelope)
        call(self._hooks.on_commit, envelope)

    async def drain(self) -> None:
        """Return once the queue is empty, so that everything committed so far is durable.

        Raises the `StorageWriteError` if it cannot be. Cancelling the wait changes nothing about the writes.
        """
        while self._durable < self._next - 1 or self.failure is not None:
            await self._until(self._next - 1)

    async def all_durable(self) -> None:
        """As `drain`, within a run: a failed write ends it, so this raises `AbortSignal`."""
        try:
            await self.drain()
        except StorageWriteError as error:
            raise AbortSignal from error

    @property
    def outcomes_pending(self) -> bool:
        """Whether an outcome is not durable yet: no effect begins until it is."""
        return self._durable < self._outcome

    async def outcomes_durable(self) -> None:
        """Return once every outcome committed before this call is durable; otherwise as `all_durable`."""
        try:
            await self._until(self._outcome)
        except StorageWriteError as error:
            raise AbortSignal from error

    def check_ours(self) -> None:
        """Raise `AbortSignal` unless an effect may begin: no write has failed, and the lease is still ours.

        A process that was stopped learns that it has lost its lease when its turn comes; an effect may be due
        before that.
        """
        if self.failure is None and self._check_lease is not None:
            try:
                self._check_lease()
            except LeaseLostError as error:
                self._fail(self._next, error)
        if self.failure is not None:
            raise AbortSignal from self.failure

    def room(self, cancelled: Callable[[], object] | None = None) -> Room:
        """Return an awaitable that is done as soon as the queue has room.

        `cancelled` is called when the wait is cancelled.
        """
        return Room(self, cancelled)

    async def _until(self, sequence: int) -> None:
        """Return once this event is durable, and write it now if nothing is on its way."""
        if self.failure is None and self._durable < sequence:
            self._flush()
        while self.failure is None and self._durable < sequence:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append((sequence, waiter))
            await waiter
        if self.failure is not None:
            raise self.failure

    def _refuse(self) -> NoReturn:
        if self.failure is not None:
            raise AbortSignal from self.failure
        raise RunOverError(f"execution {self.execution_id!r}: this process no longer drives it")

    def _fold(self, envelope: Envelope) -> None:
        self._state = fold_events(self._state, (envelope,))
        self._next = envelope.sequence + 1
        if envelope.kind in OUTCOMES:
            self._outcome = envelope.sequence

    def _soon(self) -> None:
        """Have the queue written in one of the loop's next turns, with what comes until then."""
        self._due = True
        self._turns = GATHER_TURNS
        self._seen = -1  # not looked yet: an effect that begins now has its first turn behind this call's
        self._flushes.add(self)

    def flush_due(self) -> bool:
        """Write what is queued, unless more came since the last look: then the run is under way.

        Called by `Flushes`, once a turn until it returns True.
        """
        if self._turns and self._seen != self._next and self._queue:
            self._turns -= 1
            self._seen = self._next
            return False
        self._due = False
        self._flush()
        return True

    def _flush(self) -> None:
        """Begin to write what is at the head of the queue, unless a write is on its way."""
        if self._writing is not None or not self._queue:
            return
        batch = self._take()
        try:
            if self._check_lease is not None:
                self._check_lease()
            self._writing = self._store.write(batch)
        except Exception as error:
            self._fail(batch[0].sequence, error)
            return
        if self._writing is None:
            self._written(batch)
        else:
            self._batch = batch
            self._writing.add_done_callback(self._answered)

    def _take(self) -> list[Envelope]:
        """Take from the queue what one append carries: so many events, but a group whole or not at all."""
        batch, size = self._queue, self._batch_events
        if len(batch) <= size:
            self._queue = []
            self._groups = ()
            return batch
        first = batch[0].sequence
        self._groups = [group for group in self._groups if group[1] >= first]
        for begins, ends in self._groups:
            if begins < first + size <= ends:
                size = begins - first or ends + 1 - first
        self._queue = batch[size:]
        return batch[:size]

    def _answered(self, writing: asyncio.Future[Exception | None]) -> None:
        batch, self._batch = self._batch, ()
        self._writing = None
        # An append that was cancelled counts as failed too: whoever waits for it must not wait for ever.
        error = asyncio.CancelledError() if writing.cancelled() else writing.exception() or writing.result()
        if error is None:
            self._written(batch)
        else:
            self._fail(batch[0].sequence, error)

    def _written(self, batch: Sequence[Envelope]) -> None:
        self._durable = batch[-1].sequence
        if self._queue and not self._due:
            self._soon()
        if self._waiters:
            self._wake()
        if self._on_durable is not None:
            self._on_durable(self.execution_id)
        if self._hooks.on_commit is not None:
            for envelope in batch:
                call(self._hooks.on_commit, envelope)

    def _fail(self, sequence: int, error: BaseException) -> None:
        self.failure = write_error(self.execution_id, sequence, error)
        self._queue.clear()
        self._wake()
        call(self._hooks.on_storage_error, self.failure)
        if self.on_failure is not None:
            self.on_failure()

    def _wake(self) -> None:
        waiting, self._waiters = self._waiters, []
        for sequence, waiter in waiting:
            if self.failure is None and self._durable < sequence:
                self._waiters.append((sequence, waiter))
            elif not waiter.done():
                waiter.set_result(None)


class Room:
    """Awaiting it waits until the journal's queue has room; not awaiting it costs nothing."""

    __slots__ = ("_cancelled", "_journal")

    def __init__(self, journal: ExecutionJournal, cancelled: Callable[[], object] | None) -> None:
        self._journal = journal
        self._cancelled = cancelled

    def __await__(self) -> Generator[None, None, None]:
        if self._journal._next - self._journal._durable > QUEUE_EVENTS:
            yield from self._wait().__await__()

    async def _wait(self) -> None:
        try:
            await self._journal._until(self._journal._next - QUEUE_EVENTS)
        except StorageWriteError as error:
            raise AbortSignal from error
        except asyncio.CancelledError:
            if self._cancelled is not None:
                self._cancelled()
            raise


# What to do about a write that was refused because another process drives the execution.
FENCED_OUT = (
    "Another process drives the execution now: wait for it by runtime.handle(id). Give every process that "
    "shares the store lease_ttl_s, or they take over from each other what is alive."
)

# Failed writes that tell callers what is wrong with the store.
_KINDS = (StoreBusyError, StoreFullError, StoreReadOnlyError)


def write_error(execution_id: str, sequence: int, error: BaseException) -> StorageWriteError:
    """Return `error` as a `StorageWriteError` that names this execution and sequence.

    Its kind, reason and doubt are kept where it names another one, as behind decorators.
    """
    if (
        isinstance(error, StorageWriteError)
        and error.execution_id == execution_id
        and error.sequence is not None
    ):
        return error
    if isinstance(error, StorageWriteError):
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), StorageWriteError)
        failure = kind(execution_id, sequence, error.reason)
        failure.doubtful = error.doubtful
    else:
        failure = StorageWriteError(execution_id, sequence, f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    if fenced_out(failure):
        failure.hint = FENCED_OUT
    return failure


def fenced_out(error: BaseException) -> bool:
    """Whether a run could not go on because somebody else drives, or has ended, its execution."""
    return isinstance(error, LeaseLostError) or (
        isinstance(error, StorageWriteError) and isinstance(error.__cause__, ConflictError)
    )
