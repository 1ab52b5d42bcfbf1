"""What a tenant keeps beside its logs: snapshots, branches, leases, accounts, timers and schedules.

What lives here: the tenant's view of each registry of the store inside. What must not: storage, and the form
of ids (`_tenant_scope.py`). Invariant: as for `TenantScopedEventStore`.

A snapshot says of which execution it is, inside and out, and its checksum covers that. So it is written anew
under the stored id when it is saved and under the tenant's when it is read; a damaged one stays damaged.
A lease's key and owner are both the tenant's; tokens, times and versions are the store's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loomfast._core.snapshots import Snapshot
from loomfast._errors import BadSnapshotError, UnknownBranchError
from loomfast._kernels import encode
from loomfast.stores._spi import EventStore
from loomfast.stores._spi_arguments import limit_of
from loomfast.stores._spi_branches import Branch, BranchRegistry, Tip
from loomfast.stores._spi_leases import Lease, LeaseStore, check_keys, check_lease, check_ttl
from loomfast.stores._spi_recoveries import Accounts, Recovery, RecoveryStore
from loomfast.stores._spi_snapshots import Faults, SnapshotStore, SnapshotSummary, Summaries
from loomfast.stores._spi_timers import ScheduleRow, ScheduleRows, TimerStore, Wake, check_schedule
from loomfast.stores._tenant_scope import SCAN_ROWS, Scope, own_page


class TenantSnapshotStore(SnapshotStore):
    """Snapshots of the tenant's executions."""

    def __init__(self, scope: Scope, store: EventStore) -> None:
        self._scope = scope
        self._store = store

    async def save(self, snapshot: Snapshot) -> None:
        own_id = self._scope.own(snapshot.execution_id)
        try:
            snapshot.verify()
        except BadSnapshotError as error:
            raise BadSnapshotError(error.field, error.reason, own_id, snapshot.sequence) from error
        await self._store.snapshots.save(await asyncio.to_thread(snapshot.renamed, own_id))

    async def latest(self, execution_id: str, at_most: int | None = None) -> Snapshot | None:
        snapshot = await self._store.snapshots.latest(self._scope.own(execution_id), at_most)
        return None if snapshot is None else await asyncio.to_thread(snapshot.renamed, execution_id)

    async def list(self, execution_id: str) -> Summaries:
        own_id = self._scope.own(execution_id)
        added_bytes = len(encode(own_id)) - len(encode(execution_id))
        return [
            SnapshotSummary(execution_id, kept.sequence, kept.schema_version, kept.size_bytes - added_bytes)
            for kept in await self._store.snapshots.list(own_id)
        ]

    async def delete(self, execution_id: str, below: int) -> int:
        return await self._store.snapshots.delete(self._scope.own(execution_id), below)

    async def verify(self, execution_id: str | None = None) -> Faults:
        if execution_id is not None:
            return await self._store.snapshots.verify(self._scope.own(execution_id))
        self._scope.check_open()
        faults: Faults = []
        after = 0
        while page := await self._store.list_executions(after=after, limit=SCAN_ROWS):
            for summary in page:
                if self._scope.bare(summary.execution_id) is not None:
                    faults += await self._store.snapshots.verify(summary.execution_id)
            after = page[-1].position
        return faults


class TenantBranchRegistry(BranchRegistry):
    """Branches of the tenant's executions; names are the tenant's own as they are."""

    def __init__(self, scope: Scope, store: EventStore) -> None:
        self._scope = scope
        self._store = store

    async def add(self, name: str, execution_id: str, *, parent_id: str, cut: int) -> Branch:
        own_id, own_parent = self._scope.own(execution_id), self._scope.own(parent_id)
        branch = await self._store.branches.add(name, own_id, parent_id=own_parent, cut=cut)
        origin_id = self._scope.bare(branch.origin_id)
        return branch._replace(
            origin_id=parent_id if origin_id is None else origin_id,
            execution_id=execution_id,
            parent_id=parent_id,
        )

    async def get(self, origin_id: str, name: str) -> Branch | None:
        branch = await self._store.branches.get(self._scope.own(origin_id), name)
        return None if branch is None else self._outward(branch)

    async def refs(self, origin_id: str) -> list[Branch]:
        branches = await self._store.branches.refs(self._scope.own(origin_id))
        return [own for own in map(self._outward, branches) if own is not None]

    async def tips(self, origin_id: str) -> list[Tip]:
        tips = []
        for tip in await self._store.branches.tips(self._scope.own(origin_id)):
            execution_id = self._scope.bare(tip.execution_id)
            if execution_id is not None:
                tips.append(tip._replace(execution_id=execution_id))
        return tips

    async def children(self, execution_id: str) -> list[Branch]:
        branches = await self._store.branches.children(self._scope.own(execution_id))
        return [own for own in map(self._outward, branches) if own is not None]

    async def branch_of(self, execution_id: str) -> Branch | None:
        branch = await self._store.branches.branch_of(self._scope.own(execution_id))
        return None if branch is None else self._outward(branch)

    async def promote(self, origin_id: str, name: str) -> Branch:
        own_origin = self._scope.own(origin_id)
        named = await self._store.branches.get(own_origin, name)
        if named is not None and self._outward(named) is None:
            raise UnknownBranchError(own_origin, name)
        promoted = self._outward(await self._store.branches.promote(own_origin, name))
        assert promoted is not None  # a name stands for one execution for ever, and it was looked at
        return promoted

    def _outward(self, branch: Branch) -> Branch | None:
        origin_id = self._scope.bare(branch.origin_id)
        execution_id = self._scope.bare(branch.execution_id)
        parent_id = None if branch.parent_id is None else self._scope.bare(branch.parent_id)
        if origin_id is None or execution_id is None or (parent_id is None) != (branch.parent_id is None):
            return None  # a lineage that somebody made across tenants, on the store inside
        return branch._replace(origin_id=origin_id, execution_id=execution_id, parent_id=parent_id)


class TenantLeaseStore(LeaseStore):
    """Leases on the tenant's keys, by the tenant's owners."""

    def __init__(self, scope: Scope, store: EventStore) -> None:
        self._scope = scope
        self._store = store

    async def acquire(self, key: str, owner: str, ttl_s: float) -> Lease | None:
        check_lease(key, owner, ttl_s)
        own_key, own_owner = self._scope.own(key), self._scope.own(owner)
        lease = await self._store.leases.acquire(own_key, own_owner, ttl_s)
        return None if lease is None else lease._replace(key=key, owner=owner)

    async def renew(self, leases: Sequence[Lease], ttl_s: float) -> list[Lease]:
        check_ttl(ttl_s)
        renewed = await self._store.leases.renew(self._inward(leases), ttl_s)
        return [own for own in map(self._outward, renewed) if own is not None]

    async def release(self, leases: Sequence[Lease]) -> None:
        await self._store.leases.release(self._inward(leases))

    async def held(self, keys: Sequence[str]) -> list[Lease]:
        self._scope.check_open()
        check_keys(keys)
        held = await self._store.leases.held([self._scope.own(key) for key in keys])
        return [own for own in map(self._outward, held) if own is not None]

    def inward(self, lease: Lease) -> Lease:
        """Return a lease of the tenant's as it is stored."""
        return lease._replace(key=self._scope.own(lease.key), owner=self._scope.own(lease.owner))

    def _inward(self, leases: Sequence[Lease]) -> list[Lease]:
        self._scope.check_open()
        return [self.inward(lease) for lease in leases]

    def _outward(self, lease: Lease) -> Lease | None:
        key, owner = self._scope.bare(lease.key), self._scope.bare(lease.owner)
        return None if key is None or owner is None else lease._replace(key=key, owner=owner)


class TenantRecoveryStore(RecoveryStore):
    """Accounts of the tenant's executions."""

    def __init__(self, scope: Scope, store: EventStore) -> None:
        self._scope = scope
        self._store = store

    async def get(self, execution_id: str) -> Recovery | None:
        recovery = await self._store.recoveries.get(self._scope.own(execution_id))
        return None if recovery is None else recovery._replace(execution_id=execution_id)

    async def put(self, recovery: Recovery) -> None:
        own_id = self._scope.own(recovery.execution_id)
        await self._store.recoveries.put(recovery._replace(execution_id=own_id))

    async def delete(self, execution_id: str) -> bool:
        return await self._store.recoveries.delete(self._scope.own(execution_id))

    async def list(self, *, after: str | None = None, limit: int = 100) -> Accounts:
        self._scope.check_open()
        limit = limit_of(limit)

        def outward(recovery: Recovery) -> Recovery | None:
            execution_id = self._scope.bare(recovery.execution_id)
            return None if execution_id is None else recovery._replace(execution_id=execution_id)

        return await own_page(
            lambda mark, rows: self._store.recoveries.list(after=mark, limit=rows),
            None if after is None else self._scope.own(after),
            lambda recovery: recovery.execution_id,
            outward,
            limit,
        )


class TenantTimerStore(TimerStore):
    """Due gates of the tenant's executions, and the tenant's schedules."""

    def __init__(self, scope: Scope, store: EventStore) -> None:
        self._scope = scope
        self._store = store

    async def due_wakes(self, at_ms: int, *, after: Wake | None = None, limit: int = 100) -> list[Wake]:
        self._scope.check_open()
        limit = limit_of(limit)

        def outward(wake: Wake) -> Wake | None:
            execution_id = self._scope.bare(wake.execution_id)
            return None if execution_id is None else wake._replace(execution_id=execution_id)

        return await own_page(
            lambda mark, rows: self._store.timers.due_wakes(at_ms, after=mark, limit=rows),
            None if after is None else after._replace(execution_id=self._scope.own(after.execution_id)),
            lambda wake: wake,
            outward,
            limit,
        )

    async def due_schedules(
        self, at_ms: int, *, after: ScheduleRow | None = None, limit: int = 100
    ) -> ScheduleRows:
        self._scope.check_open()
        limit = limit_of(limit)
        return await own_page(
            lambda mark, rows: self._store.timers.due_schedules(at_ms, after=mark, limit=rows),
            None if after is None else after._replace(schedule_id=self._scope.own(after.schedule_id)),
            lambda schedule: schedule,
            self._outward,
            limit,
        )

    async def put(self, schedule: ScheduleRow) -> ScheduleRow | None:
        check_schedule(schedule)
        own_id = self._scope.own(schedule.schedule_id)
        kept = await self._store.timers.put(schedule._replace(schedule_id=own_id))
        return None if kept is None else self._outward(kept)

    async def get(self, schedule_id: str) -> ScheduleRow | None:
        kept = await self._store.timers.get(self._scope.own(schedule_id))
        return None if kept is None else self._outward(kept)

    async def delete(self, schedule_id: str) -> bool:
        return await self._store.timers.delete(self._scope.own(schedule_id))

    async def list(self, *, after: str = "", limit: int = 100) -> ScheduleRows:
        # One tenant's ids stand together in the order of ids, since they begin in the same way.
        kept = await self._store.timers.list(after=self._scope.own(after), limit=limit)
        return [own for own in map(self._outward, kept) if own is not None]

    def _outward(self, schedule: ScheduleRow) -> ScheduleRow | None:
        schedule_id = self._scope.bare(schedule.schedule_id)
        return None if schedule_id is None else schedule._replace(schedule_id=schedule_id)
