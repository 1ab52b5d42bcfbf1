"""How a process dies: a store that lets so many writes become durable and then stops everything.

What lives here: `CrashingStore`, and `Crash`, the moment. What must not: which crashes are played (crash).

Theory of operation
-------------------
*The crash.* After `after` writes the store raises `ProcessKilled`. That is a `SystemExit`, which asyncio lets
through everything: the loop stops in the middle of that very callback, as after kill -9. What is left of the
program is then unwound without power: the store refuses every call and so does the world, so that no
`finally` block and no cancelled step gets anything into the log.

*The two moments.* A process may die before it hears that its write is durable, or at any time after, until
its next write. The first is the moment of the write itself; of the second only the last instant is played,
since nothing in between is seen by anyone but the world. With `batch_events=1` every event is a write of its
own, and no boundary between two events is left out.

    writes    0         1         2                 the journal's appends
              STARTED   A         STEP_STARTED
    after=2           A durable ┤├ unheard of       acknowledged=False
                                  … effect runs ┤   acknowledged=True
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from loomfast._kernels import Envelope, State
from loomfast.stores import (
    BranchRegistry,
    EventStore,
    ExecutionSummary,
    Lease,
    LeaseStore,
    PositionedEvent,
    RecoveryStore,
    SnapshotStore,
    TimerStore,
)
from loomfast.testing.time import running_loop
from loomfast.testing.world import ProcessGoneError


class ProcessKilled(SystemExit):
    """The process model stops here. It passes through everything, as SystemExit does."""


class Crash(NamedTuple):
    """When a life ends: after `after` writes, before or after the process heard of the last one."""

    after: int
    acknowledged: bool = False

    def __str__(self) -> str:
        return f"after write {self.after} {'(acknowledged)' if self.acknowledged else '(unheard of)'}"


class CrashingStore(EventStore):
    """An event store, as a process that dies sees it.

    `crash` says after which write (`append` or `append_batch`) it dies; None: never. `observe` is told of
    each write the moment it is durable, `on_crash` of the crash; `latency_s` says how long the next write
    takes. Runs under virtual time.
    """

    def __init__(
        self,
        inner: EventStore,
        crash: Crash | None = None,
        *,
        observe: Callable[[Sequence[Envelope]], object] = lambda envelopes: None,
        on_crash: Callable[[], object] = lambda: None,
        latency_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.inner = inner
        self.persists_json = inner.persists_json
        self.writes = 0
        self.crashed = False
        self._crash = crash
        self._observe = observe
        self._on_crash = on_crash
        self._latency_s = latency_s

    async def append(self, envelope: Envelope) -> None:
        await self._write(self.inner.append, envelope, (envelope,))

    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        await self._write(self.inner.append_batch, envelopes, envelopes)

    async def _write(
        self, append: Callable[[Any], Awaitable[None]], argument: Any, envelopes: Sequence[Envelope]
    ) -> None:
        delay_s = self._latency_s()
        if delay_s:
            await asyncio.sleep(delay_s)
        async with running_loop().outside():
            self._check()
            if self._crash is not None and self.writes == self._crash.after:
                self._die()
            await append(argument)
            self.writes += 1
            self._observe(envelopes)
            if self._crash is not None and self.writes == self._crash.after and not self._crash.acknowledged:
                self._die()

    def _die(self) -> None:
        self.crashed = True
        self._on_crash()
        raise ProcessKilled

    def _check(self) -> None:
        if self.crashed:
            raise ProcessGoneError("the process that used this store has been stopped")

    async def _reach(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async with running_loop().outside():
            self._check()
            return await call()

    async def read_range(self, execution_id: str, first: int, last: int | None) -> list[Envelope]:
        events: list[Envelope] = await self._reach(lambda: self.inner.read_range(execution_id, first, last))
        return events

    async def fold(self, execution_id: str, state: State | None = None) -> State | None:
        folded: State | None = await self._reach(lambda: self.inner.fold(execution_id, state))
        return folded

    async def last_sequence(self, execution_id: str) -> int | None:
        last: int | None = await self._reach(lambda: self.inner.last_sequence(execution_id))
        return last

    async def list_executions(
        self, *, status: str | None = None, after: int = 0, limit: int = 100
    ) -> list[ExecutionSummary]:
        page: list[ExecutionSummary] = await self._reach(
            lambda: self.inner.list_executions(status=status, after=after, limit=limit)
        )
        return page

    async def acquire_fence(self, execution_id: str, *, lease: Lease | None = None) -> int:
        token: int = await self._reach(lambda: self.inner.acquire_fence(execution_id, lease=lease))
        return token

    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        page: list[PositionedEvent] = await self._reach(lambda: self.inner.read_all(after, limit=limit))
        return page

    async def truncate_prefix(self, execution_id: str, before: int) -> int:
        removed: int = await self._reach(lambda: self.inner.truncate_prefix(execution_id, before))
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
        await self._reach(
            lambda: self.inner.copy_prefix(
                source_id, target_id, through, fork_metadata=fork_metadata, branch_name=branch_name
            )
        )

    @property
    def snapshots(self) -> SnapshotStore:
        return cast(SnapshotStore, _Reached(self.inner.snapshots, self._reach))

    @property
    def branches(self) -> BranchRegistry:
        return cast(BranchRegistry, _Reached(self.inner.branches, self._reach))

    async def check_storage(self) -> list[str]:
        return await self.inner.check_storage()

    @property
    def leases(self) -> LeaseStore:
        return cast(LeaseStore, _Reached(self.inner.leases, self._reach))

    @property
    def recoveries(self) -> RecoveryStore:
        return cast(RecoveryStore, _Reached(self.inner.recoveries, self._reach))

    @property
    def timers(self) -> TimerStore:
        return cast(TimerStore, _Reached(self.inner.timers, self._reach))


class _Reached:
    """Something beside the logs, reached the way the logs are: outside virtual time, and not once dead."""

    def __init__(
        self, inner: object, reach: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
    ) -> None:
        self._inner = inner
        self._reach = reach

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return lambda *args, **kwargs: self._reach(lambda: getattr(self._inner, name)(*args, **kwargs))
