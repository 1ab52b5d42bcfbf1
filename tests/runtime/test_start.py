"""Starting: ADR 0103, each branch of D2, and what the two ways to start have in common (D3)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest

import loomfast as lf
from loomfast._runtime.ids import new_ulid
from tests.conftest import OpenStore
from tests.runtime.harness import ScriptedStore, StillClock, kinds, runtime

effects: list[str] = []


@lf.step
async def paid(_: None) -> str:
    effects.append("paid")
    return "receipt"


@lf.flow(id="paid-flow", version="7")
async def paid_flow(ctx: lf.WorkflowContext, input: Any) -> Any:
    ctx.emit("note", input)
    return await ctx.run(paid)


@pytest.fixture(autouse=True)
def no_effects() -> None:
    effects.clear()


def duplicate(envelopes: Sequence[lf.Envelope]) -> None:
    raise lf.DuplicateSequenceError(envelopes[0].execution_id, envelopes[0].sequence)


def stale(envelopes: Sequence[lf.Envelope]) -> None:
    raise lf.StaleFenceError(envelopes[0].execution_id, envelopes[0].fence, 9)


async def test_a_chosen_id_is_durable_before_the_body_runs() -> None:
    order: list[str] = []
    store = ScriptedStore({0: lambda envelopes: order.append("append")})

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        order.append("body")

    async with runtime(store, on_event=lambda event: order.append(f"event {event.sequence}")) as rt:
        await (await rt.start(flow, execution_id="chosen")).result()
    assert order == ["append", "event 0", "body", "event 1"]


async def test_a_second_start_of_an_id_runs_nothing_and_tells_nobody(open_store: OpenStore) -> None:
    events: list[str] = []
    async with open_store() as store, runtime(store) as first:
        async with runtime(store, on_event=lambda event: events.append(event.id)) as second:
            await (await first.start(paid_flow, 1, execution_id="order-1")).result()
            before = await store.read("order-1")
            with pytest.raises(lf.ExecutionAlreadyExistsError) as caught:
                await second.start(paid_flow, 2, execution_id="order-1")
            assert caught.value.execution_id == "order-1"
            assert await store.read("order-1") == before
    assert effects == ["paid"]
    assert events == []


async def test_of_a_hundred_concurrent_starts_of_one_id_one_runs(open_store: OpenStore) -> None:
    """F13."""
    async with open_store() as store, runtime(store) as one, runtime(store) as two:
        starts = [rt.start(paid_flow, n, execution_id="order-1") for n in range(50) for rt in (one, two)]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        handles = [outcome for outcome in outcomes if isinstance(outcome, lf.ExecutionHandle)]
        refused = [outcome for outcome in outcomes if isinstance(outcome, lf.ExecutionAlreadyExistsError)]
        assert (len(handles), len(refused)) == (1, 99)
        assert await handles[0].result() == "receipt"
    assert effects == ["paid"]


@pytest.mark.parametrize(
    "conflict",
    [
        lf.DuplicateSequenceError("tenant:x", 0),
        lf.DuplicateEnvelopeIdError("tenant:x", "tenant:x-0"),
        lf.StaleFenceError("tenant:x", None, 3),
        type("DuplicateSequenceError", (Exception,), {})("from a second copy of loomfast"),
        type("StaleFenceError", (Exception,), {})("from a second copy of loomfast"),
    ],
    ids=["sequence", "envelope id", "fence", "sequence by name", "fence by name"],
)
async def test_a_conflict_that_sequence_0_does_not_confirm_is_retried_once_and_alone(
    conflict: Exception,
) -> None:
    store = ScriptedStore({0: conflict})
    async with runtime(store) as rt:
        handle = await rt.start(paid_flow, 1, execution_id="x")
        assert await handle.result() == "receipt"
    assert store.appends[:2] == [("append", ["x-0"]), ("append_batch", ["x-0"])]


async def test_a_conflict_that_sequence_0_confirms_is_already_exists_whatever_the_error_says() -> None:
    store = ScriptedStore()
    async with runtime(store) as rt:
        await (await rt.start(paid_flow, 1, execution_id="x")).result()
        store.script = {len(store.appends): lf.StaleFenceError("x", None, 3)}
        with pytest.raises(lf.ExecutionAlreadyExistsError):
            await rt.start(paid_flow, 1, execution_id="x")
    assert effects == ["paid"]


async def test_a_second_conflict_with_sequence_0_absent_is_a_storage_error_and_nothing_ran() -> None:
    store, reported, events = ScriptedStore({0: duplicate, 1: duplicate}), [], []
    async with runtime(store, on_storage_error=reported.append, on_event=events.append) as rt:
        with pytest.raises(lf.StorageWriteError) as caught:
            await rt.start(paid_flow, 1, execution_id="x")
    assert type(caught.value) is lf.StorageWriteError
    assert (caught.value.execution_id, caught.value.sequence) == ("x", 0)
    assert isinstance(caught.value.__cause__, lf.DuplicateSequenceError)
    assert reported == [caught.value]
    assert (effects, events, len(store.appends)) == ([], [], 2)


async def test_a_retry_that_meets_the_winner_is_already_exists() -> None:
    store = ScriptedStore()

    async def winner_writes_meanwhile(envelopes: Sequence[lf.Envelope]) -> None:
        store.script = {}
        await lf.MemoryEventStore.append_batch(
            store, [lf.Envelope.make("x", 0, "EXECUTION_STARTED", envelopes[0].payload, 0)]
        )
        duplicate(envelopes)

    store.script = {0: duplicate, 1: winner_writes_meanwhile}
    async with runtime(store) as rt:
        with pytest.raises(lf.ExecutionAlreadyExistsError):
            await rt.start(paid_flow, 1, execution_id="x")
    assert effects == []


async def test_a_stale_fence_on_both_tries_may_be_started_again() -> None:
    store = ScriptedStore({0: stale, 1: stale})
    async with runtime(store) as rt:
        with pytest.raises(lf.StartFencedOutError) as caught:
            await rt.start(paid_flow, 1, execution_id="x", fence=4)
        assert isinstance(caught.value.__cause__, lf.StaleFenceError)
        assert await (await rt.start(paid_flow, 1, execution_id="x", fence=10)).result() == "receipt"


async def test_a_stale_fence_and_then_a_conflict_is_a_storage_error() -> None:
    store = ScriptedStore({0: stale, 1: duplicate})
    async with runtime(store) as rt:
        with pytest.raises(lf.StorageWriteError) as caught:
            await rt.start(paid_flow, 1, execution_id="x")
    assert type(caught.value) is lf.StorageWriteError


async def test_a_read_back_that_fails_is_a_storage_error() -> None:
    class Unreadable(ScriptedStore):
        async def read_range(self, execution_id: str, first: int, last: int | None) -> list[lf.Envelope]:
            raise OSError("cable cut")

    store = Unreadable({0: duplicate})
    async with runtime(store) as rt:
        with pytest.raises(lf.StorageWriteError, match="cable cut"):
            await rt.start(paid_flow, 1, execution_id="x")
    assert (effects, len(store.appends)) == ([], 1)


async def test_a_dead_store_refuses_the_start_and_is_reported() -> None:
    reported: list[lf.StorageWriteError] = []
    store = ScriptedStore({0: OSError("disk gone")})
    async with runtime(store, on_storage_error=reported.append) as rt:
        with pytest.raises(lf.StorageWriteError, match="disk gone") as caught:
            await rt.start(paid_flow, 1, execution_id="x")
    assert reported == [caught.value]
    assert (effects, len(store.appends)) == ([], 1)


async def test_a_minted_id_waits_for_nothing_and_its_interleaving_is_pinned() -> None:
    order: list[str] = []

    def appended(envelopes: Sequence[lf.Envelope]) -> None:
        order.append("append " + " ".join(str(envelope.sequence) for envelope in envelopes))

    store = ScriptedStore(dict.fromkeys(range(9), appended))
    async with runtime(store, on_event=lambda event: order.append(f"event {event.sequence}")) as rt:
        handle = await rt.start(paid_flow, 1)
        assert order == ["event 0"]
        await handle.result()
    assert order == [
        *("event 0", "event 1", "event 2", "event 3", "event 4"),
        "append 0 1 2 3 4",
    ]


async def test_a_chosen_id_writes_the_same_log_as_a_minted_one(open_store: OpenStore) -> None:
    logs, tails = [], []
    for chosen in (None, "exec-1"):
        async with open_store() as store:
            if chosen is not None and await store.read("exec-1"):
                chosen = "exec-2"
            tail: list[dict[str, Any]] = []
            rt = runtime(
                store, on_event=lambda event, tail=tail: tail.append(event.to_json()), clock=StillClock()
            )
            async with rt:
                handle = await rt.start(paid_flow, 1, execution_id=chosen, compute_target="gpu", fence=0)
                await handle.result()
                logs.append([event.to_json() for event in await store.read(handle.execution_id)])
            tails.append(tail)
    plain = [
        [
            {name: part for name, part in event.items() if name not in ("id", "executionId", "timestamp")}
            for event in log
        ]
        for log in (*logs, *tails)
    ]
    assert plain[0] == plain[1] == plain[2] == plain[3]
    assert plain[0][0]["metadata"] == {"computeTarget": "gpu", "fence": 0}


async def test_an_input_that_cannot_be_started_with_writes_nothing(open_store: OpenStore) -> None:
    def positive(value: Any) -> None:
        if value < 0:
            raise ValueError("must not be negative")

    @lf.flow(input=positive)
    async def picky(ctx: lf.WorkflowContext, input: Any) -> None: ...

    async with open_store() as store, runtime(store) as rt:
        with pytest.raises(lf.InputValidationError, match="must not be negative"):
            await rt.start(picky, -1, execution_id="x")
        with pytest.raises(lf.JsonFormError):
            await rt.start(paid_flow, object(), execution_id="x")
        assert await store.read("x") == []


async def test_one_id_cannot_stand_for_two_flows() -> None:
    @lf.flow(id="paid-flow")
    async def other(ctx: lf.WorkflowContext, input: Any) -> None: ...

    async with runtime(lf.MemoryEventStore(), paid_flow) as rt:
        with pytest.raises(lf.BadInputError, match="two different functions"):
            await rt.start(other)


async def test_a_bootstrap_alone_is_driven_from_the_top_by_recovery(open_store: OpenStore) -> None:
    """The record's last residual: a crash between the bootstrap write and the body."""
    async with open_store() as store:
        started = {"flowId": "paid-flow", "flowVersion": "7", "input": 1}
        await store.append(lf.Envelope.make("x", 0, "EXECUTION_STARTED", started, 0))
        async with runtime(store, paid_flow) as rt:
            handle = await rt.recover("x")
            assert await handle.result() == "receipt"
            assert kinds(await store.read("x"))[0] == "EXECUTION_STARTED"


@pytest.mark.parametrize("fence", [None, 0], ids=["no token", "an old token"])
async def test_a_duplicate_of_an_execution_that_was_fenced_since_is_already_exists(
    open_store: OpenStore, fence: int | None
) -> None:
    """D2 as amended: a fencing store checks the token before the slot; the winner is not superseded."""
    async with open_store() as store, runtime(store) as rt:
        await (await rt.start(paid_flow, 1, execution_id="x")).result()
        current = await store.acquire_fence("x")
        with pytest.raises(lf.ExecutionAlreadyExistsError) as caught:
            await rt.start(paid_flow, 1, execution_id="x", fence=fence)
        assert isinstance(caught.value.__cause__, lf.StaleFenceError)
        assert await store.acquire_fence("x") == current + 1
    assert effects == ["paid"]


@pytest.mark.parametrize("late", ["before", "after"])
async def test_a_start_never_fences_so_the_loser_of_a_race_supersedes_nobody(
    open_store: OpenStore, late: str
) -> None:
    """The record's first residual, both orders: one effect over the race and a recovery pass."""
    going = asyncio.Event()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        value = await ctx.run(paid)
        await going.wait()
        return [value, await ctx.run(lambda: "two", key="second")]

    async with open_store() as store, runtime(store, flow) as one, runtime(store, flow) as two:
        winner = asyncio.ensure_future(one.start(flow, execution_id="x"))
        if late == "after":
            await winner
        else:
            await asyncio.sleep(0)
        with pytest.raises(lf.ExecutionAlreadyExistsError):
            await two.start(flow, execution_id="x")
        going.set()
        assert await (await winner).result() == ["receipt", "two"]
        assert [event.fence for event in await store.read("x")] == [None] * 6
        assert await two.recover_abandoned() == []
    assert effects == ["paid"]


async def test_a_retry_that_fails_for_another_reason_is_a_storage_error() -> None:
    store = ScriptedStore({0: duplicate, 1: OSError("disk gone")})
    async with runtime(store) as rt:
        with pytest.raises(lf.StorageWriteError, match="disk gone"):
            await rt.start(paid_flow, 1, execution_id="x")
    assert (effects, len(store.appends)) == ([], 2)


async def test_a_read_back_that_fails_after_the_retry_is_a_storage_error() -> None:
    class Failing(ScriptedStore):
        reads = 0

        async def read_range(self, execution_id: str, first: int, last: int | None) -> list[lf.Envelope]:
            self.reads += 1
            if self.reads == 2:
                raise OSError("cable cut")
            return await super().read_range(execution_id, first, last)

    store = Failing({0: duplicate, 1: duplicate})
    async with runtime(store) as rt:
        with pytest.raises(lf.StorageWriteError, match="cable cut"):
            await rt.start(paid_flow, 1, execution_id="x")
    assert (effects, len(store.appends), store.reads) == ([], 2, 2)


async def test_a_replica_that_lags_makes_a_duplicate_a_storage_error_and_nothing_runs() -> None:
    """The record's residual: loud and safe, just less specific."""

    class Lagging(lf.MemoryEventStore):
        behind = False

        async def read_range(self, execution_id: str, first: int, last: int | None) -> list[lf.Envelope]:
            return [] if self.behind else await super().read_range(execution_id, first, last)

    store = Lagging()
    async with runtime(store) as rt:
        await (await rt.start(paid_flow, 1, execution_id="x")).result()
        store.behind = True
        with pytest.raises(lf.StorageWriteError) as caught:
            await rt.start(paid_flow, 1, execution_id="x")
        assert isinstance(caught.value.__cause__, lf.DuplicateSequenceError)
    assert effects == ["paid"]


async def test_a_journal_adopts_no_event_but_the_next_one() -> None:
    """D1."""
    store = lf.MemoryEventStore()
    async with runtime(store) as rt:
        started = {"flowId": "f", "flowVersion": "1", "input": None}
        journal = rt._driven.journal("x")
        with pytest.raises(lf.MalformedEventError, match="must be 0 to be adopted"):
            journal.adopt(lf.Envelope.make("x", 1, "note", None, 0))
        first = lf.Envelope.make("x", 0, "EXECUTION_STARTED", started, 0)
        journal.adopt(first)
        with pytest.raises(lf.MalformedEventError, match="must be 1 to be adopted"):
            journal.adopt(first)


async def test_on_event_hears_later_events_before_they_are_durable_and_of_some_that_never_are() -> None:
    """D6."""
    store, heard = ScriptedStore(), list[str]()
    async with runtime(store, on_event=lambda event: heard.append(event.event_type)) as rt:

        @lf.flow
        async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
            store.script = dict.fromkeys(range(1, 9), OSError("disk gone"))
            ctx.emit("never durable")
            await ctx.run(paid)

        handle = await rt.start(flow, execution_id="x")
        with pytest.raises(lf.StorageWriteError):
            await handle.rest()
        assert "never durable" in heard
        assert kinds(await store.read("x")) == ["EXECUTION_STARTED"]


def test_minted_ids_differ_in_a_forked_child_too() -> None:
    parent = [new_ulid() for _ in range(50)]
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with os.fdopen(write, "w") as out:
            out.write(" ".join(new_ulid() for _ in range(150)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        child = said.read().split()
    os.waitpid(pid, 0)
    later = [new_ulid() for _ in range(150)]
    everyone = [*parent, *child, *later]
    assert len({ulid[10:] for ulid in everyone}) == len(everyone) == 350
    assert all(len(ulid) == 26 for ulid in everyone)
