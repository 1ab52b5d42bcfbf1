"""Answering a gate for others to drive on from: `answer` is to `resume` what `submit` is to `start`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import loomfast as lf
from loomfast.testing import VirtualClock, run_virtual, seeded_entropy
from tests.conftest import OpenStore
from tests.runtime.harness import ScriptedStore, kinds, runtime

effects: list[Any] = []
ANSWERED = ["EXECUTION_STARTED", "EXECUTION_SUSPENDED", "approve", "EXECUTION_RESUMED"]


def approval(answer: Any) -> None:
    if not isinstance(answer, dict) or not isinstance(answer.get("approved"), bool):
        raise ValueError("approved must be true or false")


@lf.step
async def ship(answer: Any) -> Any:
    effects.append(answer)
    return answer


@lf.flow(gates={"approve": approval})
async def order(ctx: lf.WorkflowContext, input: Any) -> Any:
    answer = await ctx.suspend("approve", correlation_key="po-9")
    return await ctx.run(ship, answer)


@pytest.fixture(autouse=True)
def no_effects() -> None:
    effects.clear()


async def park(store: lf.EventStore, flow: Any = order) -> None:
    """Leave the execution `x` at its gate, with the process gone that ran it."""
    async with runtime(store) as rt:
        await (await rt.start(flow, execution_id="x")).rest()


def approve(rt: lf.WorkflowRuntime, answer: Any, **named: Any) -> Awaitable[lf.ExecutionHandle]:
    return rt.answer("x", "approve", answer, **{"correlation_key": "po-9"} | named)


async def drive_on(store: lf.EventStore, *flows: Any, **deps: Any) -> Any:
    """Take up what is left, where one crash would be too many, and return what `x` came to."""
    async with runtime(store, *(flows or (order,)), max_crashes=1, **deps) as rt:
        assert [found.outcome for found in await rt.recover_abandoned()] == ["recovered"]
        assert await store.recoveries.get("x") is None
        return await rt.handle("x").result()


@pytest.mark.parametrize("lease_ttl_s", [None, 30.0])
@pytest.mark.parametrize("flows", [(), (order,)], ids=["no code", "code"])
async def test_an_answer_is_durable_runs_nothing_here_and_is_no_crash_for_whoever_drives_on(
    open_store: OpenStore, flows: tuple[Any, ...], lease_ttl_s: float | None
) -> None:
    heard: list[lf.Envelope] = []
    async with open_store() as store:
        await park(store)
        async with runtime(store, *flows, lease_ttl_s=lease_ttl_s, on_commit=heard.append) as rt:
            handle = await approve(rt, {"approved": True}, gate=0)
            log = await store.read("x")
            assert kinds(log) == ANSWERED
            assert heard == log[2:]
            assert not rt.drives("x")
            with pytest.raises(lf.GateRefusedError, match="no gate is open"):
                await approve(rt, {"approved": False})
            waiter = asyncio.create_task(handle.result())
            while await store.leases.get("x") is not None:  # it is given back in the background
                await asyncio.sleep(0)
            assert await drive_on(store, lease_ttl_s=lease_ttl_s) == {"approved": True}
            assert await waiter == {"approved": True}
            with pytest.raises(lf.GateRefusedError, match="it has completed"):
                await approve(rt, {"approved": False})
        with pytest.raises(lf.RuntimeClosedError):
            await approve(rt, {"approved": False})
    assert effects == [{"approved": True}]


@pytest.mark.parametrize("flows", [(), (order,)], ids=["no code", "code"])
async def test_an_answer_that_does_not_fit_is_refused_as_by_resume_and_nothing_is_written(
    open_store: OpenStore, flows: tuple[Any, ...]
) -> None:
    """F11."""
    right = {"approved": True}
    async with open_store() as store:
        await park(store)
        before = await store.read("x")
        async with runtime(store, *flows) as rt:
            with pytest.raises(lf.GateRefusedError, match="waits for 'approve'"):
                await rt.answer("x", "go", right)
            with pytest.raises(lf.GateRefusedError, match="correlation key 'po-9'"):
                await approve(rt, right, correlation_key="po-8")
            with pytest.raises(lf.GateRefusedError, match="the open gate is 0, not 1"):
                await approve(rt, right, gate=1)
            with pytest.raises(lf.JsonFormError):
                await approve(rt, right | {"x": object()})
            with pytest.raises(lf.BadInputError):
                await approve(rt, right, resume_id="")
            with pytest.raises(lf.UnknownExecutionError):
                await rt.answer("nobody", "approve", right)
        assert await store.read("x") == before
        assert await store.recoveries.get("x") is None


async def test_the_schema_of_the_gate_is_checked_where_the_flow_is_known_and_nowhere_else(
    open_store: OpenStore,
) -> None:
    """F11."""
    async with open_store() as store:
        await park(store)
        async with runtime(store, order) as knows, runtime(store) as knows_not:
            with pytest.raises(lf.InputValidationError, match="approved must be true or false"):
                await approve(knows, "yes")
            assert await store.last_sequence("x") == 1
            await approve(knows_not, "yes")
        assert await drive_on(store) == "yes"


async def test_a_repeat_by_its_name_writes_nothing_in_any_process_and_whoever_answers(
    open_store: OpenStore,
) -> None:
    """F09."""
    async with open_store() as store:
        await park(store)
        async with runtime(store) as one, runtime(store, order) as two:
            handles = await asyncio.gather(
                *(approve(rt, {"approved": True}, resume_id="click") for rt in (one, two) for _ in range(5))
            )
            assert [handle.execution_id for handle in handles] == ["x"] * 10
            log = await store.read("x")
            assert kinds(log) == ANSWERED
            assert log[2].metadata == {"resumeId": "click"}
            with pytest.raises(lf.ResumeIdReusedError):
                await approve(one, {"approved": False}, resume_id="click")
            await two.resume("x", "approve", {"approved": True}, correlation_key="po-9", resume_id="click")
            assert await store.read("x") == log
        assert await drive_on(store) == {"approved": True}
        async with runtime(store) as rt:
            handle = await approve(rt, {"approved": True}, resume_id="click")
            assert await handle.result() == {"approved": True}
    assert effects == [{"approved": True}]


@lf.flow
async def either(ctx: lf.WorkflowContext, input: Any) -> Any:
    return await ctx.run(ship, await ctx.suspend("go", timeout_s=0.001))


@pytest.mark.parametrize("lease_ttl_s", [None, 30.0])
async def test_of_answers_resumes_and_a_timer_at_once_one_counts_and_nothing_runs_twice(
    open_store: OpenStore, lease_ttl_s: float | None
) -> None:
    """F09, F16."""
    async with open_store() as store:
        await park(store, either)
        clock = lf.SystemClock()
        async with (
            runtime(store, clock=clock, lease_ttl_s=lease_ttl_s) as client,
            runtime(store, either, clock=clock, lease_ttl_s=lease_ttl_s) as driver,
        ):
            calls = [
                call
                for n in range(8)
                for call in (
                    client.answer("x", "go", n),
                    driver.resume("x", "go", n),
                    driver.answer("x", "go", n),
                    driver.fire("x"),
                )
            ]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            refused = (lf.GateRefusedError, lf.LeaseHeldError)  # a timer does not wait for a lease
            assert sum(isinstance(outcome, lf.ExecutionHandle) for outcome in outcomes) == 1
            assert sum(isinstance(outcome, refused) for outcome in outcomes) == len(calls) - 1
            log = kinds(await store.read("x"))
            assert (log.count("go"), log.count("EXECUTION_RESUMED")) == (1, 1)
            await (await driver.recover("x")).result()
    assert len(effects) == 1


async def test_one_that_still_unwinds_here_behind_its_gate_goes_on_here(open_store: OpenStore) -> None:
    """F10 (c)."""
    leaving = asyncio.Event()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        try:
            return await ctx.run(ship, await ctx.suspend("go"))
        finally:
            await leaving.wait()

    async with open_store() as store, runtime(store) as rt:
        await rt.start(flow, execution_id="x")
        while await store.last_sequence("x") != 1:
            await asyncio.sleep(0)
        handle = await rt.answer("x", "go", 7)
        leaving.set()
        assert await handle.result() == 7
        assert await store.recoveries.get("x") is None
    assert effects == [7]


async def test_an_answer_to_what_was_fenced_before_is_written_under_a_token_of_its_own(
    open_store: OpenStore,
) -> None:
    async with open_store() as store:
        await park(store)
        await store.acquire_fence("x")
        async with runtime(store) as rt:
            await approve(rt, {"approved": True})
        assert [event.fence for event in (await store.read("x"))[2:]] == [2, 2]
        assert await drive_on(store) == {"approved": True}
    assert effects == [{"approved": True}]


async def test_who_is_fenced_out_by_an_answer_that_comes_second_is_taken_up_as_no_crash() -> None:
    """Without leases, between the last look and the fence another answer is given, and driven on from."""

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        answer = await ctx.suspend("go")
        await ctx.run(lambda: "looked", key="look")
        await ctx.run(held, key="held")
        return answer

    holding = asyncio.Event()

    async def held() -> None:
        if not holding.is_set():
            holding.set()
            await asyncio.sleep(3600)

    class Late(lf.MemoryEventStore):
        first: Callable[[], Awaitable[Any]] | None = None

        async def acquire_fence(self, execution_id: str, *, lease: lf.Lease | None = None) -> int:
            first, self.first = self.first, None
            if first is not None:
                await first()
                await holding.wait()
            return await super().acquire_fence(execution_id, lease=lease)

    store = Late()
    await park(store, flow)
    await store.acquire_fence("x")
    async with runtime(store, flow) as one, runtime(store) as two:

        async def first() -> None:
            await one.answer("x", "go", 1)
            await one.recover("x")

        store.first = first
        with pytest.raises(lf.GateRefusedError, match="no gate is open"):
            await two.answer("x", "go", 2)
        assert not two.drives("x")
        assert await drive_on(store, flow) == 1
    assert kinds(await store.read("x")).count("go") == 1


@pytest.mark.parametrize("written", [True, False])
async def test_a_process_that_dies_at_its_answer_leaves_it_whole_or_not_at_all(written: bool) -> None:
    """F01: what was written is found by the next sweep, and is no crash of the flow's."""

    class Dying(ScriptedStore):
        async def append_batch(self, envelopes: Any) -> None:
            if written and envelopes[-1].event_type == "EXECUTION_RESUMED":
                await super().append_batch(envelopes)
                raise OSError("the line is cut before the answer")
            await super().append_batch(envelopes)

    store = Dying()
    await park(store)
    if not written:
        store.script = {len(store.appends): OSError("the line is cut")}
    async with runtime(store) as rt:
        with pytest.raises(lf.StorageWriteError, match="the line is cut"):
            await approve(rt, {"approved": True}, resume_id="click")
        assert await store.last_sequence("x") == (3 if written else 1)
        await approve(rt, {"approved": True}, resume_id="click")
    assert kinds(await store.read("x")) == ANSWERED
    assert await drive_on(store) == {"approved": True}
    assert effects == [{"approved": True}]


async def test_an_answer_whose_mark_is_refused_is_given_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(account: object) -> None:
        raise lf.StoreFullError(None, None, "no room")

    store = lf.MemoryEventStore()
    await park(store)
    with monkeypatch.context() as patch:
        patch.setattr(store.recoveries, "put", refused)
        async with runtime(store) as rt:
            await approve(rt, {"approved": True})
    assert kinds(await store.read("x")) == ANSWERED
    async with runtime(store, order) as rt:
        assert [found.outcome for found in await rt.recover_abandoned()] == ["recovered"]
    assert effects == [{"approved": True}]


# --- with leases, on virtual time ---------------------------------------------------------------------

TTL_S = 1.0


def node(store: lf.EventStore, seed: int, *flows: Any) -> lf.WorkflowRuntime:
    return runtime(
        store, *flows, clock=VirtualClock(), entropy=seeded_entropy(seed), lease_ttl_s=TTL_S, max_crashes=1
    )


def lingering(seconds: float) -> lf.FlowDefinition:
    """A flow whose run unwinds so many seconds behind its open gate."""

    async def work() -> None:
        await asyncio.sleep(seconds)
        effects.append("unwound")

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        beside = asyncio.create_task(ctx.run(work, key="beside"))
        await asyncio.sleep(0.1)
        answer = await ctx.suspend("go")
        await beside
        return await ctx.run(ship, answer)

    return flow


def test_an_answer_waits_for_the_run_that_unwinds_elsewhere_and_then_gives_its_lease_back_at_once() -> None:
    """F10 (c), F18."""

    async def main() -> None:
        flow = lingering(0.5)
        store = lf.MemoryEventStore(now_ms=lambda: VirtualClock().now_ms())
        async with node(store, 1, flow) as one, node(store, 2) as client, node(store, 3, flow) as three:
            await one.start(flow, execution_id="x")
            with pytest.raises(lf.GateRefusedError, match="no gate is open"):
                await client.answer("x", "go", 0)
            await asyncio.sleep(0.2)
            await client.answer("x", "go", 7)
            assert effects == ["unwound"]
            answered = asyncio.get_running_loop().time()
            await asyncio.sleep(0.001)
            assert await store.leases.get("x") is None
            assert await (await three.recover("x")).result() == 7
            assert asyncio.get_running_loop().time() - answered < TTL_S / 2
        assert effects == ["unwound", 7]
        assert await store.recoveries.get("x") is None

    run_virtual(main())


def test_an_answer_to_what_another_node_drives_on_and_on_is_refused_and_not_written() -> None:
    async def main() -> None:
        flow = lingering(50)
        store = lf.MemoryEventStore(now_ms=lambda: VirtualClock().now_ms())
        async with node(store, 1, flow) as one, node(store, 2) as client:
            await one.start(flow, execution_id="x")
            await asyncio.sleep(0.2)
            before = await store.read("x")
            with pytest.raises(lf.LeaseHeldError):
                await client.answer("x", "go", 7)
            assert await store.read("x") == before
            assert await store.recoveries.get("x") is None
            assert one.drives("x")
            await asyncio.sleep(50)
            await client.answer("x", "go", 7)
            assert await (await one.recover("x")).result() == 7

    run_virtual(main())
