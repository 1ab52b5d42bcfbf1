"""Guarantee 25: what is refused, and that a number that is only compared may be of any size."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import pytest

from loomfast._core.snapshots import snapshot_of
from loomfast._errors import BadInputError, LeaseLostError
from loomfast._kernels import fold_events
from loomfast.stores import EventStore, Lease, Recovery, ScheduleRow, Wake
from loomfast.testing.conformance._suite import LONG_S, Conformance, guarantee
from loomfast.testing.conformance.logs import event, log, parked

FAR: Final = 2**80

Calls: TypeAlias = dict[str, Callable[[EventStore, Any], Awaitable[Any]]]

# Calls with a text in the place of which anything else is refused.
WITH_A_TEXT: Final[Calls] = {
    "read": lambda store, text: store.read(text),
    "read_range": lambda store, text: store.read_range(text, 0, 0),
    "fold": lambda store, text: store.fold(text),
    "last_sequence": lambda store, text: store.last_sequence(text),
    "acquire_fence": lambda store, text: store.acquire_fence(text),
    "acquire_fence, lease": lambda store, text: store.acquire_fence("x", lease=Lease(text, "a", 1, 0)),
    "truncate_prefix": lambda store, text: store.truncate_prefix(text, 1),
    "copy_prefix, source": lambda store, text: store.copy_prefix(text, "y", 0),
    "copy_prefix, target": lambda store, text: store.copy_prefix("x", text, 0),
    "snapshots.latest": lambda store, text: store.snapshots.latest(text),
    "snapshots.latest, at_most": lambda store, text: store.snapshots.latest(text, -1),
    "snapshots.list": lambda store, text: store.snapshots.list(text),
    "snapshots.delete": lambda store, text: store.snapshots.delete(text, 1),
    "branches.add, name": lambda store, text: store.branches.add(text, "y", parent_id="x", cut=0),
    "branches.add": lambda store, text: store.branches.add("b", text, parent_id="x", cut=0),
    "branches.add, parent": lambda store, text: store.branches.add("b", "x", parent_id=text, cut=0),
    "branches.get": lambda store, text: store.branches.get(text, "b"),
    "branches.get, name": lambda store, text: store.branches.get("x", text),
    "branches.refs": lambda store, text: store.branches.refs(text),
    "branches.tips": lambda store, text: store.branches.tips(text),
    "branches.children": lambda store, text: store.branches.children(text),
    "branches.branch_of": lambda store, text: store.branches.branch_of(text),
    "branches.promote": lambda store, text: store.branches.promote(text, "b"),
    "branches.promote, name": lambda store, text: store.branches.promote("x", text),
    "leases.acquire": lambda store, text: store.leases.acquire(text, "a", LONG_S),
    "leases.acquire, owner": lambda store, text: store.leases.acquire("k", text, LONG_S),
    "leases.renew": lambda store, text: store.leases.renew([Lease(text, "a", 1, 0)], LONG_S),
    "leases.release": lambda store, text: store.leases.release([Lease(text, "a", 1, 0)]),
    "leases.get": lambda store, text: store.leases.get(text),
    "leases.held": lambda store, text: store.leases.held(["k", text]),
    "recoveries.get": lambda store, text: store.recoveries.get(text),
    "recoveries.put": lambda store, text: store.recoveries.put(Recovery(text, 1, 0, False, None)),
    "recoveries.delete": lambda store, text: store.recoveries.delete(text),
    "timers.due_wakes, after": lambda store, text: store.timers.due_wakes(0, after=Wake(text, 0)),
    "timers.due_schedules, after": lambda store, text: store.timers.due_schedules(
        0, after=ScheduleRow(text, b"{}", 0, 1)
    ),
    "timers.get": lambda store, text: store.timers.get(text),
    "timers.put": lambda store, text: store.timers.put(ScheduleRow(text, b"{}", None)),
    "timers.delete": lambda store, text: store.timers.delete(text),
    "timers.list, after": lambda store, text: store.timers.list(after=text),
}
# Those where None stands for none.
WITH_A_TEXT_OR_NONE: Final[Calls] = {
    "list_executions, status": lambda store, text: store.list_executions(status=text),
    "snapshots.verify": lambda store, text: store.snapshots.verify(text),
    "recoveries.list, after": lambda store, text: store.recoveries.list(after=text),
    "recoveries.put, set_aside": lambda store, text: store.recoveries.put(Recovery("x", 1, 0, False, text)),
}
# Calls with a number that is only compared: one that is not whole is refused.
WITH_A_NUMBER: Final[Calls] = {
    "read_range, first": lambda store, number: store.read_range("x", number, None),
    "read_range, last": lambda store, number: store.read_range("x", 0, number),
    "list_executions, after": lambda store, number: store.list_executions(after=number),
    "list_executions, limit": lambda store, number: store.list_executions(limit=number),
    "read_all, after": lambda store, number: store.read_all(number),
    "read_all, limit": lambda store, number: store.read_all(limit=number),
    "snapshots.latest, at_most": lambda store, number: store.snapshots.latest("x", number),
    "snapshots.delete, below": lambda store, number: store.snapshots.delete("x", number),
    "leases.renew, token": lambda store, number: store.leases.renew([Lease("k", "a", number, 0)], LONG_S),
    "leases.release, token": lambda store, number: store.leases.release([Lease("k", "a", number, 0)]),
    "acquire_fence, token": lambda store, number: store.acquire_fence("x", lease=Lease("k", "a", number, 0)),
    "recoveries.list, limit": lambda store, number: store.recoveries.list(limit=number),
    "timers.due_wakes, at_ms": lambda store, number: store.timers.due_wakes(number),
    "timers.due_wakes, after": lambda store, number: store.timers.due_wakes(FAR, after=Wake("x", number)),
    "timers.due_wakes, limit": lambda store, number: store.timers.due_wakes(FAR, limit=number),
    "timers.due_schedules, at_ms": lambda store, number: store.timers.due_schedules(number),
    "timers.due_schedules, after": lambda store, number: store.timers.due_schedules(
        FAR, after=ScheduleRow("s", b"{}", number, 1)
    ),
    "timers.due_schedules, limit": lambda store, number: store.timers.due_schedules(FAR, limit=number),
    "timers.list, limit": lambda store, number: store.timers.list(limit=number),
}
# Calls that write a number, or write by one that must be one of the log's.
THAT_KEEP_A_NUMBER: Final[Calls] = {
    "recoveries.put, crashes": lambda store, number: store.recoveries.put(
        Recovery("x", number, 0, False, None)
    ),
    "recoveries.put, progress": lambda store, number: store.recoveries.put(
        Recovery("x", 1, number, False, None)
    ),
    "timers.put, next_ms": lambda store, number: store.timers.put(ScheduleRow("new", b"{}", number)),
    "timers.put, version": lambda store, number: store.timers.put(ScheduleRow("new", b"{}", 0, number)),
    "branches.add, cut": lambda store, number: store.branches.add("b", "y", parent_id="x", cut=number),
    "copy_prefix, through": lambda store, number: store.copy_prefix("x", "new", number),
}
# What is neither a text nor a number that is whole.
WITH_SOMETHING_ELSE: Final[Calls] = {
    "leases.held, one key": lambda store, other: store.leases.held(other),
    "leases.acquire, ttl_s": lambda store, other: store.leases.acquire("k", "a", other),
    "leases.renew, ttl_s": lambda store, other: store.leases.renew([], other),
    "recoveries.put, orderly": lambda store, other: store.recoveries.put(Recovery("x", 1, 0, other, None)),
    "timers.put, body": lambda store, other: store.timers.put(ScheduleRow("new", other, None)),
    "truncate_prefix, before": lambda store, other: store.truncate_prefix("x", other),
}


async def filled(store: EventStore) -> None:
    await store.append_batch([*log("x", 5), *parked("y", 1_000)])
    await store.snapshots.save(snapshot_of(fold_events(None, log("x", 5))))
    assert await store.leases.acquire("k", "a", LONG_S) is not None
    assert await store.timers.put(ScheduleRow("s", b"{}", 1_000)) is not None


async def kept(store: EventStore) -> list[Any]:
    """Everything that a call with bad arguments must leave as it is."""
    return [
        await store.read_all(),
        await store.snapshots.list("x"),
        await store.branches.children("x"),
        await store.leases.held(["k"]),
        await store.recoveries.get("x"),
        await store.timers.list(),
    ]


async def taken(store: EventStore, calls: Calls, *values: Any) -> list[str]:
    """The calls that are not refused with one of these values as they should be, and how they ended."""
    wrong = []
    for value in values:
        for name, call in calls.items():
            try:
                answer = await call(store, value)
            except BadInputError:
                continue
            except Exception as error:
                wrong.append(f"{name}, {value!r}: {error!r}")
            else:
                wrong.append(f"{name}, {value!r}: {answer!r}")
    return wrong


class ArgumentConformance(Conformance):
    """Arguments that make no sense, and those that are larger than anything."""

    @guarantee(25)
    async def test_what_is_no_text_is_refused_for_an_id_a_key_or_a_name(self) -> None:
        async with self.open_store() as store:
            await filled(store)
            before = await kept(store)
            calls = {**WITH_A_TEXT, **WITH_A_TEXT_OR_NONE}
            assert await taken(store, calls, 5, b"x", ["x"], 1.5) == []
            assert await taken(store, WITH_A_TEXT, None) == []
            assert await kept(store) == before

    @guarantee(25)
    async def test_a_number_that_is_not_whole_is_refused(self) -> None:
        async with self.open_store() as store:
            await filled(store)
            before = await kept(store)
            calls = {**WITH_A_NUMBER, **THAT_KEEP_A_NUMBER}
            assert await taken(store, calls, 1.5, 2.0, "1", float("nan"), True) == []
            assert await taken(store, WITH_SOMETHING_ELSE, "k") == []
            assert await kept(store) == before

    @guarantee(25)
    async def test_a_number_that_64_bits_do_not_hold_is_not_kept(self) -> None:
        async with self.open_store() as store:
            await filled(store)
            before = await kept(store)
            assert await taken(store, THAT_KEEP_A_NUMBER, 2**63, FAR, -(2**63) - 1, -FAR) == []
            assert await kept(store) == before
            last = await store.timers.put(ScheduleRow("last", b"{}", 2**63 - 1))
            first = await store.timers.put(ScheduleRow("first", b"{}", -(2**63)))
            assert last is not None
            assert first is not None
            assert [s.schedule_id for s in await store.timers.due_schedules(FAR)] == ["first", "s", "last"]
            assert await store.timers.due_schedules(-FAR) == [first]

    @guarantee(25)
    async def test_a_number_that_is_only_compared_may_be_beyond_all_that_are_kept(self) -> None:
        async with self.open_store() as store:
            await filled(store)
            everything = await store.read("x")
            assert await store.read_range("x", -FAR, FAR) == everything
            assert await store.read_range("x", FAR, None) == []
            assert await store.read_range("x", 0, -FAR) == []
            assert await store.list_executions(limit=FAR) == await store.list_executions()
            assert await store.list_executions(after=FAR) == []
            assert await store.read_all(limit=FAR) == await store.read_all()
            assert await store.read_all(FAR, limit=FAR) == []
            snapshot = await store.snapshots.latest("x")
            assert snapshot is not None
            assert await store.snapshots.latest("x", FAR) == snapshot
            assert await store.snapshots.latest("x", -FAR) is None
            assert await store.truncate_prefix("x", FAR) == 3
            assert await store.snapshots.delete("x", -FAR) == 0
            assert await store.leases.renew([Lease("k", "a", FAR, 0), Lease("k", "a", -FAR, 0)], LONG_S) == []
            await store.leases.release([Lease("k", "a", FAR, 0)])
            assert await store.leases.get("k") is not None
            with pytest.raises(LeaseLostError):
                await store.acquire_fence("x", lease=Lease("k", "a", FAR, 0))
            await store.recoveries.put(Recovery("x", 2**63 - 1, 0, False, "why"))
            assert len(await store.recoveries.list(limit=FAR)) == 1
            assert await store.timers.due_wakes(FAR, limit=FAR) == [Wake("y", 1_000)]
            assert await store.timers.due_wakes(-FAR) == []
            assert await store.timers.due_wakes(FAR, after=Wake("y", FAR)) == []
            assert await store.timers.due_wakes(FAR, after=Wake("y", -FAR)) == [Wake("y", 1_000)]
            [schedule] = await store.timers.list(limit=FAR)
            assert await store.timers.due_schedules(FAR, limit=FAR) == [schedule]
            assert await store.timers.due_schedules(-FAR) == []
            assert await store.timers.due_schedules(FAR, after=schedule._replace(next_ms=FAR)) == []
            assert await store.timers.due_schedules(FAR, after=schedule._replace(next_ms=-FAR)) == [schedule]

    @guarantee(25)
    async def test_a_write_of_nothing_is_refused_and_a_batch_of_nothing_is_none(self) -> None:
        async with self.open_store() as store:
            with pytest.raises(BadInputError):
                store.write([])
            await store.append_batch([])
            await store.append(event("x", 0))
            assert len(await store.read_all()) == 1
