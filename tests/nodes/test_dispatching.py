"""What becomes of one dispatch: what is tried again, what never is, and by whom (ADR 0103, L20)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

import loomfast as lf
from loomfast._nodes.attempts import superseded
from loomfast.testing import VirtualClock, run_virtual
from tests.conftest import OpenStore
from tests.nodes.racing import virtual_node
from tests.runtime.harness import ScriptedStore, StillClock, runtime, turns
from tests.runtime.test_recover_abandoned import leave_behind, works


class PauseClock(StillClock):
    """Keeps what it was asked to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)


class Scripted:
    """A worker that fails as it is told, once for each entry, and then hands on to a local one."""

    def __init__(self, rt: lf.WorkflowRuntime, *errors: Exception) -> None:
        self.local = lf.LocalWorkerRuntime(rt)
        self.errors = list(errors)
        self.asked = 0

    async def allocate(self, dispatch: lf.Dispatch) -> lf.Allocation:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return await self.local.allocate(dispatch)


class FencedBehind(lf.EventStoreDecorator):
    """Each of the first tokens is superseded at once, by one whose holder then dies and writes nothing."""

    def __init__(self, inner: lf.EventStore, times: int) -> None:
        super().__init__(inner)
        self.times = times

    async def acquire_fence(self, execution_id: str, *, lease: lf.Lease | None = None) -> int:
        token = await self.inner.acquire_fence(execution_id, lease=lease)
        if self.times:
            self.times -= 1
            await self.inner.acquire_fence(execution_id)
        return token


def local(rt: lf.WorkflowRuntime, **options: Any) -> lf.LocalDispatcher:
    return lf.LocalDispatcher(lf.LocalWorkerRuntime(rt), **options)


async def end(rt: lf.WorkflowRuntime, execution_id: str, **options: Any) -> lf.Dispatched:
    return await local(rt, **options).dispatch(lf.Dispatch(execution_id, works))


# --- what is tried again -------------------------------------------------------------------------


async def test_a_start_that_was_fenced_out_by_one_who_wrote_nothing_is_tried_again(
    open_store: OpenStore,
) -> None:
    """L20: the newer token's holder may be dead, and then nobody else would start it."""
    async with open_store() as store, runtime(FencedBehind(store, 2)) as rt:
        dispatched = await end(rt, "x", max_attempts=3)
        assert (dispatched.outcome, dispatched.attempts) == ("rested", 3)
        assert (await store.read("x"))[0].fence == 5


async def test_where_no_attempt_is_left_it_says_why(caplog: pytest.LogCaptureFixture) -> None:
    store = lf.MemoryEventStore()
    async with runtime(FencedBehind(store, 9)) as rt:
        dispatched = await end(rt, "x", max_attempts=2)
        assert (dispatched.outcome, dispatched.attempts) == ("failed", 2)
        assert isinstance(dispatched.error, lf.StartFencedOutError)
        assert await store.read("x") == []
    assert "the dispatch of execution 'x' failed after 2 attempts: StartFencedOutError" in caplog.text


async def test_failures_of_the_store_are_tried_again_with_pauses_that_grow_by_the_runtimes_clock() -> None:
    async def pauses(execution_id: str) -> list[float]:
        clock = PauseClock()
        async with runtime(lf.MemoryEventStore(), clock=clock) as rt:
            worker = Scripted(rt, *(OSError("no route") for _ in range(5)))
            dispatcher = lf.SupervisingDispatcher([worker], max_attempts=6, max_s=1, clock=rt.clock)
            dispatched = await dispatcher.dispatch(lf.Dispatch(execution_id, works))
            assert (dispatched.outcome, dispatched.attempts) == ("rested", 6)
        return clock.pauses

    first = await pauses("x")
    assert first == await pauses("x")  # the same each time
    assert first != await pauses("y")
    for pause, longest in zip(first, (0.2, 0.4, 0.8, 1, 1), strict=True):
        assert longest / 2 <= pause <= longest


async def test_two_dispatchers_of_one_execution_never_pause_in_step() -> None:
    """Their tokens differ, and so do their pauses, though each would pause the same again."""
    found = []
    for others in range(3):
        store, clock = lf.MemoryEventStore(), PauseClock()
        for _ in range(others):
            await store.acquire_fence("x")
        async with runtime(FencedBehind(store, 1), clock=clock) as rt:
            await end(rt, "x", max_attempts=2)
        found += clock.pauses
    assert len(set(found)) == 3


async def test_a_run_whose_write_failed_is_taken_over_again_by_the_same_dispatch() -> None:
    runs: list[int] = []

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        await ctx.run(lambda: runs.append(1), key="s")

    store = ScriptedStore({1: OSError("disk on fire")})
    async with runtime(store) as rt:
        dispatched = await local(rt, max_attempts=2).dispatch(lf.Dispatch("x", flow))
        assert (dispatched.outcome, dispatched.attempts) == ("rested", 2)
        assert (await store.read("x"))[-1].fence == 2


async def test_a_refusal_of_a_neighbour_in_a_shared_batch_is_tried_again() -> None:
    """A coalescing store may tell everybody in a batch that somebody's fence was stale."""
    store = ScriptedStore({1: lf.StaleFenceError("another", 1, 2)})
    async with runtime(store) as rt:
        dispatched = await end(rt, "x", max_attempts=2)
        assert (dispatched.outcome, dispatched.attempts) == ("rested", 2)


# --- what never is -------------------------------------------------------------------------------


def caused(outer: Exception, cause: BaseException) -> Exception:
    outer.__cause__ = cause
    return outer


# As a second copy of loomfast would raise them.
OtherStale = type("StaleFenceError", (Exception,), {})
OtherWrite = type("StorageWriteError", (Exception,), {})
OtherFencedOut = type("StartFencedOutError", (Exception,), {})

STALE = lf.StaleFenceError("x", 1, 2)
WRITE = lf.StorageWriteError("x", 4, "refused")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (lf.ExecutionAlreadyExistsError("x"), True),
        (STALE, True),
        (lf.LeaseHeldError("x"), True),
        (lf.LeaseLostError("x"), True),
        (caused(WRITE, STALE), True),
        (caused(lf.StorageWriteError("x", 4, ""), lf.LeaseLostError("x")), True),
        (caused(RuntimeError("remote"), caused(lf.StorageWriteError("x", 4, ""), STALE)), True),
        (OtherStale("a second copy"), True),
        (caused(lf.StorageWriteError("x", 4, ""), OtherStale("a second copy")), True),
        (caused(OtherWrite("a second copy"), STALE), True),
        (lf.StaleFenceError("3:a:b:x", 1, 2), True),
        (lf.StaleFenceError("1:c:3:a:b:x", 1, 2), True),
        (lf.StaleFenceError("ax", 1, 2), False),
        (lf.StaleFenceError("1:a:ax", 1, 2), False),
        (lf.StaleFenceError("9:a:x", 1, 2), False),
        (lf.StaleFenceError("9" * 5000 + ":x", 1, 2), False),
        (caused(lf.StartFencedOutError("x", 0, ""), STALE), False),
        (caused(OtherFencedOut("a second copy"), OtherStale("a second copy")), False),
        (lf.StorageWriteError("x", 4, "disk full"), False),
        (caused(lf.StorageWriteError("x", 4, ""), lf.DuplicateSequenceError("x", 4)), False),
        (lf.StoreLostError("/there"), False),
        (OSError("no route"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
async def test_a_refusal_that_names_this_execution_supersedes_the_dispatch(
    error: Exception, expected: bool
) -> None:
    """L20."""
    assert superseded(error, "x") is expected
    async with runtime(lf.MemoryEventStore()) as rt:
        worker = Scripted(rt, error)
        dispatched = await lf.LocalDispatcher(worker, max_attempts=2).dispatch(lf.Dispatch("x", works))
        assert dispatched.outcome == ("superseded" if expected else "rested")
        assert worker.asked == dispatched.attempts == (1 if expected else 2)


def test_a_chain_of_causes_that_bites_its_tail_ends() -> None:
    error = OSError("no route")
    error.__cause__ = error
    assert not superseded(error, "x")


async def test_how_a_flow_ends_is_no_failure_of_an_attempt(open_store: OpenStore) -> None:
    @lf.flow
    async def flow(ctx: lf.WorkflowContext, way: str) -> str:
        if way == "failed":
            raise ValueError(way)
        if way == "suspended":
            await ctx.suspend("go")
        if way == "cancelled":
            await asyncio.Event().wait()
        return way

    async with open_store() as store, runtime(store) as rt:
        for way in ("completed", "failed", "suspended", "cancelled"):
            dispatch = asyncio.create_task(local(rt, max_attempts=3).dispatch(lf.Dispatch(way, flow, way)))
            if way == "cancelled":
                while await rt.load_state(way) is None:
                    await asyncio.sleep(0)
                await rt.cancel(way)
            dispatched = await dispatch
            assert (dispatched.outcome, dispatched.attempts, dispatched.error) == ("rested", 1, None)
            assert dispatched.state is not None
            assert dispatched.state.status == way


async def test_what_rests_is_attached_to_and_not_fenced(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store) as one, runtime(store) as two:
        for rt in (one, one, two):
            dispatched = await end(rt, "x")
            assert (dispatched.outcome, dispatched.attempts) == ("rested", 1)
        assert await store.acquire_fence("x") == 2


async def test_what_the_worker_drives_itself_is_attached_to_and_not_fenced_out(open_store: OpenStore) -> None:
    release, runs = asyncio.Event(), list[int]()

    @lf.step
    async def effect() -> None:
        runs.append(1)
        await release.wait()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        await ctx.run(effect)

    async with open_store() as store, runtime(store) as rt:
        first = asyncio.create_task(local(rt).dispatch(lf.Dispatch("x", flow)))
        while not runs:
            await asyncio.sleep(0)
        others = [asyncio.create_task(local(rt).dispatch(lf.Dispatch("x", flow))) for _ in range(5)]
        await turns(50)
        release.set()
        assert {one.outcome for one in await asyncio.gather(first, *others)} == {"rested"}
        assert runs == [1]
        assert {event.fence for event in await store.read("x")} == {1}


async def test_what_its_process_left_behind_is_taken_over(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store) as rt:
        await leave_behind(store, "x")
        dispatched = await end(rt, "x")
        assert dispatched.outcome == "rested"
        assert (await store.read("x"))[-1].fence == 1


async def test_what_has_crashed_too_often_is_reported_as_set_aside(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store, max_crashes=1) as rt:
        await leave_behind(store, "x")
        for _ in range(2):
            dispatched = await end(rt, "x", max_attempts=3)
            assert (dispatched.outcome, dispatched.attempts) == ("set-aside", 1)
            assert isinstance(dispatched.error, lf.ExecutionSetAsideError)


async def test_bad_input_and_a_flow_that_leaves_its_log_are_reported_at_once() -> None:
    @lf.flow(id="works")
    async def other(ctx: lf.WorkflowContext, input: Any) -> None: ...

    store = lf.MemoryEventStore()
    await leave_behind(store, "known", "left")
    await leave_behind(store, "unknown", flow_id="nobody-knows")
    started = {"key": "s", "stepId": "s", "attempt": 1, "inputDigest": "0" * 16}
    await store.append(lf.Envelope.make("left", 1, "STEP_STARTED", started, 0))
    await store.append(lf.Envelope.make("left", 2, "STEP_COMPLETED", {"key": "s", "output": 1}, 0))
    async with runtime(store, works) as rt:
        for dispatch, error in (
            (lf.Dispatch("new", works, object()), lf.UnsupportedTypeError),
            (lf.Dispatch("known", other), lf.BadInputError),
            (lf.Dispatch("unknown", works), lf.UnknownFlowError),
            (lf.Dispatch("left", works), lf.DeterminismError),
            (lf.Dispatch("", works), lf.BadInputError),
        ):
            dispatched = await local(rt, max_attempts=3).dispatch(dispatch)
            assert (dispatched.outcome, dispatched.attempts) == ("failed", 1)
            assert type(dispatched.error) is error
        for unfenced in ("known", "unknown"):
            assert await store.acquire_fence(unfenced) == 1


async def test_whoever_has_fenced_drives_even_if_its_caller_is_gone() -> None:
    class Slow(lf.EventStoreDecorator):
        async def acquire_fence(self, execution_id: str, *, lease: lf.Lease | None = None) -> int:
            token = await self.inner.acquire_fence(execution_id, lease=lease)
            fenced.set()
            await turns(5)
            return token

    store, fenced = lf.MemoryEventStore(), asyncio.Event()
    await leave_behind(store, "x")
    async with runtime(Slow(store)) as rt:
        dispatch = asyncio.create_task(end(rt, "x", max_attempts=3))
        await fenced.wait()
        dispatch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dispatch
        assert await rt.handle("x").result() == "done"


# --- leases --------------------------------------------------------------------------------------


def leased() -> lf.MemoryEventStore:
    return lf.MemoryEventStore(now_ms=lambda: VirtualClock().now_ms())


def virtually(main: Callable[[], Awaitable[None]]) -> None:
    run_virtual(main())  # type: ignore[arg-type]  # it is a coroutine function


def test_what_another_process_holds_is_left_alone_and_not_fenced_out() -> None:
    @virtually
    async def main() -> None:
        runs: list[int] = []

        @lf.step
        async def effect() -> None:
            runs.append(1)
            await asyncio.sleep(30)

        @lf.flow
        async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
            await ctx.run(effect)
            return "done"

        store = leased()
        async with virtual_node(store, 1, lease_ttl_s=1) as one, virtual_node(store, 2, lease_ttl_s=1) as two:
            handle = await one.start(flow, execution_id="x")
            await asyncio.sleep(5)
            dispatched = await local(two, max_attempts=3).dispatch(lf.Dispatch("x", flow))
            assert (dispatched.outcome, dispatched.attempts) == ("superseded", 1)
            assert isinstance(dispatched.error, lf.LeaseHeldError)
            assert await handle.result() == "done"
            assert runs == [1]
            assert {event.fence for event in await store.read("x")} == {None}


def test_a_lease_whose_holder_died_before_it_wrote_anything_is_waited_for() -> None:
    @virtually
    async def main() -> None:
        store = leased()
        assert await store.leases.acquire("x", "somebody who dies", 1)
        async with virtual_node(store, 2, lease_ttl_s=1) as rt:
            dispatched = await end(rt, "x")
            assert (dispatched.outcome, dispatched.attempts) == ("rested", 1)


def test_a_lease_is_given_back_between_the_fence_and_the_start() -> None:
    """So that one who allocates and then does nothing holds up nobody."""

    @virtually
    async def main() -> None:
        store = leased()
        async with virtual_node(store, 1, lease_ttl_s=1) as one, virtual_node(store, 2, lease_ttl_s=1) as two:
            idle = await lf.LocalWorkerRuntime(one).allocate(lf.Dispatch("x", works))
            assert idle.fence == 1
            assert (await end(two, "x")).outcome == "rested"
            assert await (await idle.execute()).result() == "done"


# --- several workers -----------------------------------------------------------------------------


class Counting(lf.LocalWorkerRuntime):
    """Keeps how many executions it was given."""

    def __init__(self, rt: lf.WorkflowRuntime) -> None:
        super().__init__(rt)
        self.given: list[str] = []

    async def allocate(self, dispatch: lf.Dispatch) -> lf.Allocation:
        self.given.append(dispatch.execution_id)
        return await super().allocate(dispatch)


def gate() -> tuple[lf.FlowDefinition, asyncio.Event, list[str]]:
    """A flow that waits for an event, the event, and who has begun."""
    release, began = asyncio.Event(), list[str]()

    @lf.step
    async def effect(name: str) -> None:
        began.append(name)
        await release.wait()

    @lf.flow(id="gate")
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        await ctx.run(effect, ctx.execution_id)
        return "done"

    return flow, release, began


async def test_each_attempt_goes_to_the_worker_with_the_fewest_and_at_most_so_many_are_watched() -> None:
    flow, release, began = gate()
    store = lf.MemoryEventStore()
    async with runtime(store) as one, runtime(store) as two, runtime(store) as three:
        workers = [Counting(rt) for rt in (one, two, three)]
        dispatcher = lf.SupervisingDispatcher(workers, concurrency=7)
        dispatches = [asyncio.create_task(dispatcher.dispatch(lf.Dispatch(f"x{n}", flow))) for n in range(10)]
        await turns(50)
        assert [len(worker.given) for worker in workers] == [3, 2, 2]
        assert len(began) == 7
        release.set()
        assert {one.outcome for one in await asyncio.gather(*dispatches)} == {"rested"}
        assert len(began) == 10


async def test_after_a_failed_attempt_another_worker_is_asked() -> None:
    async with runtime(lf.MemoryEventStore()) as rt:
        bad, good = Scripted(rt, *(OSError("no route") for _ in range(9))), Counting(rt)
        dispatcher = lf.SupervisingDispatcher([bad, good], max_attempts=2)
        for n in range(3):
            dispatched = await dispatcher.dispatch(lf.Dispatch(f"x{n}", works))
            assert (dispatched.outcome, dispatched.attempts) == ("rested", 2)
        assert good.given == ["x0", "x1", "x2"]


async def test_what_a_closing_worker_leaves_another_takes_over_and_that_is_no_failure(
    open_store: OpenStore,
) -> None:
    flow, release, began = gate()
    async with open_store() as store, runtime(store) as one, runtime(store) as two:
        workers = [Counting(one), Counting(two)]
        dispatcher = lf.SupervisingDispatcher(workers, max_attempts=1)
        dispatch = asyncio.create_task(dispatcher.dispatch(lf.Dispatch("x", flow)))
        while not began:
            await asyncio.sleep(0)
        await one.close()
        while len(began) < 2:
            await asyncio.sleep(0)
        release.set()
        dispatched = await dispatch
        assert (dispatched.outcome, dispatched.attempts) == ("rested", 2)
        assert (await dispatcher.dispatch(lf.Dispatch("y", flow))).outcome == "rested"
        assert [worker.given for worker in workers] == [["x"], ["x", "y"]]


async def test_a_dispatcher_that_is_left_watches_no_longer() -> None:
    flow, release, _ = gate()
    async with runtime(lf.MemoryEventStore()) as rt:
        async with lf.SupervisingDispatcher([lf.LocalWorkerRuntime(rt)]) as dispatcher:
            dispatch = asyncio.create_task(dispatcher.dispatch(lf.Dispatch("x", flow)))
            while not rt.drives("x"):
                await asyncio.sleep(0)
        assert isinstance((await dispatch).error, lf.RuntimeClosedError)
        with pytest.raises(lf.RuntimeClosedError):
            await dispatcher.dispatch(lf.Dispatch("y", flow))
        release.set()
        await rt.handle("x").result()


def test_with_leases_too_a_closing_worker_is_followed_by_another() -> None:
    @virtually
    async def main() -> None:
        flow, release, began = gate()
        store = leased()
        async with virtual_node(store, 1, lease_ttl_s=1) as one, virtual_node(store, 2, lease_ttl_s=1) as two:
            dispatcher = lf.SupervisingDispatcher([lf.LocalWorkerRuntime(rt) for rt in (one, two)])
            dispatch = asyncio.create_task(dispatcher.dispatch(lf.Dispatch("x", flow)))
            await asyncio.sleep(1)
            await one.close()
            await asyncio.sleep(1)
            release.set()
            assert (await dispatch).outcome == "rested"
            assert began == ["x", "x"]


async def test_where_every_worker_has_closed_the_dispatch_has_failed() -> None:
    async with runtime(lf.MemoryEventStore()) as rt:
        await rt.close()
        worker = lf.LocalWorkerRuntime(rt)
        for dispatcher in (
            lf.LocalDispatcher(worker, max_attempts=3),
            lf.SupervisingDispatcher([worker, worker], max_attempts=3),
        ):
            for execution_id in ("x", "y"):
                dispatched = await dispatcher.dispatch(lf.Dispatch(execution_id, works))
                assert dispatched.outcome == "failed"
                assert isinstance(dispatched.error, lf.RuntimeClosedError)


async def test_a_dispatcher_does_not_compete_with_itself_and_watches_on_when_its_caller_is_gone() -> None:
    flow, release, began = gate()
    store = lf.MemoryEventStore()
    async with runtime(store) as one, runtime(store) as two:
        workers = [Counting(one), Counting(two)]
        dispatcher = lf.SupervisingDispatcher(workers)
        dispatches = [asyncio.create_task(dispatcher.dispatch(lf.Dispatch("x", flow))) for _ in range(3)]
        await turns(20)
        dispatches[0].cancel()
        await turns(20)
        release.set()
        first, *others = await asyncio.gather(*dispatches, return_exceptions=True)
        assert isinstance(first, asyncio.CancelledError)
        assert others[0] is others[1]
        assert [worker.given for worker in workers] == [["x"], []]
        assert began == ["x"]


async def test_a_dispatcher_that_is_closed_says_so_and_leaves_what_runs() -> None:
    flow, release, began = gate()
    async with runtime(lf.MemoryEventStore()) as rt:
        dispatcher = lf.SupervisingDispatcher([lf.LocalWorkerRuntime(rt)], concurrency=1)
        dispatches = [asyncio.create_task(dispatcher.dispatch(lf.Dispatch(name, flow))) for name in "xyz"]
        await turns(20)
        await dispatcher.close()
        await dispatcher.close()
        found = await asyncio.gather(*dispatches)
        assert [(one.outcome, type(one.error)) for one in found] == [("failed", lf.RuntimeClosedError)] * 3
        with pytest.raises(lf.RuntimeClosedError):
            await dispatcher.dispatch(lf.Dispatch("w", flow))
        release.set()
        assert await rt.handle("x").result() == "done"
        assert began == ["x"]


async def test_numbers_that_mean_nothing_are_refused() -> None:
    async with runtime(lf.MemoryEventStore()) as rt:
        workers: Sequence[lf.DispatchWorker] = [lf.LocalWorkerRuntime(rt)]
        for bad in (0, -1, 1.5, True):
            for options in ({"max_attempts": bad}, {"concurrency": bad}):
                with pytest.raises(lf.BadInputError, match=next(iter(options))):
                    lf.SupervisingDispatcher(workers, **options)  # type: ignore[arg-type]
        with pytest.raises(lf.BadInputError, match="initial_s"):
            lf.LocalDispatcher(workers[0], initial_s=2, max_s=1)
        with pytest.raises(lf.BadInputError, match="worker"):
            lf.SupervisingDispatcher([])
