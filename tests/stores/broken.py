"""Stores that each break one guarantee, and are sound otherwise: what the conformance kit must catch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from loomfast._core.snapshots import Snapshot
from loomfast._errors import (
    BranchExistsError,
    DuplicateSequenceError,
    LeaseLostError,
    MalformedEventError,
    PrefixTruncatedError,
    StaleFenceError,
)
from loomfast._kernels import Envelope, State
from loomfast.stores import (
    Branch,
    EventStore,
    Lease,
    MemoryEventStore,
    PositionedEvent,
    Recovery,
    ScheduleRow,
    Wake,
)
from loomfast.stores._memory_branches import MemoryBranchRegistry
from loomfast.stores._memory_leases import MemoryLeaseStore
from loomfast.stores._memory_recoveries import MemoryRecoveryStore
from loomfast.stores._memory_snapshots import MemorySnapshotStore
from loomfast.stores._memory_timers import MemoryTimerStore


def changed(event: Envelope, **parts: Any) -> Envelope:
    value = event.to_json()
    value.update(parts)
    return Envelope.from_json(value)


# --- logs ----------------------------------------------------------------------------------------


class StoresHalfBatches(MemoryEventStore):
    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        for envelope in envelopes:
            await super().append_batch((envelope,))


class LosesTheOrder(MemoryEventStore):
    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        await super().append_batch(sorted(envelopes, key=lambda one: one.execution_id))


class AcknowledgesBeforeItIsDurable(MemoryEventStore):
    late: Sequence[Envelope] = ()

    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        before, self.late = self.late, envelopes
        await super().append_batch(before)


class AnswersThroughItsPrimary(MemoryEventStore):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.left_open = MemoryEventStore(**options)

    @property
    def primary(self) -> EventStore:
        return self.left_open if self._shared.closed else self


class SwallowsDuplicates(MemoryEventStore):
    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        with contextlib.suppress(DuplicateSequenceError):
            await super().append_batch(envelopes)


class AcceptsGaps(MemoryEventStore):
    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        try:
            await super().append_batch(envelopes)
        except MalformedEventError:
            one = envelopes[0]
            last = await self.last_sequence(one.execution_id)
            free = 0 if last is None else last + 1
            await super().append_batch(
                [Envelope(one.execution_id, free, one.event_type, one.body, one.timestamp, one.subject)]
            )


class AcceptsStaleFences(MemoryEventStore):
    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        try:
            await super().append_batch(envelopes)
        except StaleFenceError as error:
            await super().append_batch(
                [changed(one, metadata={**one.metadata, "fence": error.current}) for one in envelopes]
            )


class ChecksTheSlotBeforeTheToken(MemoryEventStore):
    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        for one in envelopes:
            last = await self.last_sequence(one.execution_id)
            if last is not None and one.sequence <= last:
                raise DuplicateSequenceError(one.execution_id, one.sequence)
        await super().append_batch(envelopes)


class GivesOneTokenTwice(MemoryEventStore):
    async def acquire_fence(self, execution_id: str, *, lease: Lease | None = None) -> int:
        token = await super().acquire_fence(execution_id, lease=lease)
        if token == 7:
            self._shared.heads[execution_id].fence = 6
        return token


class IgnoresTheLease(MemoryEventStore):
    async def acquire_fence(self, execution_id: str, *, lease: Lease | None = None) -> int:
        return await super().acquire_fence(execution_id)


class LooksAtTheLeaseBeforeItFences(MemoryEventStore):
    async def acquire_fence(self, execution_id: str, *, lease: Lease | None = None) -> int:
        if lease is not None:
            held = await self.leases.get(lease.key)
            if held is None or held.token != lease.token:
                raise LeaseLostError(execution_id)
            await asyncio.sleep(0.001)  # a round trip
        return await super().acquire_fence(execution_id)


class FencesForWhomeverNobodyHasFollowed(MemoryLeaseStore):
    def holds(self, key: str, token: int) -> bool:
        lease = self._kept.get(key)
        return lease is not None and lease.token == token


class LooksAtTheOwnerOnly(MemoryEventStore):
    async def acquire_fence(self, execution_id: str, *, lease: Lease | None = None) -> int:
        if lease is not None:
            held = await self.leases.get(lease.key)
            if held is None or held.owner != lease.owner:
                raise LeaseLostError(execution_id)
        return await super().acquire_fence(execution_id)


class SortsKeys(MemoryEventStore):
    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        await super().append_batch(
            [
                changed(one, payload=json.loads(json.dumps(one.payload, sort_keys=True)))
                if isinstance(one.payload, dict)
                else one
                for one in envelopes
            ]
        )


class PassesOverAnEventBetweenPages(MemoryEventStore):
    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        return await super().read_all(after + 1 if after else 0, limit=limit)


class NumbersByTheEndOfThePage(MemoryEventStore):
    """Gives each event the position of its place on the page, not in the order."""

    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        page = await super().read_all(after, limit=limit)
        return [placed._replace(position=n) for n, placed in enumerate(page, 1)]


class BlocksTheLoop(MemoryEventStore):
    async def fold(self, execution_id: str, state: State | None = None) -> State | None:
        time.sleep(0.6)  # noqa: ASYNC251  # that is the fault
        return await super().fold(execution_id, state)


class LeavesHalfOfACancelledBatch(MemoryEventStore):
    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        await super().append_batch(envelopes[:1])
        await asyncio.sleep(0)
        await super().append_batch(envelopes[1:])


# --- cutting and copying -------------------------------------------------------------------------


class CutsWithoutASnapshot(MemoryEventStore):
    async def truncate_prefix(self, execution_id: str, before: int) -> int:
        self._snapshots.covers = lambda execution_id, sequence: True  # type: ignore[method-assign]  # on purpose
        return await super().truncate_prefix(execution_id, before)


class IsSilentAboutWhatWasCut(MemoryEventStore):
    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[Envelope]:
        try:
            return await super().read_range(execution_id, first, last)
        except PrefixTruncatedError as error:
            return await super().read_range(execution_id, error.first_available, last)


class KnowsEveryId(MemoryEventStore):
    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[Envelope]:
        return await super().read_range(str(execution_id), first, last)


class CountsInMachineWords(MemoryEventStore):
    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        if limit >= 2**63:
            raise OverflowError("int too large to convert")
        return await super().read_all(after, limit=limit)


class WritesNothing(MemoryEventStore):
    def write(self, envelopes: Sequence[Envelope]) -> None:
        if envelopes:
            super().write(envelopes)


class CopiesFencesToo(MemoryEventStore):
    async def copy_prefix(
        self,
        source_id: str,
        target_id: str,
        through: int,
        *,
        fork_metadata: Mapping[str, object] | None = None,
        branch_name: str | None = None,
    ) -> None:
        await super().copy_prefix(
            source_id, target_id, through, fork_metadata=fork_metadata, branch_name=branch_name
        )
        self._shared.heads[target_id].fence = self._shared.heads[source_id].fence


# --- beside the logs -----------------------------------------------------------------------------


class BrokenSnapshots(MemorySnapshotStore):
    async def save(self, snapshot: Snapshot) -> None:
        kept = self._kept.setdefault(snapshot.execution_id, {})
        kept[snapshot.sequence] = snapshot  # whatever it is, and of whatever there is


class KeepsTheFirstSnapshot(MemorySnapshotStore):
    async def save(self, snapshot: Snapshot) -> None:
        if snapshot.sequence not in self._kept.get(snapshot.execution_id, {}):
            await super().save(snapshot)


class HidesDamagedSnapshots(MemorySnapshotStore):
    async def latest(self, execution_id: str, at_most: int | None = None) -> Snapshot | None:
        snapshot = await super().latest(execution_id, at_most)
        try:
            if snapshot is not None:
                snapshot.verify()
        except Exception:
            return None
        return snapshot


class DeletesTheLastCover(MemorySnapshotStore):
    async def delete(self, execution_id: str, below: int) -> int:
        kept = self._kept.get(execution_id, {})
        gone = [sequence for sequence in kept if sequence < below]
        for sequence in gone:
            del kept[sequence]
        return len(gone)


class ForgetsBranches(MemoryBranchRegistry):
    def keep(self, name: str, execution_id: str, parent_id: str, cut: int) -> None:
        if len(self._by_execution) < 3:
            super().keep(name, execution_id, parent_id, cut)


class GivesANameAway(MemoryBranchRegistry):
    def judge(self, name: str, execution_id: str, parent_id: str, cut: int) -> Branch | None:
        try:
            return super().judge(name, execution_id, parent_id, cut)
        except BranchExistsError:
            return None


class HasTwoMainBranches(MemoryBranchRegistry):
    def _shown(self, branch: Branch) -> Branch:
        shown = super()._shown(branch)
        return shown._replace(main=shown.main or shown.parent_id is None)


class GivesALeaseTwice(MemoryLeaseStore):
    async def acquire(self, key: str, owner: str, ttl_s: float) -> Lease | None:
        self._kept.pop(key, None)
        return await super().acquire(key, owner, ttl_s)


class ReusesTokens(MemoryLeaseStore):
    async def release(self, leases: Sequence[Lease]) -> None:
        await super().release(leases)
        if not self._kept:
            self._token = 0


class NeverEndsALease(MemoryLeaseStore):
    def _held(self, key: str) -> Lease | None:
        return self._kept.get(key)


class ForgetsWhatItWasAskedFor(MemoryLeaseStore):
    """Answers in an order of its own, and a key that is asked for twice once."""

    async def held(self, keys: Sequence[str]) -> list[Lease]:
        return [lease for lease in await super().held(sorted(self._kept)) if lease.key in keys]


class RenewsInWordsOnly(MemoryLeaseStore):
    async def renew(self, leases: Sequence[Lease], ttl_s: float) -> list[Lease]:
        before = dict(self._kept)
        renewed = await super().renew(leases, ttl_s)
        self._kept = before
        return renewed


class MergesAccounts(MemoryRecoveryStore):
    async def put(self, recovery: Recovery) -> None:
        known = await self.get(recovery.execution_id)
        if known is not None:
            recovery = recovery._replace(crashes=known.crashes + recovery.crashes)
        await super().put(recovery)


class ForgetsToStopATimer(MemoryTimerStore):
    def follow(self, execution_id: str, number: int, wake_at: int | None) -> None:
        if wake_at is not None:
            super().follow(execution_id, number, wake_at)


class WakesEarly(MemoryTimerStore):
    async def due_wakes(self, at_ms: int, *, after: Wake | None = None, limit: int = 100) -> list[Wake]:
        return await super().due_wakes(at_ms + 1, after=after, limit=limit)


class IgnoresVersions(MemoryTimerStore):
    async def put(self, schedule: ScheduleRow) -> ScheduleRow | None:
        known = self._schedules.get(schedule.schedule_id)
        return await super().put(schedule._replace(version=0 if known is None else known.version))


class RoundsTimes(MemoryTimerStore):
    async def put(self, schedule: ScheduleRow) -> ScheduleRow | None:
        if schedule.next_ms is not None:
            schedule = schedule._replace(next_ms=int(schedule.next_ms))
        return await super().put(schedule)


class CutsTimesOff(MemoryTimerStore):
    async def put(self, schedule: ScheduleRow) -> ScheduleRow | None:
        if isinstance(schedule.next_ms, int):
            schedule = schedule._replace(next_ms=min(schedule.next_ms, 2**63 - 1))
        return await super().put(schedule)


class CountsVersionsAnew(MemoryTimerStore):
    async def delete(self, schedule_id: str) -> bool:
        self._version = 0
        return await super().delete(schedule_id)


class HidesSchedulesBehindAPage(MemoryTimerStore):
    """Goes on behind a time, so that others of that time are never seen."""

    async def due_schedules(
        self, at_ms: int, *, after: ScheduleRow | None = None, limit: int = 100
    ) -> list[ScheduleRow]:
        if after is not None:
            after = after._replace(schedule_id="\U0010ffff")
        return await super().due_schedules(at_ms, after=after, limit=limit)


def beside(name: str, kind: Any) -> type[MemoryEventStore]:
    """A memory store with one of its registries put in place of the sound one."""

    class Broken(MemoryEventStore):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            setattr(self, f"_{name}", kind(self._shared))

    Broken.__name__ = kind.__name__
    return Broken
