"""Whether a store holds what it should: every log, head, snapshot, branch and timer, read and compared.

What lives here: `verify_store`, which works on any store through its contract. What must not: mending, and
anything that writes.

Every execution of the listing is read event by event, which makes the store check each one's checksum, and
folded here from what was read. Then the fold is what everything else is held against: the store's own fold,
the head that the listing shows, each snapshot at its sequence, the time at which the open gate wakes. What
names another execution must name one that is there. At last the total order is read from end to end.

Memory is bounded by a page of events, the state of one execution, and the ids of those found at fault. A
store in use may be verified: what was appended after an execution was listed is left to the next time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from loomfast._core.snapshots import state_of
from loomfast._errors import (
    BadInputError,
    BadSnapshotError,
    MalformedEventError,
    PrefixTruncatedError,
    StoreReadError,
)
from loomfast._kernels import Envelope, State, fold_events
from loomfast.stores import EventStore, ExecutionSummary, Wake
from loomfast.stores._spi_arguments import LAST

# Events, or executions, read at a time.
PAGE: Final = 1_000


class Fault(NamedTuple):
    """One thing that is not as it should be.

    `execution_id` is None where it concerns the store as a whole, `sequence` where it concerns no single
    event; `through` is the last sequence of a run of events that share the fault.
    """

    execution_id: str | None
    sequence: int | None
    through: int | None
    reason: str

    def __str__(self) -> str:
        about = "the store" if self.execution_id is None else f"execution {self.execution_id!r}"
        if self.sequence is None:
            return f"{about}: {self.reason}"
        if self.through == self.sequence:
            return f"{about}, sequence {self.sequence}: {self.reason}"
        return f"{about}, sequences {self.sequence} to {self.through}: {self.reason}"


@dataclass(slots=True)
class Verified:
    """How much was read, and how many faults were found."""

    executions: int = 0
    events: int = 0
    snapshots: int = 0
    branches: int = 0
    faults: int = 0


async def verify_store(
    store: EventStore,
    report: Callable[[Fault], object],
    *,
    progress: Callable[[Verified], object] | None = None,
) -> Verified:
    """Read all of a store and report each fault as it is found; return what was read and found.

    `report` gets the faults of one execution together, in the order of the listing; those of the store as a
    whole come first and last. `progress` is called after each page with the counts so far. Raises what a
    store raises that cannot be read at all (`StorageError`). Cancelling it leaves nothing behind.
    """
    verification = _Verification(store, report, progress or (lambda _: None))
    try:
        await verification.run()
    finally:
        verification.flush()
    return verification.counts


class _Verification:
    def __init__(
        self, store: EventStore, report: Callable[[Fault], object], progress: Callable[[Verified], object]
    ) -> None:
        self.counts = Verified()
        self._store = store
        self._report = report
        self._progress = progress
        self._held: Fault | None = None
        self._harmed: set[str | None] = set()
        self._previous: str | None = None  # of the listing
        self._sleeping = 0

    def fault(self, execution_id: str | None, sequence: int | None, reason: str) -> None:
        """Report a fault, once it is known how far it reaches."""
        self._harmed.add(execution_id)
        held = self._held
        if (
            held is not None
            and sequence is not None
            and held.through == sequence - 1
            and (held.execution_id, held.reason) == (execution_id, reason)
        ):
            self._held = held._replace(through=sequence)
            return
        self.flush()
        self._held = Fault(execution_id, sequence, sequence, reason)

    def flush(self) -> None:
        """Report what is held back."""
        if self._held is not None:
            self.counts.faults += 1
            self._report(self._held)
            self._held = None

    async def run(self) -> None:
        for check in (self._storage, self._executions, self._wakes, self._order):
            await self._guarded(None, check())

    async def _storage(self) -> None:
        for reason in await self._store.check_storage():
            self.fault(None, None, reason)

    async def _executions(self) -> None:
        after = 0
        while page := await self._store.list_executions(after=after, limit=PAGE):
            for summary in page:
                await self._execution(summary)
                self._previous = summary.execution_id
            if page[-1].position <= after:
                raise StoreReadError(None, f"the listing goes on from {after} in a circle")
            after = page[-1].position

    # --- one execution ---------------------------------------------------------------------------

    async def _execution(self, summary: ExecutionSummary) -> None:
        self.counts.executions += 1
        await self._guarded(summary.execution_id, self._log(summary))
        await self._guarded(summary.execution_id, self._branch(summary.execution_id))
        self._progress(self.counts)

    async def _guarded(self, execution_id: str | None, check: Awaitable[None]) -> None:
        """Make what a check could not read a fault of its execution, or of the store."""
        try:
            await check
        except StoreReadError as error:
            self.fault(execution_id, None, _said(error, execution_id))

    async def _log(self, summary: ExecutionSummary) -> None:
        execution_id, last = summary.execution_id, summary.last_sequence
        cut = await self._cut(execution_id)
        base = None if cut == 1 else await self._base(execution_id, cut)
        unread = [kept.sequence for kept in await self._store.snapshots.list(execution_id)]
        self.counts.snapshots += len(unread)
        for sequence in [sequence for sequence in unread if sequence > last]:
            await self._beyond(execution_id, sequence)
        state, whole = base, cut == 1 or base is not None
        if cut > 1:
            self.counts.events += len(await self._events(execution_id, 0, 0))
        first = 0 if cut == 1 else cut
        while first <= last:
            end = min(first + PAGE - 1, last)
            events = await self._events(execution_id, first, end)
            self.counts.events += len(events)
            whole = whole and len(events) == end - first + 1
            if whole:
                state, whole = await self._fold(execution_id, state, events, unread)
            first = end + 1
            self._progress(self.counts)
        for sequence in unread:  # those that nothing could be held against
            await self._snapshot(execution_id, sequence, None)
        if whole and state is not None:
            await self._head(summary, base, state)

    async def _cut(self, execution_id: str) -> int:
        """The first sequence beyond 0 that was not truncated; 1 where nothing was."""
        try:
            await self._store.read_range(execution_id, 1, 1)
        except PrefixTruncatedError as error:
            return error.first_available
        except StoreReadError:
            pass  # it is met again, and reported, when its turn comes
        return 1

    async def _base(self, execution_id: str, cut: int) -> State | None:
        """The state of the earliest sound snapshot that has what was truncated."""
        for summary in await self._store.snapshots.list(execution_id):
            if summary.sequence >= cut - 1:
                state = await self._snapshot(execution_id, summary.sequence, None, quiet=True)
                if state is not None:
                    return state
        self.fault(
            execution_id, None, f"what lies before sequence {cut} was truncated, and no sound snapshot has it"
        )
        return None

    async def _events(self, execution_id: str, first: int, last: int) -> list[Envelope]:
        """Read events and report those that cannot be; halve the range until each of these stands alone."""
        try:
            events = await self._store.read_range(execution_id, first, last)
        except StoreReadError as error:
            if first < last:
                middle = (first + last) // 2
                low = await self._events(execution_id, first, middle)
                return low + await self._events(execution_id, middle + 1, last)
            self.fault(execution_id, first, _said(error, execution_id, first))
            return []
        expected = first
        for event in events:
            if (event.execution_id, event.sequence) != (execution_id, expected):
                self.fault(execution_id, expected, f"{event.id} stands in its place")
            expected += 1
            try:
                event.payload, event.metadata  # noqa: B018  # read to see whether they can be
            except BadInputError as error:
                self.fault(execution_id, event.sequence, str(error))
        for sequence in range(expected, last + 1):
            self.fault(execution_id, sequence, "is missing from the log")
        return events

    async def _fold(
        self, execution_id: str, state: State | None, events: Sequence[Envelope], unread: list[int]
    ) -> tuple[State | None, bool]:
        """Fold a page, and hold each snapshot of it against the fold; tell whether it could be folded."""
        start = 0
        behind = -1 if state is None else state.sequence
        places = [at for at in unread if events[0].sequence <= at <= events[-1].sequence]
        for at in [*places, events[-1].sequence]:
            some = [event for event in events[start : at - events[0].sequence + 1] if event.sequence > behind]
            try:
                state = fold_events(state, some) if some else state
            except MalformedEventError as error:
                self.fault(execution_id, error.sequence, f"does not fold: {error.field}: {error.reason}")
                return state, False
            start = at - events[0].sequence + 1
            if at in unread:
                unread.remove(at)
                await self._snapshot(execution_id, at, state)
        return state, True

    async def _snapshot(
        self, execution_id: str, sequence: int, state: State | None, *, quiet: bool = False
    ) -> State | None:
        """Return the state that a snapshot holds, None for a bad one; compare it with one of its time."""
        snapshot = await self._store.snapshots.latest(execution_id, sequence)
        if snapshot is None or snapshot.sequence != sequence:
            return None  # deleted meanwhile
        try:
            kept = state_of(snapshot)
        except BadSnapshotError as error:
            if not quiet:
                self.fault(execution_id, sequence, f"bad snapshot: {error.field}: {error.reason}")
            return None
        if state is not None and state.sequence == sequence and kept != state:
            self.fault(execution_id, sequence, "the snapshot is another state than the log folds to")
        return kept

    async def _beyond(self, execution_id: str, sequence: int) -> None:
        last = await self._store.last_sequence(execution_id)
        if last is None or sequence > last:
            self.fault(execution_id, sequence, "the snapshot is of a sequence that the log does not hold")

    async def _head(self, summary: ExecutionSummary, base: State | None, state: State) -> None:
        execution_id = summary.execution_id
        for name, shown, folded in (
            ("last sequence", summary.last_sequence, state.sequence),
            ("status", summary.status, state.status),
            ("flow", summary.flow_id, state.flow_id),
        ):
            if shown != folded:
                self.fault(execution_id, None, f"its {name} is listed as {shown!r}, its log says {folded!r}")
        behind = await self._store.read_range(execution_id, state.sequence + 1, state.sequence + 1)
        if behind and await self._unchanged(state):
            self.fault(execution_id, state.sequence + 1, "stands behind the end of the log")
        again = await self._store.fold(execution_id, base)
        if again is not None and again.sequence == state.sequence and again != state:
            self.fault(execution_id, None, "the store folds its log to another state than its events do")
        if state.pending is not None and state.pending.wake_at is not None:
            await self._wake(state, min(state.pending.wake_at, LAST))

    async def _unchanged(self, state: State) -> bool:
        return await self._store.last_sequence(state.execution_id) == state.sequence

    async def _branch(self, execution_id: str) -> None:
        branch = await self._store.branches.branch_of(execution_id)
        if branch is None:
            return
        self.counts.branches += 1
        label = f"branch {branch.name!r} of {branch.origin_id!r}"
        if await self._store.branches.get(branch.origin_id, branch.name) != branch:
            self.fault(execution_id, None, f"{label}: the name stands for another execution")
        if await self._store.last_sequence(branch.origin_id) is None:
            self.fault(execution_id, None, f"{label}: there is no such execution")
        if branch.parent_id is not None:
            last = await self._store.last_sequence(branch.parent_id)
            if last is None or branch.cut is None or branch.cut > last:
                self.fault(execution_id, None, f"{label}: {branch.parent_id!r} has no sequence {branch.cut}")

    # --- timers, and the total order -------------------------------------------------------------

    async def _wake(self, state: State, wake_at: int) -> None:
        """Look for a gate among those that are due: it stands right behind the execution listed before it."""
        self._sleeping += 1
        if self._previous is None:
            found = await self._first_at(wake_at)
        else:
            behind = Wake(self._previous, wake_at)
            page = await self._store.timers.due_wakes(wake_at, after=behind, limit=1)
            found = page[0] if page else None
        if found != Wake(state.execution_id, wake_at) and await self._unchanged(state):
            self.fault(
                state.execution_id,
                None,
                f"its gate wakes at {wake_at}, and is not among those that are due then",
            )

    async def _first_at(self, wake_at: int) -> Wake | None:
        async for page in self._due_pages(wake_at):
            for wake in page:
                if wake.wake_at == wake_at:
                    return wake
        return None

    async def _due_pages(self, at_ms: int) -> AsyncIterator[list[Wake]]:
        """Yield all gates that are due. Raises `StoreReadError` where damage leads back to what was read."""
        after: Wake | None = None
        mark: Wake | None = None  # where page 1, 2, 4, 8, … ended: a circle of any length comes back to one
        pages = 0
        while page := await self._store.timers.due_wakes(at_ms, after=after, limit=PAGE):
            after = page[-1]
            if after == mark:
                raise StoreReadError(None, f"the gates that are due lead back to {after.execution_id!r}")
            yield page
            pages += 1
            if not pages & (pages - 1):
                mark = after

    async def _wakes(self) -> None:
        """Look for gates that are due and should not be, if more are than the logs have."""
        number = 0
        async for page in self._due_pages(LAST):
            number += len(page)
        if number <= self._sleeping:
            return
        async for page in self._due_pages(LAST):
            for wake in page:
                if wake.execution_id not in self._harmed:
                    await self._guarded(wake.execution_id, self._due(wake))

    async def _due(self, wake: Wake) -> None:
        cut = await self._cut(wake.execution_id)
        base = None if cut == 1 else await self._base(wake.execution_id, cut)
        state = await self._store.fold(wake.execution_id, base)
        if state is None:
            self.fault(wake.execution_id, None, f"is due at {wake.wake_at}, and holds no event")
            return
        at = None if state.pending is None else state.pending.wake_at
        if (at is None or min(at, LAST) != wake.wake_at) and await self._unchanged(state):
            self.fault(wake.execution_id, None, f"is due at {wake.wake_at}, and no gate of its wakes then")

    async def _order(self) -> None:
        after = number = 0
        while True:
            try:
                page = await self._store.read_all(after, limit=PAGE)
            except StoreReadError as error:
                if error.execution_id is None or error.execution_id not in self._harmed:
                    self.fault(
                        error.execution_id, None, f"in the total order: {_said(error, error.execution_id)}"
                    )
                if error.position is None or error.position <= after:
                    return
                after = error.position
                continue
            if not page:
                break
            for position, event in page:
                if position <= after:
                    self.fault(
                        event.execution_id, event.sequence, f"its position {position} comes after {after}"
                    )
                    return
                after = position
            number += len(page)
        if number < self.counts.events:
            missing = self.counts.events - number
            self.fault(None, None, f"{missing} events of the logs are missing from the total order")


def _said(error: StoreReadError, execution_id: str | None, sequence: int | None = None) -> str:
    """What an error says, without what a fault names beside it."""
    text = str(error)
    if sequence is not None:
        text = text.removeprefix(f"execution {execution_id!r}, sequence {sequence}: ")
    about = "the store" if execution_id is None else f"execution {execution_id!r}"
    return text.removeprefix(f"{about}: ").removeprefix(f"{about} ")
