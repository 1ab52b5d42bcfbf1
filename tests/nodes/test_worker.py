"""`Worker`: it takes up what is abandoned and what is due, each on its own (F15, F17, F18)."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest

import loomfast as lf
from loomfast._kernels import canonical, fnv1a64, format_digest
from loomfast.testing import VirtualClock, seeded_entropy
from loomfast.testing.time import START_MS
from tests.conftest import OpenStore
from tests.nodes.harness import HOUR, MINUTE, Lost, memory_store, node, now_s, virtually
from tests.runtime.harness import of

START = {"flowVersion": "1"}


class Work:
    """What the flows of these tests do: how often, and how many at a time."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def do(self, name: str, kinds: tuple[str, ...], seconds: float) -> None:
        for kind in kinds:
            self.running[kind] += 1
            self.most[kind] = max(self.most[kind], self.running[kind])
        try:
            await asyncio.sleep(seconds)
        finally:
            for kind in kinds:
                self.running[kind] -= 1
        self.done[name] += 1


work = Work()


@pytest.fixture(autouse=True)
def no_work() -> None:
    work.__init__()  # type: ignore[misc]  # as new


@lf.step
async def effect(asked: list[Any]) -> str:
    name, kind, seconds = asked
    await work.do(name, ("all", kind, name[0]), seconds)
    return name


@lf.flow
async def long(ctx: lf.WorkflowContext, seconds: float | None) -> str:
    return await ctx.run(effect, [ctx.execution_id, "long", seconds or 1.0])


@lf.flow
async def short(ctx: lf.WorkflowContext, seconds: float | None) -> str:
    return await ctx.run(effect, [ctx.execution_id, "short", seconds or 0.01])


@lf.flow
async def napping(ctx: lf.WorkflowContext, seconds: float) -> str:
    await ctx.sleep(seconds)
    return await ctx.run(effect, [ctx.execution_id, "napping", 0.1])


@lf.flow
async def asks(ctx: lf.WorkflowContext, input: Any) -> Any:
    return await ctx.suspend("ok")


@lf.step(at_most_once=True)
async def wire() -> None:
    raise ConnectionError("no confirmation")


@lf.flow
async def doubtful(ctx: lf.WorkflowContext, input: Any) -> None:
    await ctx.run(wire)


@lf.flow
async def approved(ctx: lf.WorkflowContext, input: Any) -> Any:
    answer = await ctx.suspend("ok")
    return [answer, await ctx.run(effect, [ctx.execution_id, "approved", 0.5])]


FLOWS = [long, short, napping, asks, doubtful, approved]


def worker(store: lf.EventStore, seed: int = 1, *flows: Any, **options: Any) -> lf.Worker:
    runtime = {"clock": VirtualClock(), "entropy": seeded_entropy(seed)} | options.pop("runtime", {})
    app = lf.App(flows or FLOWS, options.pop("lifespan", None), runtime)
    return lf.Worker(store, app, **{"lease_ttl_s": 3.0, "close_grace_s": 0.0} | options)


async def leave_behind(store: lf.EventStore, *ids: str, flow: lf.FlowDefinition = short) -> None:
    """As if their process had been killed when they had just started, and their leases had run out."""
    for execution_id in ids:
        payload = {"flowId": flow.id, "flowVersion": flow.version, "input": None}
        await store.append(lf.Envelope.make(execution_id, 0, "EXECUTION_STARTED", payload, START_MS))


async def until(condition: Any, limit_s: float = 600) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.05)


async def all_ended(store: lf.EventStore, *ids: str) -> None:
    async with asyncio.timeout(3 * HOUR):
        while True:
            ended = {
                each.execution_id for each in await store.list_executions(status="completed", limit=5000)
            }
            if ended >= set(ids):
                return
            await asyncio.sleep(0.05)


# --- taking up -----------------------------------------------------------------------------------


def test_what_a_dead_process_left_is_driven_on_and_what_rests_is_left_alone() -> None:
    """F17: bootstrap only, asleep, at a gate, in doubt."""

    async def main() -> None:
        store = memory_store()
        async with node(store, 9, *FLOWS, lease_ttl_s=3.0) as rt:
            await (await rt.start(napping, 100, execution_id="asleep")).rest()
            await (await rt.start(asks, execution_id="asked")).rest()
        await leave_behind(store, "begun")
        await leave_behind(store, "doubt", flow=doubtful)
        begun = {"key": "wire", "stepId": "wire", "attempt": 1, "inputDigest": "0" * 16}
        await store.append(lf.Envelope.make("doubt", 1, "STEP_STARTED", begun, START_MS))
        async with worker(store) as it:
            await all_ended(store, "begun")
            await asyncio.sleep(50)
            assert work.done == {"begun": 1}
            for name in ("asked", "doubt"):
                state = await it.runtime.load_state(name)
                assert state is not None
                assert state.status == "suspended"
            await all_ended(store, "asleep")
        assert work.done == {"begun": 1, "asleep": 1}
        assert await store.leases.held(["asleep", "asked", "doubt", "begun"]) == []

    virtually(main)


def test_a_run_that_left_its_log_is_named_once_is_no_crash_and_goes_on_once_the_flow_is_mended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @lf.step
    async def double(n: int) -> int:
        return 2 * n

    def version(n: int) -> lf.FlowDefinition:
        @lf.flow(id="changed")
        async def changed(ctx: lf.WorkflowContext, input: Any) -> Any:
            return await ctx.run(double, n)

        return changed

    async def main() -> None:
        store = memory_store()
        await leave_behind(store, "x", flow=version(1))
        key = {"key": "double", "stepId": "double"}
        started = {**key, "attempt": 1, "inputDigest": format_digest(fnv1a64(canonical(1)))}
        completed = {"key": "double", "output": 2}
        await store.append(lf.Envelope.make("x", 1, "STEP_STARTED", started, START_MS))
        await store.append(lf.Envelope.make("x", 2, "STEP_COMPLETED", completed, START_MS))
        async with worker(store, 1, version(2), runtime={"max_crashes": 2}) as it:
            await asyncio.sleep(600)
            assert it.health().failing == 1
        account = await store.recoveries.get("x")
        assert account is not None
        assert (account.crashes, account.orderly, account.set_aside) == (1, True, None)
        async with worker(store, 2, version(1)):
            await all_ended(store, "x")

    caplog.set_level("DEBUG", "loomfast")
    virtually(main)
    named = [record for record in caplog.records if "cannot go on: DeterminismError" in record.getMessage()]
    assert [record.levelname for record in named[:2]] == ["WARNING", "DEBUG"]
    assert [record.levelname for record in named].count("WARNING") == 1
    assert 10 < len(named) < 20  # after pauses of 1 s to a minute


def test_what_another_process_drives_is_left_alone_however_old_and_taken_over_once_it_is_dead() -> None:
    """F18: a lease of 3 s, a step of ten minutes, a worker that sweeps five times a second."""

    async def main() -> None:
        store = memory_store()
        rt = node(store, 9, *FLOWS, lease_ttl_s=3.0)
        await rt.start(long, 10 * MINUTE, execution_id="x")
        async with worker(store, sweep_s=0.2):
            await asyncio.sleep(5 * MINUTE)
            assert work.running["all"] == 1
            await rt.close(grace_s=0)  # it gives its lease back, and nothing is recorded as an outcome
            await until(lambda: work.running["all"] == 1, 1.0)
            await all_ended(store, "x")
        log = await store.read("x")
        assert of(log, "STEP_STARTED", "STEP_COMPLETED") == ["STEP_STARTED", "STEP_STARTED", "STEP_COMPLETED"]
        assert work.done == {"x": 1}

    virtually(main)


@pytest.mark.parametrize("seed", range(10))
def test_three_workers_take_up_each_of_what_is_left_once(seed: int) -> None:
    names = [f"e{n}" for n in range(60)]

    async def main() -> None:
        store = memory_store()
        await leave_behind(store, *names)
        async with worker(store, 1), worker(store, 2), worker(store, 3):
            await all_ended(store, *names)
        assert work.done == dict.fromkeys(names, 1)

    virtually(main, seed=seed)


def test_one_that_cannot_be_read_and_one_of_an_unknown_flow_concern_themselves_only() -> None:
    """F15: 1,000 abandoned, two of them bad, 8 at a time: 998 done."""
    names = [f"e{n}" for n in range(1000)]

    class Unreadable(lf.MemoryEventStore):
        async def fold(self, execution_id: str, state: lf.State | None = None) -> lf.State | None:
            if execution_id == "e500":
                raise lf.StoreReadError(execution_id, f"{execution_id}: not as it was written")
            return await super().fold(execution_id, state)

    async def main() -> None:
        store = Unreadable(now_ms=lambda: VirtualClock().now_ms())
        await leave_behind(store, *names[:-1])
        await leave_behind(store, names[-1], flow=lf.flow(id="unknown")(short.function))
        async with worker(store, limits=lf.Limits(concurrency=8)) as it:
            good = [name for name in names if name not in ("e500", "e999")]
            await all_ended(store, *good)
            assert it.health().failing == 2
        assert work.most["all"] == 8
        assert work.done == dict.fromkeys(good, 1)

    virtually(main)


# --- limits --------------------------------------------------------------------------------------


def test_a_flow_at_its_limit_holds_up_no_other_and_none_is_passed_over_for_ever() -> None:
    slow, quick = [f"l{n}" for n in range(30)], [f"s{n}" for n in range(30)]

    async def main() -> None:
        store = memory_store()
        await leave_behind(store, *slow, flow=long)
        await leave_behind(store, *quick, flow=short)
        limits = lf.Limits(concurrency=10, per_flow={long.id: 2})
        async with worker(store, limits=limits):
            await all_ended(store, *quick)
            assert sum(work.done[name] for name in slow) < 10
            await all_ended(store, *slow)
        assert (work.most["all"], work.most["long"], work.most["short"]) == (10, 2, 8)
        assert work.done == dict.fromkeys(slow + quick, 1)

    virtually(main)


def test_what_is_due_keeps_to_the_limits_and_does_not_wait_for_a_poll() -> None:
    names = [f"n{n}" for n in range(200)]

    async def main() -> None:
        store = memory_store()
        async with node(store, 9, *FLOWS, lease_ttl_s=3.0) as rt:
            for name in names:
                await (await rt.start(napping, 1, execution_id=name)).rest()
        await asyncio.sleep(1)
        begun = VirtualClock().now_ms()
        async with worker(store, limits=lf.Limits(concurrency=5, per_flow=5), poll_s=30):
            await all_ended(store, *names)
        assert work.most["all"] == 5
        assert work.done == dict.fromkeys(names, 1)
        # 40 rounds of a tenth of a second; a wait for the poll in each would be 20 minutes.
        assert VirtualClock().now_ms() - begun < 30_000

    virtually(main)


def test_occurrences_keep_to_the_limits_too_and_the_mark_waits_for_them() -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 9, *FLOWS) as rt:
            trigger = lf.Every(60, anchor_ms=START_MS)
            await lf.Schedules(rt).put("s", long, 5.0, trigger=trigger, catch_up=20)
        await asyncio.sleep(20 * 60 + 1)
        async with worker(store, limits=lf.Limits(concurrency=3)):
            names = [lf.occurrence_id("s", START_MS + n * 60_000) for n in range(1, 21)]
            await all_ended(store, *names)
        assert work.most["all"] == 3
        assert [work.done[name] for name in names] == [1] * 20

    virtually(main)


# --- tenants -------------------------------------------------------------------------------------


def test_tenants_executions_are_driven_as_theirs_and_each_keeps_to_its_limit() -> None:
    async def main() -> None:
        store = memory_store()
        views = {tenant: lf.TenantScopedEventStore(store, tenant) for tenant in ("acme", "", "a:b")}
        for tenant, view in views.items():
            await leave_behind(view, *(f"{len(tenant)}{n}" for n in range(10)), flow=long)
            async with node(view, 9, *FLOWS, lease_ttl_s=3.0) as rt:
                await (await rt.start(napping, 2, execution_id="nap")).rest()
                await lf.Schedules(rt).put("daily", short, trigger=lf.Every(10, anchor_ms=START_MS))
        await leave_behind(store, "nobodys", "7:odd")
        async with worker(store, limits=lf.Limits(concurrency=50, per_tenant=3), tenants=True) as it:
            assert it.runtime.store is store
            for tenant, view in views.items():
                await all_ended(view, *(f"{len(tenant)}{n}" for n in range(10)), "nap")
                state = await lf.WorkflowRuntime(view).load_state("nap")
                assert state is not None
                assert state.output == "nap", "a flow sees its own id, not the stored one"
            await all_ended(store, "nobodys", "7:odd")
            await asyncio.sleep(11)
            for view in views.values():
                assert any(
                    each.execution_id.startswith("daily@") for each in await view.list_executions(limit=100)
                )
        assert [work.most[first] for first in ("4", "0", "3")] == [3, 3, 3]
        assert (
            await store.leases.held([each.execution_id for each in await store.list_executions(limit=99)])
            == []
        )

    virtually(main)


def test_runtimes_of_tenants_that_have_nothing_to_do_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loomfast._nodes.tenants.IDLE", 3)

    async def main() -> None:
        store = memory_store()
        views = [lf.TenantScopedEventStore(store, f"t{n}") for n in range(12)]
        async with worker(store, sweep_s=0.5, tenants=True) as it:
            for n, view in enumerate(views):
                await leave_behind(view, "x")
                await all_ended(view, "x")
                assert len(it._runtimes) <= 5, f"after {n + 1} tenants"
        assert work.done == {"x": 12}

    virtually(main)


# --- life ----------------------------------------------------------------------------------------


def test_a_lifespan_is_entered_before_anything_is_taken_up_and_left_once_all_has_stopped() -> None:
    said: list[str] = []

    async def main() -> None:
        store = memory_store()
        await leave_behind(store, "x")

        @asynccontextmanager
        async def lifespan(it: lf.Worker) -> AsyncIterator[None]:
            await asyncio.sleep(5)
            said.append(f"opened: {it.health().phase}, {work.done['x']} done")
            await it.schedules.put("s", short, trigger=lf.Every(60))
            yield
            said.append(f"closed: {it.health().phase}, {work.done['x']} done")

        async with worker(store, lifespan=lifespan) as it:
            await all_ended(store, "x")
            assert it.health().phase == "running"
        assert said == ["opened: new, 0 done", "closed: closing, 1 done"]
        assert it.health().phase == "closed"
        with pytest.raises(lf.BadInputError, match="make another"):
            await it.__aenter__()
        await it.close()

    virtually(main)


def test_closing_lets_effects_finish_within_the_grace_and_others_take_over_at_once() -> None:
    """F19: nothing is recorded as an outcome for it, and it is no crash."""

    async def main() -> None:
        store = memory_store()
        await leave_behind(store, "s0", flow=short)
        it = worker(store, 1)
        await it.__aenter__()
        async with node(store, 9, *FLOWS, lease_ttl_s=3.0) as rt:
            await rt.start(long, 2.0, execution_id="quick")
            await rt.start(long, 600.0, execution_id="never")
            await asyncio.sleep(0.1)
            await rt.close(grace_s=0)
        await until(lambda: work.running["all"] == 2, 30)
        await it.close(grace_s=30)
        log = await store.read("never")
        assert (
            of(log, "STEP_STARTED", "STEP_COMPLETED", "STEP_CANCELLED", "STEP_FAILED") == ["STEP_STARTED"] * 2
        )
        assert of(await store.read("quick"), "STEP_COMPLETED") == ["STEP_COMPLETED"]
        assert await store.leases.held(["quick", "never"]) == []
        async with worker(store, 2):
            await until(lambda: work.running["all"] == 1, 1.0)
            assert await store.recoveries.get("never") is None, "an orderly end is no crash"

    virtually(main)


def test_health_tells_whether_the_store_answers() -> None:
    async def main() -> None:
        store = Lost()
        it = worker(store)
        assert not it.health().well
        async with it:
            await leave_behind(store, "x", flow=long)
            await until(lambda: it.health().driving == 1, 10)
            health = it.health()
            assert (health.phase, health.well, health.limit, health.failing) == ("running", True, 100, 0)
            store.lost = True
            await asyncio.sleep(20)
            assert not it.health().well
            assert (it.health().looked_s or 0) > 15
            store.lost = False
            await asyncio.sleep(40)
            assert it.health().well
        assert not it.health().well

    virtually(main)


async def test_a_worker_on_real_stores(open_store: OpenStore) -> None:
    names = [f"e{n}" for n in range(40)]
    async with open_store() as store:
        await leave_behind(store, *names)
        async with lf.Worker(store, lf.App(FLOWS), lease_ttl_s=30, sweep_s=0.1) as it:
            await it.schedules.put("s", short, trigger=lf.Every(1))
            await it.runtime.start(napping, 0.1, execution_id="nap")
            await asyncio.gather(*(it.runtime.handle(name).result() for name in [*names, "nap"]))
            await until(lambda: any(name.startswith("s@") for name in work.done), 10)
        assert {name: work.done[name] for name in names} == dict.fromkeys(names, 1)
        assert await store.leases.held(names) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency=0"),
        ({"concurrency": 1.5}, "concurrency=1.5"),
        ({"per_flow": -1}, "per_flow=-1"),
        ({"per_flow": {"a": "3"}}, r"per_flow\['a'\]='3'"),
        ({"per_tenant": True}, "per_tenant=True"),
    ],
)
def test_bad_limits_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(lf.BadInputError, match=message):
        lf.Limits(**options)


async def test_bad_options_of_a_worker_are_refused() -> None:
    store = lf.MemoryEventStore()
    with pytest.raises(lf.BadInputError, match="app must be a loomfast"):
        lf.Worker(store, [short])  # type: ignore[arg-type]
    for options in ({"poll_s": 0}, {"sweep_s": 0}, {"lease_ttl_s": 0}, {"close_grace_s": -1}):
        with pytest.raises(lf.BadInputError):
            lf.Worker(store, lf.App([short]), **options)
    with pytest.raises(lf.BadInputError, match="snapshot_every"):
        lf.Worker(store, lf.App([short], options={"snapshot_every": 0}))
    with pytest.raises(lf.BadInputError, match="lease_ttl_s"):
        lf.Worker(store, lf.App([short], options={"lease_ttl_s": 3}))


def test_a_lifespan_is_left_by_the_task_that_entered_it() -> None:
    """Context variables, cancel scopes and task groups ask for it."""
    opened: ContextVar[str] = ContextVar("opened")

    @asynccontextmanager
    async def lifespan(it: lf.Worker) -> AsyncIterator[None]:
        token, task = opened.set("here"), asyncio.current_task()
        yield
        opened.reset(token)
        assert asyncio.current_task() is task

    async def main() -> None:
        async with worker(memory_store(), lifespan=lifespan) as it:
            await asyncio.sleep(1)
        assert it.phase == "closed"

    virtually(main)


def test_a_worker_whose_lifespan_raises_is_closed_and_so_is_what_it_began() -> None:
    @asynccontextmanager
    async def raises_in_front(it: lf.Worker) -> AsyncIterator[None]:
        await it.runtime.start(long, HOUR, execution_id="x")
        await asyncio.sleep(0.1)
        raise ConnectionError("nobody there")
        yield

    @asynccontextmanager
    async def raises_behind(it: lf.Worker) -> AsyncIterator[None]:
        yield
        raise ConnectionError("nobody there")

    async def main() -> None:
        store = memory_store()
        for lifespan in (raises_in_front, raises_behind):
            it = worker(store, lifespan=lifespan)
            with pytest.raises(ConnectionError):
                async with it:
                    await asyncio.sleep(0.1)
            assert it.phase == "closed"
            await it.close()
        assert work.running["all"] == 0
        assert await store.leases.held(["x"]) == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtually(main)


def test_a_lifespan_may_close_its_worker_on_its_way_out() -> None:
    @asynccontextmanager
    async def lifespan(it: lf.Worker) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await it.close()

    async def main() -> None:
        async with asyncio.timeout(60), worker(memory_store(), lifespan=lifespan) as it:
            await asyncio.sleep(0.1)
        assert it.phase == "closed"

    virtually(main)


def test_a_worker_that_is_closed_while_its_lifespan_is_entered_does_not_begin() -> None:
    said: list[str] = []

    @asynccontextmanager
    async def lifespan(it: lf.Worker) -> AsyncIterator[None]:
        await it.close()
        yield
        said.append("left")

    async def main() -> None:
        it = worker(memory_store(), lifespan=lifespan)
        with pytest.raises(lf.RuntimeClosedError):
            await it.__aenter__()
        assert (said, it.phase, it.health().well) == (["left"], "closed", False)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtually(main)


# --- a worker that is full -----------------------------------------------------------------------


@lf.flow
async def again(ctx: lf.WorkflowContext, input: Any) -> None:
    while True:
        await ctx.sleep(0.05)
        await ctx.run(effect, [ctx.execution_id, "again", 0.1])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("concurrency", [1, 3])
def test_sleepers_without_end_leave_room_for_what_is_abandoned_and_for_occurrences(
    seed: int, concurrency: int
) -> None:
    """20 of them are always due, and the worker is always full."""

    async def main() -> None:
        store = memory_store()
        async with node(store, 9, again, lease_ttl_s=3.0) as rt:
            for n in range(20):
                await (await rt.start(again, execution_id=f"again{n}")).rest()
        flows = (again, short)
        async with worker(store, 1, *flows, limits=lf.Limits(concurrency=concurrency)) as it:
            await asyncio.sleep(5)
            await leave_behind(store, *(f"left{n}" for n in range(5)))
            await it.schedules.put("s", short, trigger=lf.Every(2), catch_up=100)
            await all_ended(store, *(f"left{n}" for n in range(5)))
            await asyncio.sleep(30)
            started = [each for each in await store.list_executions(limit=1000) if "@" in each.execution_id]
            assert len(started) >= 12, "of 15"
            assert min(work.done[f"again{n}"] for n in range(20)) > 0
            assert work.most["all"] <= concurrency

    virtually(main, seed=seed)


def test_what_waits_for_room_is_not_folded_again_for_each_slot_that_is_given_back() -> None:
    """300 sleepers at once: the work is that of what is woken, not of what waits."""
    asked: Counter[str] = Counter()

    class Asked(lf.MemoryEventStore):
        async def fold(self, execution_id: str, state: lf.State | None = None) -> lf.State | None:
            asked["fold"] += 1
            return await super().fold(execution_id, state)

    async def main() -> None:
        store = Asked(now_ms=lambda: VirtualClock().now_ms())
        names = [f"n{n}" for n in range(300)]
        async with node(store, 9, *FLOWS, lease_ttl_s=3.0) as rt:
            await asyncio.gather(*[(await rt.start(napping, 1, execution_id=name)).rest() for name in names])
        await asyncio.sleep(2)
        asked.clear()
        async with worker(store, limits=lf.Limits(per_flow={"napping": 2})):
            await all_ended(store, *names)
        assert work.most["all"] == 2
        assert asked["fold"] <= 4 * len(names)

    virtually(main)


def test_what_is_passed_over_at_its_limit_does_not_wait_for_the_next_sweep() -> None:
    """100 of a flow that may run twice, each for 1 s: 50 s, though a sweep comes every 10 s."""

    async def main() -> None:
        store = memory_store()
        names = [f"e{n}" for n in range(100)]
        await leave_behind(store, *names, flow=long)
        async with worker(store, limits=lf.Limits(per_flow={"long": 2}), lease_ttl_s=30.0):
            await all_ended(store, *names)
        assert now_s() < 60
        assert work.most["all"] == 2

    virtually(main)


def test_health_forgets_what_failed_here_once_it_has_gone_on_elsewhere() -> None:
    async def main() -> None:
        store = memory_store()
        elsewhere = node(store, 9, napping, lease_ttl_s=3.0)
        async with elsewhere, worker(store, 1, short) as it:
            await (await elsewhere.start(napping, 1, execution_id="x")).rest()
            await asyncio.sleep(200)
            assert it.health().failing == 1
            async with lf.TimerService(elsewhere):
                await all_ended(store, "x")
            await asyncio.sleep(200)
            assert it.health().failing == 0

    virtually(main)


async def test_sync_steps_have_as_many_threads_as_the_app_says() -> None:
    together = threading.Barrier(20, timeout=60)

    @lf.flow
    async def meets(ctx: lf.WorkflowContext, input: Any) -> None:
        await asyncio.gather(*(ctx.run(lambda: together.wait() >= 0, key=f"s{n}") for n in range(20)))

    app = lf.App([meets], options={"step_threads": 20})
    async with lf.Worker(lf.MemoryEventStore(), app) as it:
        await (await it.runtime.start(meets)).result()
    with pytest.raises(lf.BadInputError, match="step_threads=0"):
        lf.Worker(lf.MemoryEventStore(), lf.App([meets], options={"step_threads": 0}))
    store = lf.MemoryEventStore()
    with pytest.raises(lf.BadInputError, match="option 'nope' of the app: must be one of batch_events"):
        lf.Worker(store, lf.App([short], options={"nope": 3}))
    with pytest.raises(lf.BadInputError, match="per_flow names 'shrot', which is no flow of the app"):
        lf.Worker(store, lf.App([short]), limits=lf.Limits(per_flow={"shrot": 3}))


@pytest.mark.parametrize("chosen", [True, False])
def test_what_is_submitted_is_driven_by_a_worker_only_and_counts_no_crash(chosen: bool) -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 9, *FLOWS, max_crashes=1) as client:
            handle = await client.submit(short, 0.5, execution_id="x" if chosen else None)
            name = handle.execution_id
            assert [event.event_type for event in await store.read(name)] == ["EXECUTION_STARTED"]
            assert not client.drives(name)
            with pytest.raises(lf.ExecutionAlreadyExistsError):
                await client.submit(short, 7, execution_id=name)
            async with worker(store, runtime={"max_crashes": 1}):
                assert await handle.result() == name
        assert work.done == {name: 1}
        assert await store.recoveries.get(name) is None
        assert of(await store.read(name), "EXECUTION_COMPLETED") == ["EXECUTION_COMPLETED"]

    virtually(main)


@pytest.mark.parametrize("chosen", [True, False])
async def test_a_submission_whose_mark_is_refused_is_no_failure_since_it_is_there(
    chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever heard of a failure would submit it again, and under a minted id it would run twice."""

    async def refused(account: object) -> None:
        raise lf.StoreFullError(None, None, "no room")

    store = lf.MemoryEventStore()
    monkeypatch.setattr(store.recoveries, "put", refused)
    async with lf.WorkflowRuntime(store) as rt:
        handle = await rt.submit(short, 0.5, execution_id="x" if chosen else None)
    assert await store.last_sequence(handle.execution_id) == 0


async def test_a_submission_that_does_not_fit_is_refused_and_not_written(open_store: OpenStore) -> None:
    def positive(value: Any) -> None:
        if not value > 0:
            raise ValueError("must be above 0")

    @lf.flow(input=positive)
    async def strict(ctx: lf.WorkflowContext, input: Any) -> None: ...

    async with open_store() as store:
        async with lf.WorkflowRuntime(store) as rt:
            with pytest.raises(lf.InputValidationError):
                await rt.submit(strict, -1, execution_id="x")
            assert await store.last_sequence("x") is None
            handle = await rt.submit(strict, 1, execution_id="x")
            assert handle.execution_id == "x"
            account = await store.recoveries.get("x")
            assert account is not None
            assert (account.crashes, account.orderly) == (0, True)
        with pytest.raises(lf.RuntimeClosedError):
            await rt.submit(strict, 1)


@pytest.mark.parametrize("lease_ttl_s", [None, 3.0])
def test_what_is_answered_without_its_code_is_driven_on_by_a_worker_only_and_counts_no_crash(
    lease_ttl_s: float | None,
) -> None:
    async def main() -> None:
        store = memory_store()
        names = [f"a{n}" for n in range(20)]
        once = {"max_crashes": 1}
        async with node(store, 9, lease_ttl_s=lease_ttl_s) as client:
            async with worker(store, 1, runtime=once) as one, worker(store, 2, runtime=once) as two:
                for name in names:
                    await (await one.runtime.start(approved, execution_id=name)).rest()
                handles = [await client.answer(name, "ok", 1, resume_id="click") for name in names]
                for name in names:
                    await client.answer(name, "ok", 1, resume_id="click")
                    with pytest.raises(lf.GateRefusedError):
                        await client.answer(name, "ok", 2)
                assert not any(client.drives(name) for name in names)
                async with asyncio.timeout(MINUTE):
                    assert [await handle.result() for handle in handles] == [[1, name] for name in names]
                assert (one.health().failing, two.health().failing) == (0, 0)
                assert now_s() < 7, "the next sweep takes it up"
            assert await client.set_aside() == []
        assert work.done == dict.fromkeys(names, 1)
        for name in names:
            assert await store.recoveries.get(name) is None
            assert of(await store.read(name), "ok", "EXECUTION_RESUMED") == ["ok", "EXECUTION_RESUMED"]

    virtually(main)


async def test_an_answer_reaches_its_worker_through_any_store(open_store: OpenStore) -> None:
    async with open_store() as store:
        async with lf.WorkflowRuntime(store, lease_ttl_s=30) as gone:
            await (await gone.start(approved, execution_id="x")).rest()
        app = lf.App([approved], options={"max_crashes": 1})
        async with lf.WorkflowRuntime(store, lease_ttl_s=30) as client, lf.Worker(store, app, sweep_s=0.05):
            handle = await client.answer("x", "ok", {"by": "Ann"})
            assert await handle.result() == [{"by": "Ann"}, "x"]
        assert work.done == {"x": 1}
