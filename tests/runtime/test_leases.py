"""Leases of running executions: who may drive, and what becomes of whoever may no longer (F18)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

import loomfast as lf
from loomfast.testing import VirtualClock, run_virtual, seeded_entropy
from tests.conftest import OpenStore
from tests.runtime.harness import kinds, of, runtime, steps_of

TTL_S = 1.0


class Store(lf.MemoryEventStore):
    """A store on virtual time whose renewals can be made to fail, and are counted."""

    def __init__(self) -> None:
        super().__init__(now_ms=lambda: VirtualClock().now_ms())
        self.failing: Callable[[], bool] = lambda: False
        self.renewals: list[int] = []
        renew = self.leases.renew

        async def observed(leases: Sequence[lf.Lease], ttl_s: float) -> list[lf.Lease]:
            self.renewals.append(len(leases))
            if self.failing():
                raise OSError("line cut")
            return await renew(leases, ttl_s)

        self.leases.renew = observed  # type: ignore[method-assign]


def node(store: lf.EventStore, seed: int, *flows: Any, **deps: Any) -> lf.WorkflowRuntime:
    deps = {"clock": VirtualClock(), "entropy": seeded_entropy(seed), "lease_ttl_s": TTL_S} | deps
    return runtime(store, *flows, **deps)


effects: list[str] = []


@pytest.fixture(autouse=True)
def no_effects() -> None:
    effects.clear()


@lf.step
async def works(seconds: float) -> str:
    effects.append("began")
    await asyncio.sleep(seconds)
    effects.append("ended")
    return "worked"


@lf.flow
async def working(ctx: lf.WorkflowContext, seconds: float) -> str:
    return await ctx.run(works, seconds)


@lf.flow
async def gated(ctx: lf.WorkflowContext, input: Any) -> Any:
    answer = await ctx.suspend("go")
    await ctx.run(works, input)
    return answer


def virtually(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(main())


def test_a_long_step_keeps_its_lease_however_old_it_is_and_is_never_taken_over() -> None:
    """F18: a lease of 1 s, a step of 10 s, another node that sweeps every 0.2 s."""

    @virtually
    async def main() -> None:
        store = Store()
        async with node(store, 1) as one, node(store, 2, working) as two:
            handle = await one.start(working, 10, execution_id="x")
            others = [await one.start(working, 10) for _ in range(20)]
            outcomes = set()
            for _ in range(49):
                outcomes |= {(r.outcome, r.reason) for r in await two.recover_abandoned()}
                await asyncio.sleep(0.2)
            assert outcomes == {("skipped", "another process holds its lease")}
            assert [await h.result() for h in (handle, *others)] == ["worked"] * 21
            assert effects.count("began") == 21
            # One call for all of them, every third of a lease.
            assert set(store.renewals) == {21}
            assert 28 <= len(store.renewals) <= 31
            await asyncio.sleep(0.01)
            assert await store.leases.get("x") is None


async def test_a_step_in_a_thread_keeps_its_lease(open_store: OpenStore) -> None:
    release = threading.Event()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        return await ctx.run(lambda: release.wait(20) and "worked", key="s")

    async with (
        open_store() as store,
        runtime(store, clock=lf.SystemClock(), lease_ttl_s=1.0) as one,
        runtime(store, flow, lease_ttl_s=1.0) as two,
    ):
        handle = await one.start(flow, execution_id="x")
        until = time.monotonic() + 1.6
        while time.monotonic() < until:
            assert [r.outcome for r in await two.recover_abandoned()] == ["skipped"]
            await asyncio.sleep(0.05)
        release.set()
        assert await handle.result() == "worked"


@pytest.mark.parametrize("chosen", [True, False])
def test_a_lease_is_held_before_the_first_event_and_given_back_at_rest(chosen: bool) -> None:
    @virtually
    async def main() -> None:
        holders: list[tuple[str, bool]] = []

        class Watching(Store):
            async def append_batch(self, envelopes: Sequence[lf.Envelope]) -> None:
                lease = await self.leases.get(envelopes[0].execution_id)
                holders.append((envelopes[0].event_type, lease is not None))
                await super().append_batch(envelopes)

        store = Watching()
        async with node(store, 1) as rt:
            handle = await rt.start(gated, 0, execution_id="x" if chosen else None)
            await handle.rest()
            await asyncio.sleep(0.01)
            assert await store.leases.get(handle.execution_id) is None
            handle = await rt.resume(handle.execution_id, "go", 1)
            assert await handle.result() == 1
        assert {event_type for event_type, _ in holders} >= {"EXECUTION_STARTED", "go"}
        assert all(held for _, held in holders)


def test_a_closing_node_gives_its_leases_back_so_that_another_takes_over_at_once() -> None:
    """F19."""

    @virtually
    async def main() -> None:
        store = Store()
        async with node(store, 2, working) as two:
            async with node(store, 1) as one:
                await one.start(working, 30, execution_id="x")
                await asyncio.sleep(0.1)
            assert [(r.execution_id, r.outcome) for r in await two.recover_abandoned()] == [
                ("x", "recovered")
            ]
            assert effects == ["began", "began", "ended"]


def test_what_a_dead_node_held_is_taken_over_once_its_lease_has_run_out_and_fenced() -> None:
    @virtually
    async def main() -> None:
        store = Store()
        one = node(store, 1)
        await one.start(working, 30, execution_id="x")
        await asyncio.sleep(0.1)
        one._driven.leases.give_back = lambda held: None  # type: ignore[method-assign,union-attr]  # it dies
        for task in (one._driven.executions["x"]._task, one._driven.leases._renewing):  # type: ignore[union-attr]
            task.cancel()  # type: ignore[union-attr]
        async with node(store, 2, working) as two:
            assert [r.outcome for r in await two.recover_abandoned()] in (["skipped"], ["recovered"])
            await asyncio.sleep(TTL_S)
            await two.recover_abandoned()
            assert await two.handle("x").result() == "worked"
            assert (await store.read("x"))[-1].fence is not None


def test_a_node_that_cannot_renew_stops_its_runs_and_nothing_of_them_is_recorded() -> None:
    @virtually
    async def main() -> None:
        store = Store()
        async with node(store, 1) as one, node(store, 2, working) as two:
            handle = await one.start(working, 5, execution_id="x")
            await asyncio.sleep(0.5)
            store.failing = lambda: True
            began = asyncio.get_running_loop().time()
            with pytest.raises(lf.LeaseLostError):
                await handle.rest()
            assert asyncio.get_running_loop().time() - began < TTL_S
            store.failing = lambda: False
            assert [r.outcome for r in await two.recover_abandoned()] == ["recovered"]
            assert effects == ["began", "began", "ended"]
            assert steps_of(await store.read("x")) == ["STARTED", "STARTED", "COMPLETED"]
            with pytest.raises(lf.GateRefusedError):  # the old node still serves calls
                await one.resume("x", "go")


def test_a_renewal_that_fails_once_is_tried_again_and_nobody_notices() -> None:
    @virtually
    async def main() -> None:
        store = Store()
        failures = iter([True, False] * 20)
        store.failing = lambda: next(failures)
        async with node(store, 1) as one:
            handle = await one.start(working, 5)
            assert await handle.result() == "worked"


def test_a_loop_that_was_blocked_past_the_expiry_refuses_its_own_writes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F18: judged here, before the store is asked; nobody else needs to have taken over."""

    @virtually
    async def main() -> None:
        store, appended = Store(), list[str]()

        @lf.flow
        async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
            async def blocks() -> str:
                loop = asyncio.get_running_loop()
                loop._virtual_s += 2 * TTL_S  # type: ignore[attr-defined]  # as if it had been stopped
                return "too late"

            await ctx.run(blocks, key="s")

        async with node(store, 1, on_storage_error=lambda error: appended.append(str(error))) as one:
            handle = await one.start(flow, execution_id="x")
            with pytest.raises(lf.StorageWriteError) as caught:
                await handle.rest()
            assert isinstance(caught.value.__cause__, lf.LeaseLostError)
            assert kinds(await store.read("x"))[:1] == ["EXECUTION_STARTED"]
            assert of(await store.read("x"), "STEP_COMPLETED", "EXECUTION_COMPLETED") == []
        assert len(appended) == 1

    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["the lease of execution 'x' was lost"]  # though the write found out, and not a renewal


def stop() -> None:
    """As if this process were stopped for longer than its leases last."""
    asyncio.get_running_loop()._virtual_s += 2 * TTL_S  # type: ignore[attr-defined]


@pytest.mark.parametrize("at_most_once", [False, True])
def test_an_effect_does_not_begin_in_a_process_that_was_stopped_past_the_expiry(at_most_once: bool) -> None:
    """F18: all that comes before it is durable; by now it may be under way, or resolved, elsewhere."""

    @virtually
    async def main() -> None:
        store = Store()
        write = store.write
        last_before = "STEP_STARTED" if at_most_once else "DECISION_RECORDED"

        def write_and_stop(envelopes: Sequence[lf.Envelope]) -> asyncio.Future[Exception | None] | None:
            written = write(envelopes)
            if any(event.event_type == last_before for event in envelopes):
                stop()
            return written

        @lf.step(at_most_once=at_most_once)
        async def once() -> None:
            effects.append("began")

        @lf.flow
        async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
            await ctx.decide("first", lambda: 1)
            await ctx.run(once)

        store.write = write_and_stop  # type: ignore[method-assign]
        async with node(store, 1) as one:
            with pytest.raises((lf.StorageWriteError, lf.LeaseLostError)):
                await (await one.start(flow, execution_id="x")).rest()
        assert last_before in kinds(await store.read("x"))
        assert effects == []


def test_a_node_that_gets_its_lease_too_late_does_not_fence_out_who_has_it_by_then() -> None:
    """F18: the answer to its claim takes longer than the lease lasts, as over a line that was down."""

    @virtually
    async def main() -> None:
        store = Store()
        acquire = store.leases.acquire

        async def late(key: str, owner: str, ttl_s: float) -> lf.Lease | None:
            lease = await acquire(key, owner, ttl_s)
            if owner == slow_owner:
                await asyncio.sleep(2 * TTL_S)
            return lease

        async with node(store, 1) as dead:
            await dead.start(working, 5, execution_id="x")
            await asyncio.sleep(0.1)
            await dead.close(grace_s=0)
        store.leases.acquire = late  # type: ignore[method-assign]
        slow, two = node(store, 2, working), node(store, 3, working)
        assert slow._driven.leases is not None
        slow_owner = slow._driven.leases._owner
        async with slow, two:
            claiming = asyncio.create_task(slow.recover("x"))
            await asyncio.sleep(1.5 * TTL_S)
            handle = await two.recover("x")
            with pytest.raises(lf.LeaseHeldError):
                await claiming
            assert await handle.result() == "worked"
        assert effects == ["began", "began", "ended"]


def test_a_node_that_was_stopped_between_its_claim_and_its_fence_leaves_it_to_others() -> None:
    """F18: whoever has the lease by then drives, and is not fenced out."""

    @virtually
    async def main() -> None:
        store = Store()
        async with node(store, 1) as dead:
            await dead.start(working, 5, execution_id="x")
            await asyncio.sleep(0.1)
            await dead.close(grace_s=0)
        account_of, newest = store.recoveries.get, await store.acquire_fence("x")

        async def stop_and_look(execution_id: str) -> lf.Recovery | None:
            stop()
            return await account_of(execution_id)

        store.recoveries.get = stop_and_look  # type: ignore[method-assign]
        async with node(store, 2, working) as one:
            with pytest.raises(lf.LeaseLostError):
                await one.recover("x")
        assert await store.acquire_fence("x") == newest + 1
        assert effects == ["began"]


class FrozenLine(lf.EventStoreDecorator):
    """A store over a line that freezes for a fence, or for the answer to one, until it has `thawed`."""

    def __init__(self, inner: lf.EventStore, late: str) -> None:
        super().__init__(inner)
        self.late = late
        self.thawed = asyncio.Event()

    async def acquire_fence(self, execution_id: str, *, lease: lf.Lease | None = None) -> int:
        if self.late == "request":
            await self.thawed.wait()
        token = await self.inner.acquire_fence(execution_id, lease=lease)
        if self.late == "answer":
            await self.thawed.wait()
        return token


@lf.flow
async def sleeping(ctx: lf.WorkflowContext, seconds: float) -> str:
    await ctx.sleep(0.1)
    return await ctx.run(works, seconds)


async def dispatched(rt: lf.WorkflowRuntime) -> lf.ExecutionHandle:
    fence = await rt.fence("x")
    return await rt.recover("x", fence=fence) if isinstance(fence, int) else fence


async def answered(rt: lf.WorkflowRuntime) -> lf.ExecutionHandle:
    await rt.answer("x", "go", 0)
    return await rt.recover("x")


# How an execution is fenced under a lease, and the flow that is left for it.
FENCED: dict[str, tuple[Any, Callable[[lf.WorkflowRuntime], Coroutine[Any, Any, lf.ExecutionHandle]]]] = {
    "recover": (working, lambda rt: rt.recover("x")),
    "a dispatch": (working, dispatched),
    "fire": (sleeping, lambda rt: rt.fire("x", fenced=True)),
    "resume": (gated, lambda rt: rt.resume("x", "go", 0)),
    "answer": (gated, answered),
}


@pytest.mark.parametrize("late", ["request", "answer"])
@pytest.mark.parametrize("how", FENCED)
def test_a_fence_that_was_frozen_on_its_way_stops_nobody_who_drives_by_then(how: str, late: str) -> None:
    """F18: between the claim and the fence a node freezes; another takes its lease, and an effect begins."""
    flow, call = FENCED[how]

    @virtually
    async def main() -> None:
        store = Store()
        async with node(store, 1) as dead:
            await dead.start(flow, 5, execution_id="x")
            await asyncio.sleep(0.2)
            await dead.close(grace_s=0)
        await store.acquire_fence("x")  # so that an answer needs a fence too
        line = FrozenLine(store, late)
        one, two = node(line, 2, flow), node(store, 3, flow)
        assert one._driven.leases is not None
        frozen, renew = one._driven.leases._owner, store.leases.renew

        async def renewed(leases: Sequence[lf.Lease], ttl_s: float) -> list[lf.Lease]:
            return await renew([lease for lease in leases if lease.owner != frozen], ttl_s)

        store.leases.renew = renewed  # type: ignore[method-assign]
        effects.clear()
        async with one, two:
            calling = asyncio.create_task(call(one))
            await asyncio.sleep(1.5 * TTL_S)
            handle = await call(two)
            await asyncio.sleep(0.1)
            assert effects == ["began"]
            line.thawed.set()
            [outcome] = await asyncio.gather(calling, return_exceptions=True)
            await handle.result()
            if late == "request":
                assert isinstance(outcome, lf.LeaseLostError)
        assert effects == ["began", "ended"]
        drove = {e.fence for e in await store.read("x") if e.event_type in ("STEP_STARTED", "STEP_COMPLETED")}
        assert len(drove - {None}) == 1


def test_an_answer_waits_for_the_node_whose_run_still_unwinds_behind_the_open_gate() -> None:
    """F10 (c), across nodes."""

    @virtually
    async def main() -> None:
        @lf.flow
        async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
            beside = asyncio.create_task(ctx.run(works, 0.5))
            await asyncio.sleep(0.1)
            answer = await ctx.suspend("go")
            await beside
            return answer

        store = Store()
        async with node(store, 1, flow) as one, node(store, 2, flow) as two:
            await one.start(flow, execution_id="x")
            with pytest.raises(lf.GateRefusedError, match="no gate is open"):
                await two.resume("x", "go", 0)
            await asyncio.sleep(0.2)
            handle = await two.resume("x", "go", 7)
            assert asyncio.get_running_loop().time() == pytest.approx(0.5, abs=0.05)
            assert await handle.result() == 7
        assert effects == ["began", "ended"]  # its outcome was recorded before the answer


def test_an_answer_to_what_another_node_drives_on_and_on_is_refused_after_the_time_of_a_lease() -> None:
    @virtually
    async def main() -> None:
        @lf.flow
        async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
            beside = asyncio.create_task(ctx.run(works, 50))
            await asyncio.sleep(0.1)
            await ctx.suspend("go")
            await beside

        store = Store()
        async with node(store, 1, flow) as one, node(store, 2, flow) as two:
            await one.start(flow, execution_id="x")
            await asyncio.sleep(0.2)
            before = await store.read("x")
            with pytest.raises(lf.LeaseHeldError):
                await two.resume("x", "go", 7)
            assert await store.read("x") == before
            assert (await two.cancel("x")).status == "cancelled"


def test_of_two_nodes_that_start_one_id_at_once_one_drives_and_the_other_is_told() -> None:
    @virtually
    async def main() -> None:
        store = Store()
        async with node(store, 1) as one, node(store, 2) as two:
            for n in range(20):
                outcomes = await asyncio.gather(
                    *(rt.start(working, 0, execution_id=f"x{n}") for rt in (one, two, one, two)),
                    return_exceptions=True,
                )
                names = sorted(type(outcome).__name__ for outcome in outcomes)
                assert names == ["ExecutionAlreadyExistsError"] * 3 + ["ExecutionHandle"]
                assert await one.handle(f"x{n}").result() == "worked"
        assert effects.count("began") == 20


def test_of_two_nodes_that_fork_to_one_id_at_once_one_drives_and_the_other_is_told() -> None:
    @virtually
    async def main() -> None:
        store = Store()
        async with node(store, 1, working) as one, node(store, 2, working) as two:
            await (await one.start(working, 0.1, execution_id="x")).result()
            forks = (rt.fork("x", 0, fork_id="y") for rt in (one, two))
            outcomes = await asyncio.gather(*forks, return_exceptions=True)
            names = sorted(type(outcome).__name__ for outcome in outcomes)
            assert names == ["ExecutionAlreadyExistsError", "ExecutionHandle"]
            assert await two.handle("y").result() == "worked"
        assert effects.count("began") == 2


def test_a_time_that_is_no_lease_is_refused() -> None:
    wrong: list[Any] = [0, -1, float("nan"), float("inf"), "x", [30]]
    for bad in wrong:
        with pytest.raises(lf.BadInputError):
            lf.WorkflowRuntime(lf.MemoryEventStore(), lease_ttl_s=bad)
