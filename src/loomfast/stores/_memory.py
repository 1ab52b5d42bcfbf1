"""The store of Python objects: for tests, and for programs that need no durability.

What lives here: `MemoryEventStore`. It keeps every guarantee of `_spi.py`, durable meaning "until the
process ends". What it keeps beside the logs is in the files beside this one. Invariant: what is under the
lock is one method call long, so no reader sees half a batch.

A log is a list. Once truncated it is sequence 0 followed by what begins at its cut, so the event of a
sequence stands at `sequence - cut + 1`; a log that was never cut has the cut 1, which removes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from loomfast._errors import (
    BeyondLogError,
    LeaseLostError,
    SnapshotNeededError,
    UnknownExecutionError,
)
from loomfast._kernels import NO_EVENT, Envelope, State, admit, fold_events
from loomfast.stores._admission import check_range
from loomfast.stores._forking import Copier, check_branch, check_cut
from loomfast.stores._memory_branches import MemoryBranchRegistry
from loomfast.stores._memory_leases import MemoryLeaseStore
from loomfast.stores._memory_recoveries import MemoryRecoveryStore
from loomfast.stores._memory_shared import Shared
from loomfast.stores._memory_snapshots import MemorySnapshotStore
from loomfast.stores._memory_timers import MemoryTimerStore
from loomfast.stores._spi import EventStore, ExecutionSummary, PositionedEvent
from loomfast.stores._spi_arguments import check_some, check_texts, limit_of, position_of, range_of
from loomfast.stores._spi_leases import Lease, key_and_token

# How many events are folded, or copied, before the event loop gets its turn.
_SLICE = 1_000


class MemoryEventStore(EventStore):
    """Keeps envelopes as they are handed over; they must not be changed afterwards.

    Also takes payloads without a JSON form (`Opaque`). May be used from several threads and event loops.
    Every write but a long copy completes without waiting, so a cancelled caller's write has happened.
    `now_ms` is the clock that leases run out by.
    """

    persists_json = False

    def __init__(self, *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._shared = Shared(now_ms)
        self._logs: dict[str, list[Envelope]] = {}
        self._listing: list[str] = []  # execution ids by number, from 1
        self._order: list[Envelope | None] = []  # every event by position, from 1; None for a truncated one
        self._places: dict[str, list[int]] = {}  # where in `_order` each event of a log stands
        self._snapshots = MemorySnapshotStore(self._shared)
        self._branches = MemoryBranchRegistry(self._shared)
        self._leases = MemoryLeaseStore(self._shared)
        self._recoveries = MemoryRecoveryStore(self._shared)
        self._timers = MemoryTimerStore(self._shared)

    @property
    def snapshots(self) -> MemorySnapshotStore:
        return self._snapshots

    @property
    def branches(self) -> MemoryBranchRegistry:
        return self._branches

    @property
    def leases(self) -> MemoryLeaseStore:
        return self._leases

    @property
    def recoveries(self) -> MemoryRecoveryStore:
        return self._recoveries

    @property
    def timers(self) -> MemoryTimerStore:
        return self._timers

    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        self._admit(envelopes)

    def write(self, envelopes: Sequence[Envelope]) -> None:
        check_some(envelopes)
        self._admit(envelopes)

    def _admit(self, envelopes: Sequence[Envelope]) -> None:
        with self._shared.lock:
            if envelopes:
                self._shared.check_open(envelopes[0].execution_id)
                self._append(envelopes)
            else:
                self._shared.check_open()

    def _append(self, envelopes: Sequence[Envelope]) -> None:
        heads = admit(self._shared.head, envelopes)
        for execution_id, head in heads.items():
            if head.number == 0:
                self._listing.append(execution_id)
                head.number = len(self._listing)
                self._logs[execution_id] = []
                self._places[execution_id] = []
            self._timers.follow(execution_id, head.number, head.wake_at)
        self._shared.heads.update(heads)
        place = len(self._order)
        if len(heads) == 1:
            self._logs[execution_id].extend(envelopes)
            self._places[execution_id].extend(range(place, place + len(envelopes)))
        else:
            for event in envelopes:
                self._logs[event.execution_id].append(event)
                self._places[event.execution_id].append(place)
                place += 1
        self._order.extend(envelopes)

    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[Envelope]:
        first, last = range_of(first, last)
        with self._shared.lock:
            self._shared.check_open(execution_id)
            return self._range(execution_id, first, last)

    def _range(self, execution_id: str, first: int, last: int | None) -> list[Envelope]:
        log = self._logs.get(execution_id, [])
        cut = self._shared.cut(execution_id)
        first = max(first, 0)
        check_range(execution_id, first, last, cut)
        shift = cut - 1
        start = first if first == 0 else first - shift
        return log[start : None if last is None else max(last + 1 if last <= 0 else last + 1 - shift, 0)]

    async def fold(self, execution_id: str, state: State | None = None) -> State | None:
        events = await self.read_from(execution_id, 0 if state is None else state.sequence + 1)
        for first in range(0, len(events), _SLICE):
            if first:
                await asyncio.sleep(0)
            state = fold_events(state, events[first : first + _SLICE])
        return state

    async def last_sequence(self, execution_id: str) -> int | None:
        with self._shared.lock:
            self._shared.check_open(execution_id)
            last = self._shared.head(execution_id).last_sequence
            return None if last == NO_EVENT else last

    async def list_executions(
        self, *, status: str | None = None, after: int = 0, limit: int = 100
    ) -> list[ExecutionSummary]:
        after, limit = position_of(after), limit_of(limit)
        page: list[ExecutionSummary] = []
        with self._shared.lock:
            self._shared.check_open()
            check_texts("" if status is None else status)
            for number in range(after + 1, len(self._listing) + 1):
                execution_id = self._listing[number - 1]
                head = self._shared.heads[execution_id]
                if status is None or head.status == status:
                    page.append(
                        ExecutionSummary(execution_id, head.flow_id, head.status, head.last_sequence, number)
                    )
                    if len(page) == limit:
                        break
        return page

    async def acquire_fence(self, execution_id: str, *, lease: Lease | None = None) -> int:
        under = key_and_token(lease)
        with self._shared.lock:
            self._shared.check_open(execution_id)
            if under is not None and not self._leases.holds(*under):
                raise LeaseLostError(execution_id)
            head = self._shared.head(execution_id).copy()
            head.fence = (head.fence or 0) + 1
            self._shared.heads[execution_id] = head
            return head.fence

    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        after, limit = position_of(after), limit_of(limit)
        with self._shared.lock:
            self._shared.check_open()
            page: list[PositionedEvent] = []
            for place in range(after, len(self._order)):
                event = self._order[place]
                if event is not None:
                    page.append(PositionedEvent(place + 1, event))
                    if len(page) == limit:
                        break
        return page

    async def truncate_prefix(self, execution_id: str, before: int) -> int:
        check_cut(before)
        with self._shared.lock:
            self._shared.check_open(execution_id)
            last = self._shared.head(execution_id).last_sequence
            if last == NO_EVENT:
                raise UnknownExecutionError(execution_id)
            cut = self._shared.cut(execution_id)
            new_cut = min(before, last)
            if new_cut <= cut:
                return 0
            if not self._snapshots.covers(execution_id, new_cut - 1):
                raise SnapshotNeededError(execution_id, new_cut - 1)
            removed = new_cut - cut
            places = self._places[execution_id]
            for place in places[1 : 1 + removed]:
                self._order[place] = None
            del places[1 : 1 + removed]
            del self._logs[execution_id][1 : 1 + removed]
            self._shared.cuts[execution_id] = new_cut
            return removed

    async def copy_prefix(
        self,
        source_id: str,
        target_id: str,
        through: int,
        *,
        fork_metadata: Mapping[str, object] | None = None,
        branch_name: str | None = None,
    ) -> None:
        copier = Copier(source_id, target_id, through, fork_metadata)
        if branch_name is not None:
            check_branch(branch_name, target_id, source_id, through)
        with self._shared.lock:
            self._shared.check_open(source_id)
            last = self._shared.head(source_id).last_sequence
            if last == NO_EVENT:
                raise UnknownExecutionError(source_id)
            if through > last:
                raise BeyondLogError(source_id, through, last)
            events = self._range(source_id, 0, through)
        if len(events) > _SLICE:
            copies = await asyncio.to_thread(lambda: [copier(event) for event in events])
        else:
            copies = [copier(event) for event in events]
        with self._shared.lock:
            self._shared.check_open(target_id)
            admit(self._shared.head, copies[:1])  # an existing target comes before a taken name
            if branch_name is not None:
                self._branches.judge(branch_name, target_id, source_id, through)
            self._append(copies)
            if branch_name is not None:
                self._branches.keep(branch_name, target_id, source_id, through)

    async def close(self) -> None:
        with self._shared.lock:
            self._shared.closed = True
