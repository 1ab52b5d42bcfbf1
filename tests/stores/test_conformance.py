"""Every store and every decorator passes the conformance kit, alone and stacked.

A class per store, as a store's author would write it. The clock of the stores here is the tests' own, so that
nothing waits for a lease to end.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from loomfast._core.snapshots import Snapshot
from loomfast._errors import BadInputError
from loomfast.stores import (
    CoalescingEventStore,
    EventStore,
    MemoryEventStore,
    PostgresEventStore,
    ReplicaReadEventStore,
    SqliteEventStore,
    TenantScopedEventStore,
    _spi,
    _spi_arguments,
    _spi_branches,
    _spi_leases,
    _spi_recoveries,
    _spi_snapshots,
    _spi_timers,
)
from loomfast.stores._postgres_rows import key_of
from loomfast.testing.conformance import Conformance, EventStoreConformance, guarantees_checked
from loomfast.testing.postgres import PostgresServer

from .programs import damage_kept, foreign, on_the_server


class OnAClockOfItsOwn(Conformance):
    """The store's time goes on when a test waits, and not otherwise."""

    now = 1_790_000_000_000

    def now_ms(self) -> int:
        return self.now

    async def wait(self, seconds: float) -> None:
        self.now += round(seconds * 1000)


class OnMemory(OnAClockOfItsOwn):
    without = ("restart", "sharing", "damaged-events")

    @asynccontextmanager
    async def open_store(self) -> AsyncIterator[EventStore]:
        self.memory = MemoryEventStore(now_ms=self.now_ms)
        async with self.memory, self.decorated(self.memory) as store:
            yield store

    def decorated(self, inner: EventStore) -> AbstractAsyncContextManager[EventStore]:
        return inner

    async def damage_snapshot(self, store: EventStore, damaged: Snapshot) -> None:
        stored = dataclasses.replace(damaged, execution_id=self.named(damaged.execution_id))
        self.memory._snapshots._kept[stored.execution_id][stored.sequence] = stored


class OnSqlite(OnAClockOfItsOwn):
    @asynccontextmanager
    async def open_store(self) -> AsyncIterator[EventStore]:
        path = self.place / "events.db"
        inner = await SqliteEventStore.open(path, synchronous="NORMAL", now_ms=self.now_ms)
        async with inner, self.decorated(inner) as store:
            yield store

    def decorated(self, inner: EventStore) -> AbstractAsyncContextManager[EventStore]:
        return inner

    async def damage_snapshot(self, store: EventStore, damaged: Snapshot) -> None:
        damage_kept(self.place / "events.db", damaged)

    async def damage_event(self, store: EventStore, execution_id: str, sequence: int) -> None:
        with foreign(self.place / "events.db") as connection:
            connection.execute(
                "UPDATE events SET timestamp = timestamp + 1 WHERE id & 4294967295 = ? AND id >> 32 = "
                "(SELECT number FROM executions WHERE executions.id = ?)",
                (sequence, self.named(execution_id)),
            )
            assert connection.changes() == 1


class TestMemory(OnMemory, EventStoreConformance):
    pass


class TestSqlite(OnSqlite, EventStoreConformance):
    pass


class OnPostgres(Conformance):
    """On the server of the test set-up. Its clock is its own, so the few tests of leases that end wait."""

    @pytest.fixture(autouse=True)
    def _schema(self, postgres_server: PostgresServer, new_schema: str) -> None:
        self.dsn, self.schema = postgres_server.dsn, new_schema

    @asynccontextmanager
    async def open_store(self) -> AsyncIterator[EventStore]:
        self.postgres = await PostgresEventStore.open(self.dsn, schema=self.schema)
        async with self.postgres, self.decorated(self.postgres) as store:
            yield store

    def decorated(self, inner: EventStore) -> AbstractAsyncContextManager[EventStore]:
        return inner

    async def damage_snapshot(self, store: EventStore, damaged: Snapshot) -> None:
        self._damage(
            "UPDATE snapshots SET body = $1, checksum = $2, schema_version = $3 WHERE sequence = $4",
            damaged.body,
            damaged.checksum.encode(),
            damaged.schema_version.encode(),
            damaged.sequence,
        )

    async def damage_event(self, store: EventStore, execution_id: str, sequence: int) -> None:
        self._damage(
            "UPDATE events SET timestamp = timestamp + 1 WHERE sequence = $1 AND execution ="
            " (SELECT number FROM executions WHERE key = $2)",
            sequence,
            key_of(self.named(execution_id)),
        )

    def _damage(self, sql: str, *arguments: object) -> None:
        on_the_server(self.postgres, sql, *arguments)


class TestPostgres(OnPostgres, EventStoreConformance):
    pass


# --- decorators ----------------------------------------------------------------------------------

# What a decorator adds does not depend on how many events there are, save that they must all get through.
FEWER = (1, 2, 999, 5_000)


class Coalesced(Conformance):
    sizes = FEWER

    def decorated(self, inner: EventStore) -> EventStore:
        return CoalescingEventStore(inner)


class Lingering(Conformance):
    sizes = FEWER

    def decorated(self, inner: EventStore) -> EventStore:
        return CoalescingEventStore(inner, max_linger_ms=2, max_events=50, max_waiting_events=100)


class Scoped(Conformance):
    sizes = FEWER

    def decorated(self, inner: EventStore) -> EventStore:
        return TenantScopedEventStore(inner, "a:b")

    def named(self, execution_id: str) -> str:
        return f"3:a:b:{execution_id}"


class TestCoalescingOverMemory(Coalesced, OnMemory, EventStoreConformance):
    pass


class TestCoalescingOverSqlite(Coalesced, OnSqlite, EventStoreConformance):
    pass


class TestLingeringOverMemory(Lingering, OnMemory, EventStoreConformance):
    pass


class TestCoalescingThatRejectsAll(OnMemory, EventStoreConformance):
    without = (*OnMemory.without, "isolation")
    sizes = FEWER

    def decorated(self, inner: EventStore) -> EventStore:
        return CoalescingEventStore(inner, isolate=False)


class TestCoalescingOverTenantOverPostgres(Scoped, OnPostgres, EventStoreConformance):
    def decorated(self, inner: EventStore) -> EventStore:
        return CoalescingEventStore(TenantScopedEventStore(inner, "a:b"))


class TestTenantOverMemory(Scoped, OnMemory, EventStoreConformance):
    pass


class TestTenantOverSqlite(Scoped, OnSqlite, EventStoreConformance):
    pass


class TestCoalescingOverTenantOverSqlite(Scoped, OnSqlite, EventStoreConformance):
    def decorated(self, inner: EventStore) -> EventStore:
        return CoalescingEventStore(TenantScopedEventStore(inner, "a:b"))


class TestTenantOverCoalescingOverSqlite(Scoped, OnSqlite, EventStoreConformance):
    def decorated(self, inner: EventStore) -> EventStore:
        return TenantScopedEventStore(CoalescingEventStore(inner), "a:b")


class TestTenantOverTenant(Scoped, OnMemory, EventStoreConformance):
    def decorated(self, inner: EventStore) -> EventStore:
        return TenantScopedEventStore(TenantScopedEventStore(inner, "x"), "a:b")

    def named(self, execution_id: str) -> str:
        return f"1:x:3:a:b:{execution_id}"


class WithReplica(OnSqlite):
    """A replica that does not lag: the same file, opened a second time."""

    sizes = FEWER

    @asynccontextmanager
    async def open_store(self) -> AsyncIterator[EventStore]:
        primary, replica = [
            await SqliteEventStore.open(self.place / "events.db", synchronous="NORMAL", now_ms=self.now_ms)
            for _ in range(2)
        ]
        async with primary, replica, self.decorated(ReplicaReadEventStore(primary, replica)) as store:
            yield store


class TestReplicaOverSqlite(WithReplica, EventStoreConformance):
    pass


class TestTenantOverReplica(Scoped, WithReplica, EventStoreConformance):
    pass


class TestCoalescingOverTenantOverReplica(Scoped, WithReplica, EventStoreConformance):
    def decorated(self, inner: EventStore) -> EventStore:
        return CoalescingEventStore(TenantScopedEventStore(inner, "a:b"))


class TestReplicaOverCoalescing(WithReplica, EventStoreConformance):
    def decorated(self, inner: EventStore) -> EventStore:
        assert isinstance(inner, ReplicaReadEventStore)
        return ReplicaReadEventStore(CoalescingEventStore(inner.inner), inner.replica)


# --- the kit itself ------------------------------------------------------------------------------

CONTRACT = (_spi, _spi_snapshots, _spi_branches, _spi_leases, _spi_recoveries, _spi_timers, _spi_arguments)


def test_every_numbered_guarantee_is_checked_by_a_test_of_the_kit() -> None:
    numbers = sorted(
        int(number)
        for module in CONTRACT
        for number in re.findall(r"^ ?(\d+)\. ", module.__doc__ or "", re.M)
    )
    assert numbers == list(range(1, 27))
    checked = guarantees_checked(EventStoreConformance)
    assert sorted(checked) == numbers


def test_a_suite_leaves_out_exactly_what_a_store_says_it_is_without() -> None:
    def tests(suite: type[Conformance]) -> set[str]:
        return {name for name in dir(suite) if name.startswith("test_") and getattr(suite, name) is not None}

    everything, volatile = tests(TestSqlite), tests(TestMemory)
    assert everything == tests(EventStoreConformance)
    left_out = everything - volatile
    assert {getattr(EventStoreConformance, name).needs for name in left_out} == set(TestMemory.without)
    assert all(getattr(EventStoreConformance, name).needs not in TestMemory.without for name in volatile)


def test_a_store_cannot_be_without_what_the_kit_does_not_know() -> None:
    with pytest.raises(BadInputError, match="sleep"):
        type("Tired", (EventStoreConformance,), {"without": ("sleep",)})
