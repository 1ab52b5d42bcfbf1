"""`TimerService`: what sleeps wakes at its time, once, over any number of nodes (F12, F17, F40)."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

import loomfast as lf
from loomfast._nodes.due import PAGE
from loomfast.testing import VirtualClock
from loomfast.testing.time import START_MS
from tests.conftest import OpenStore
from tests.nodes.harness import DAY, MINUTE, Lost, Tokens, memory_store, node, now_s, virtually
from tests.runtime.harness import kinds, of, turns

# What a look may be late for the sake of those that follow each other closely.
LATE_S = 0.006

effects: list[tuple[str, float]] = []


@pytest.fixture(autouse=True)
def no_effects() -> None:
    effects.clear()


@lf.step
async def noted(name: str) -> str:
    effects.append((name, now_s()))
    return name


@lf.flow
async def sleeper(ctx: lf.WorkflowContext, seconds: float) -> str:
    await ctx.sleep(seconds)
    return await ctx.run(noted, ctx.execution_id)


@lf.flow
async def stranger(ctx: lf.WorkflowContext, seconds: float) -> None:
    await ctx.sleep(seconds)


async def parked(rt: lf.WorkflowRuntime, execution_id: str, seconds: float) -> lf.ExecutionHandle:
    handle = await rt.start(sleeper, seconds, execution_id=execution_id)
    await handle.rest()
    return handle


async def asleep(store: lf.EventStore, execution_id: str, seconds: float, flow: Any = sleeper) -> None:
    """Park an execution by a process that is gone afterwards."""
    async with node(store, 99, flow) as rt:
        await (await rt.start(flow, seconds, execution_id=execution_id)).rest()


@pytest.mark.parametrize("seconds", [0, 0.001, 0.75, 7.5, 90.25])
def test_what_is_parked_here_wakes_at_its_time(seconds: float) -> None:
    async def main() -> None:
        async with node(memory_store(), 1, sleeper) as rt, lf.TimerService(rt):
            handle = await parked(rt, "a", seconds)
            await handle.result()
            [(_, woke_s)] = effects
            assert seconds <= woke_s <= seconds + LATE_S

    virtually(main)


def test_each_of_many_wakes_at_its_own_time_whatever_order_they_were_parked_in() -> None:
    async def main() -> None:
        async with node(memory_store(), 1, sleeper) as rt, lf.TimerService(rt):
            due = {f"e{n}": (n * 37 % 101) / 10 for n in range(101)}
            handles = [await parked(rt, name, seconds) for name, seconds in due.items()]
            await asyncio.gather(*(handle.result() for handle in handles))
            assert len(effects) == len(due)
            for name, woke_s in effects:
                assert due[name] <= woke_s <= due[name] + LATE_S

    virtually(main)


def test_what_another_process_parked_is_seen_within_a_poll_and_woken_at_its_time() -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 1, sleeper) as rt, lf.TimerService(rt, poll_s=0.5):
            await asyncio.sleep(10)
            await asleep(store, "late", 0.1)
            await asleep(store, "soon", 2.25)
            await rt.handle("soon").result()
            woke = dict(effects)
            assert 10.1 <= woke["late"] <= 10.6 + LATE_S
            assert 12.25 <= woke["soon"] <= 12.25 + LATE_S

    virtually(main)


def test_what_slept_through_its_time_wakes_at_once_and_once_when_a_process_comes_back() -> None:
    """F17: a passed due time is made up for; one that has not come is kept."""

    async def main() -> None:
        store = memory_store()
        await asleep(store, "passed", 2)
        await asleep(store, "ahead", 60)
        await asyncio.sleep(5)
        async with node(store, 1, sleeper) as rt, lf.TimerService(rt):
            await rt.handle("passed").result()
            assert effects == [("passed", 5.0)]
            await rt.handle("ahead").result()
        assert [name for name, _ in effects] == ["passed", "ahead"]
        assert 60 <= effects[1][1] <= 60 + LATE_S

    virtually(main)


def test_a_sleep_beside_a_step_keeps_its_due_time_when_its_node_dies_before() -> None:
    """F40: `sleep(300)` beside a step; recovered at minute 3, due at minute 5 all the same, one firing."""
    runs = []

    @lf.flow
    async def beside(ctx: lf.WorkflowContext, input: Any) -> str:
        runs.append(now_s())
        await ctx.run(noted, "before")
        await ctx.sleep(5 * MINUTE)
        return await ctx.run(noted, "after")

    async def main() -> None:
        store = memory_store()
        async with node(store, 1, beside) as rt:
            await (await rt.start(beside, execution_id="b")).rest()
            await asyncio.sleep(3 * MINUTE)
        async with node(store, 2, beside) as rt, lf.TimerService(rt):
            assert await rt.recover_abandoned() == []
            handle = await rt.recover("b")  # at rest: left as it is
            assert await handle.result() == "after"
        assert [name for name, _ in effects] == ["before", "after"]
        assert 5 * MINUTE <= effects[1][1] <= 5 * MINUTE + LATE_S
        assert len(of(await store.read("b"), "EXECUTION_RESUMED")) == 1

    virtually(main)


def test_a_sleep_of_400_days_is_no_matter() -> None:
    """F40: longer than a 32-bit timer of milliseconds holds."""

    async def main() -> None:
        async with node(memory_store(), 1, sleeper) as rt, lf.TimerService(rt, poll_s=3600):
            await parked(rt, "long", 400 * DAY)
            await asyncio.sleep(400 * DAY + 1)  # a handle would look at the store four times a second
            assert 400 * DAY <= effects[0][1] <= 400 * DAY + LATE_S

    virtually(main)


def test_the_timer_of_what_has_ended_never_fires_and_is_listed_nowhere() -> None:
    """F40, F12: cancelled, or answered before its time."""

    @lf.flow
    async def asks(ctx: lf.WorkflowContext, input: Any) -> Any:
        return await ctx.suspend("answer", wake_at=START_MS + 60_000)

    async def main() -> None:
        store = memory_store()
        async with node(store, 1, sleeper, asks) as rt, lf.TimerService(rt):
            await parked(rt, "cancelled", 60)
            await (await rt.start(asks, execution_id="answered")).rest()
            assert len(await store.timers.due_wakes(START_MS + 60_000)) == 2
            await rt.cancel("cancelled")
            await (await rt.resume("answered", "answer", 7)).result()
            assert await store.timers.due_wakes(2**62) == []
            lengths = [await store.last_sequence(name) for name in ("cancelled", "answered")]
            await asyncio.sleep(120)
            assert [await store.last_sequence(name) for name in ("cancelled", "answered")] == lengths
        assert effects == []

    virtually(main)


def test_a_gate_that_nobody_answers_in_time_gets_null() -> None:
    @lf.flow
    async def asks(ctx: lf.WorkflowContext, input: Any) -> Any:
        return [await ctx.suspend("answer", wake_at=START_MS + 1_500), now_s()]

    async def main() -> None:
        async with node(memory_store(), 1, asks) as rt, lf.TimerService(rt):
            answer, woke_s = await (await rt.start(asks, execution_id="a")).result()
            assert answer is None
            assert 1.5 <= woke_s <= 1.5 + LATE_S

    virtually(main)


def test_a_timeout_of_a_gate_is_recorded_once_and_restarts_do_not_move_it() -> None:
    @lf.flow
    async def asks(ctx: lf.WorkflowContext, input: Any) -> Any:
        await ctx.run(noted, "run")
        return [await ctx.suspend("answer", timeout_s=300), now_s()]

    async def main() -> None:
        store = memory_store()
        async with node(store, 1, asks) as rt:
            state = await (await rt.start(asks, execution_id="a")).rest()
            assert state.pending is not None
            assert state.pending.wake_at == START_MS + 300_000
        await asyncio.sleep(3 * MINUTE)
        async with node(store, 2, asks) as rt, lf.TimerService(rt):
            answer, woke_s = await rt.handle("a").result()
            assert answer is None
            assert 300 <= woke_s <= 300 + LATE_S

    virtually(main)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": -1}, r"suspend\('x', timeout_s=-1\): must be a number of seconds, 0 or more"),
        ({"timeout_s": float("inf")}, "must be a number of seconds"),
        ({"timeout_s": "5"}, "must be a number of seconds"),
        ({"timeout_s": 1e15}, "ends beyond the year 9999"),
        ({"timeout_s": 1, "wake_at": 1}, "either timeout_s or wake_at, not both"),
        ({"wake_at": 1.5}, "wake_at, in milliseconds since the epoch, must be a whole number"),
    ],
)
async def test_a_bad_due_time_is_refused_by_its_name(options: dict[str, Any], message: str) -> None:
    @lf.flow
    async def asks(ctx: lf.WorkflowContext, input: Any) -> Any:
        with pytest.raises(lf.BadInputError, match=message):
            await ctx.suspend("x", **options)
        return "refused"

    async with lf.WorkflowRuntime(lf.MemoryEventStore()) as rt:
        assert await (await rt.start(asks)).result() == "refused"


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("leases", ["the runtime's", "the service's"])
def test_with_leases_a_wake_is_driven_once_over_three_nodes(seed: int, leases: str) -> None:
    """F40: and whoever cannot claim it leaves it alone."""

    async def main() -> None:
        store = memory_store()
        names = [f"e{n}" for n in range(5)]
        for name in names:
            await asleep(store, name, 1)
        ours = {"lease_ttl_s": 5.0} if leases == "the runtime's" else {}
        theirs = {} if ours else {"leases": store.leases, "lease_ttl_s": 5.0}
        nodes = [node(store, number, sleeper, **ours) for number in range(3)]
        errors: list[Any] = []
        services = [
            lf.TimerService(rt, fenced=True, on_error=lambda *error: errors.append(error), **theirs)
            for rt in nodes
        ]
        for service in services:
            await service.__aenter__()
        assert [await nodes[0].handle(name).result() for name in names] == names
        for service, rt in zip(services, nodes, strict=True):
            await service.close()
            await rt.close()
        assert sorted(name for name, _ in effects) == names
        assert errors == []
        for name in names:
            assert len(of(await store.read(name), "EXECUTION_RESUMED")) == 1
            assert await store.leases.get(name) is None

    virtually(main, seed=seed)


def test_without_leases_a_fenced_wake_is_driven_at_least_once_and_its_gate_passed_once() -> None:
    """ADR 0103, open residual: who comes second fences out who came first, behind its effect."""

    class Slow(Tokens):
        """Gives out the first fence once both have looked, the second once the first node's effect runs."""

        async def acquire_fence(self, execution_id: str, *, lease: lf.Lease | None = None) -> int:
            asked.append(execution_id)
            if len(asked) == 1:
                await both.wait()
            else:
                both.set()
                await ran.wait()
            return await super().acquire_fence(execution_id, lease=lease)

    asked: list[str] = []
    both, ran = asyncio.Event(), asyncio.Event()

    @lf.step
    async def paid() -> int:
        effects.append(("paid", now_s()))
        ran.set()
        await asyncio.sleep(1)
        return len(effects)

    @lf.flow
    async def pays(ctx: lf.WorkflowContext, input: Any) -> int:
        await ctx.sleep(1)
        return await ctx.run(paid)

    async def main() -> None:
        store = Slow()
        async with node(store, 1, pays) as first, node(store, 2, pays) as second:
            await (await first.start(pays, execution_id="p")).rest()
            await asyncio.sleep(1)
            one, other = (lf.TimerService(rt, fenced=True) for rt in (first, second))
            assert sorted(await asyncio.gather(one.fire("p"), other.fire("p"))) == [False, True]
            assert await second.handle("p").result() == 2
            log = await store.read("p")
        assert len(effects) == 2, "at least once per wake: the effect was paid for twice"
        assert store.fences == [1, 2]
        assert len(of(log, "EXECUTION_RESUMED")) == 1
        assert len(of(log, "STEP_COMPLETED")) == 1

    virtually(main)


def test_what_cannot_go_on_hides_nothing_and_is_tried_again_after_longer_and_longer_pauses() -> None:
    """F15: many executions of a flow that is not known here are due, and one that is behind them all."""
    stuck = [f"s{n}" for n in range(PAGE + 20)]

    async def main() -> None:
        store = memory_store()
        for name in stuck:
            await asleep(store, name, 1, stranger)
        await asyncio.sleep(1)
        await asleep(store, "good", 1)
        errors: list[tuple[str, Exception, float]] = []
        async with (
            node(store, 1, sleeper) as rt,
            lf.TimerService(rt, on_error=lambda name, error: errors.append((name, error, now_s()))),
        ):
            assert await rt.handle("good").result() == "good"
            await asyncio.sleep(60)
            tries = [at_s for name, _, at_s in errors if name == "s0"]
            assert {name for name, _, _ in errors} == set(stuck)
            assert all(isinstance(error, lf.UnknownFlowError) for _, error, _ in errors)
            for (before, now), pause_s in zip(pairwise(tries), (1, 2, 4, 8, 16), strict=False):
                assert pause_s <= now - before <= pause_s + 1 + LATE_S
            assert len(tries) in (5, 6)
            rt.register(stranger)
            await rt.handle("s0").result()

    virtually(main)


def test_a_store_that_cannot_be_read_is_asked_again() -> None:
    async def main() -> None:
        store = Lost()
        async with node(store, 1, sleeper) as rt, lf.TimerService(rt):
            handle = await parked(rt, "a", 5)
            store.lost = True
            await asyncio.sleep(10)
            assert effects == []
            store.lost = False
            await handle.result()
            assert 10 < effects[0][1] < 41

    virtually(main)


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_clock_that_is_set_wakes_nothing_early_and_nothing_twice(minutes: int) -> None:
    """F40: never before its due time by the injected clock, and no minutes late for it either."""

    class Set(VirtualClock):
        offset_ms = 0

        def now_ms(self) -> int:
            return super().now_ms() + self.offset_ms

    async def main() -> None:
        clock = Set()
        store = lf.MemoryEventStore(now_ms=clock.now_ms)
        async with node(store, 1, sleeper, clock=clock) as rt, lf.TimerService(rt):
            handle = await parked(rt, "a", 600)
            await asyncio.sleep(300)
            clock.offset_ms = minutes * 60_000
            await handle.result()
            [(_, woke_s)] = effects
            due_s = 600 - minutes * 60 if minutes < 0 else 300
            assert due_s <= woke_s <= due_s + 1 + LATE_S

    virtually(main)


def test_closing_begins_nothing_more_and_what_was_woken_goes_on() -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 1, sleeper) as rt:
            handles = [await parked(rt, name, seconds) for name, seconds in (("a", 1), ("b", 2))]
            async with lf.TimerService(rt) as service:
                await asyncio.sleep(1)
                await turns(5)
            await service.close()
            assert await handles[0].result() == "a"
            await asyncio.sleep(10)
            assert [name for name, _ in effects] == ["a"]
            assert [wake.execution_id for wake in await store.timers.due_wakes(2**62)] == ["b"]

    virtually(main)


def test_a_tick_does_what_is_due_and_returns_once_it_is_durable() -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 1, sleeper) as rt:
            service = lf.TimerService(rt)
            await parked(rt, "now", 1)
            await parked(rt, "later", 100)
            await asyncio.sleep(1)
            await service.tick()
            assert "EXECUTION_RESUMED" in kinds(await store.read("now"))
            assert "EXECUTION_RESUMED" not in kinds(await store.read("later"))
            await service.close()

    virtually(main)


async def test_sleepers_wake_on_real_stores(open_store: OpenStore) -> None:
    async with open_store() as store:
        async with lf.WorkflowRuntime(store, lease_ttl_s=30) as rt, lf.TimerService(rt):

            @lf.flow
            async def naps(ctx: lf.WorkflowContext, input: Any) -> str:
                await ctx.sleep(0.05)
                await ctx.sleep(0.05)
                return "up"

            handles = [await rt.start(naps) for _ in range(20)]
            assert [await handle.result() for handle in handles] == ["up"] * 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"poll_s": 0}, "poll_s=0"),
        ({"poll_s": float("nan")}, "poll_s=nan"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"lease_ttl_s": -1.0}, "ttl_s=-1.0"),
    ],
)
async def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    store = lf.MemoryEventStore()
    async with lf.WorkflowRuntime(store) as rt:
        with pytest.raises(lf.BadInputError, match=message):
            lf.TimerService(rt, leases=store.leases, **options)


async def test_leases_are_held_in_one_place() -> None:
    store = lf.MemoryEventStore()
    async with lf.WorkflowRuntime(store, lease_ttl_s=1) as rt:
        with pytest.raises(lf.BadInputError, match="leave out the service's"):
            lf.TimerService(rt, leases=store.leases)


def test_a_service_is_entered_once() -> None:
    async def main() -> None:
        async with node(memory_store(), 1) as rt:
            service = lf.TimerService(rt)
            async with service:
                with pytest.raises(lf.BadInputError, match="make another"):
                    await service.__aenter__()
            with pytest.raises(lf.BadInputError, match="make another"):
                await service.__aenter__()
            assert asyncio.all_tasks() == {asyncio.current_task()}

    virtually(main)


def test_closing_goes_on_when_its_caller_is_cancelled() -> None:
    async def main() -> None:
        store = memory_store()
        async with node(store, 1, sleeper) as rt:
            service = await lf.TimerService(rt, leases=store.leases).__aenter__()
            closing = asyncio.create_task(service.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            await service.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}, "the loop, and whatever renews leases"

    virtually(main)
