"""Two dispatchers of one execution: in any order somebody drives it, and they take no turns (L12, L20)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from itertools import combinations
from pathlib import Path
from typing import TypeAlias

import pytest

import loomfast as lf
from loomfast._nodes import attempts
from loomfast.testing import VirtualClock, run_virtual
from tests.conftest import OpenStore
from tests.nodes.racing import (
    Effects,
    Node,
    Script,
    ScriptClock,
    check_whole,
    outcomes,
    slowness,
    virtual_node,
    virtual_sqlite,
)
from tests.runtime.harness import runtime
from tests.stores.stacks import STACKS

OpenVirtual: TypeAlias = Callable[[], contextlib.AbstractAsyncContextManager[lf.EventStore]]

VERBS = ("fence", "look", "write")


def orders() -> list[tuple[str, ...]]:
    """Every order in which two nodes can fence, look and write."""
    found = []
    for places in combinations(range(6), 3):
        one, two = iter(VERBS), iter(VERBS)
        found.append(tuple(f"A.{next(one)}" if place in places else f"B.{next(two)}" for place in range(6)))
    return found


async def race(
    store: lf.EventStore,
    execution_id: str,
    order: tuple[str, ...],
    stack: Callable[[lf.EventStore], lf.EventStore] = lambda inner: inner,
) -> tuple[list[lf.Dispatched], int]:
    """Dispatch once from each of two nodes, in this order, and return how often the effect ran.

    It lasts until the other dispatch is decided, or has it run too.
    """
    script = Script(*order)

    async def lasts() -> None:
        while not script.gone and effects.runs < 2:
            await asyncio.sleep(0)

    effects = Effects(lasts)

    async def dispatched(name: str) -> lf.Dispatched:
        async with runtime(stack(Node(store, name, script)), clock=ScriptClock(script)) as rt:
            dispatcher = lf.LocalDispatcher(lf.LocalWorkerRuntime(rt), max_attempts=3)
            outcome = await dispatcher.dispatch(lf.Dispatch(execution_id, effects.flow))
            script.done(name)
            return outcome

    return list(await asyncio.gather(dispatched("A"), dispatched("B"))), effects.runs


def takes_over(order: tuple[str, ...]) -> bool:
    return order[:3] in (("A.fence", "A.look", "A.write"), ("B.fence", "B.look", "B.write"))


def check_decided(order: tuple[str, ...], both: list[lf.Dispatched]) -> None:
    """One brings it to rest. Who was fenced out in the middle may hear of that, or of the rest, first."""
    decided = outcomes(both)
    assert decided == ["rested", "superseded"] or (takes_over(order) and decided == ["rested"] * 2), order


async def test_in_no_order_of_a_racing_first_dispatch_is_a_live_runner_fenced_out_with_nobody_driving(
    open_store: OpenStore,
) -> None:
    """L12: of 20 orders, 18 are decided before anything runs; in 2 the second takes over what runs."""
    async with open_store() as store:
        runs = []
        for order in orders():
            both, ran = await race(store, "-".join(order), order)
            check_decided(order, both)
            assert ran == (2 if takes_over(order) else 1), order
            await check_whole(store, "-".join(order))
            runs.append(ran)
        assert runs.count(1) == 18


@pytest.mark.parametrize("stack", ["coalescing, rejecting all", "tenant over coalescing", "replica"])
async def test_behind_decorators_of_their_own_it_is_the_same(stack: str) -> None:
    async with lf.MemoryEventStore() as store:
        for order in orders():
            both, ran = await race(store, "-".join(order), order, STACKS[stack])
            check_decided(order, both)
            assert ran <= 2, order


# --- the ping-pong -------------------------------------------------------------------------------

REFUSED_BEFORE_ANYTHING_IS_WRITTEN = (
    *("A.fence", "B.fence", "A.look", "A.write", "A.read", "A.write", "A.read"),
    *("B.look", "B.write"),
)
LOST_AT_THE_BOOTSTRAP = ("A.fence", "A.look", "B.fence", "B.look", "B.write", "A.write")
FENCED_OUT_IN_THE_MIDDLE = ("A.fence", "A.look", "A.write", "B.fence", "B.look", "B.write")


@contextlib.asynccontextmanager
async def memory() -> AsyncIterator[lf.EventStore]:
    yield lf.MemoryEventStore(now_ms=lambda: VirtualClock().now_ms())


@pytest.fixture(params=["memory", "sqlite"])
def open_virtual(request: pytest.FixtureRequest, tmp_path: Path) -> OpenVirtual:
    """Open an empty store under virtual time."""
    return memory if request.param == "memory" else lambda: virtual_sqlite(tmp_path / "events.db")


async def ping_pong(
    open_virtual: OpenVirtual, order: tuple[str, ...]
) -> tuple[list[lf.Dispatched], int, int]:
    """Two dispatchers that try three times; the effect lasts until somebody fences, or for a minute.

    Return the outcomes, the number of fences, and how often the effect ran.
    """
    async with open_virtual() as store:
        script = Script(*order)
        nodes = [Node(store, name, script) for name in "AB"]

        def fences() -> int:
            return sum(len(node.fences) for node in nodes)

        async def lasts() -> None:
            before, minute = fences(), asyncio.get_running_loop().time() + 60
            while fences() == before and asyncio.get_running_loop().time() < minute:
                await asyncio.sleep(0.01)

        effects = Effects(lasts)

        async def dispatched(node: Node, seed: int) -> lf.Dispatched:
            async with virtual_node(node, seed, max_crashes=9) as rt:
                dispatcher = lf.LocalDispatcher(lf.LocalWorkerRuntime(rt), max_attempts=3)
                outcome = await dispatcher.dispatch(lf.Dispatch("x", effects.flow))
                script.done(node.name)
                return outcome

        both = await asyncio.gather(dispatched(nodes[0], 1), dispatched(nodes[1], 2))
        await check_whole(store, "x")
        return list(both), fences(), effects.runs


def test_two_retrying_dispatchers_do_not_fence_each_other_out_in_turn(open_virtual: OpenVirtual) -> None:
    """L20: one effect, where there were five, and two fences, where there were six."""
    (one, two), fences, ran = run_virtual(ping_pong(open_virtual, LOST_AT_THE_BOOTSTRAP))
    assert (one.outcome, one.attempts, type(one.error)) == ("superseded", 1, lf.ExecutionAlreadyExistsError)
    assert (two.outcome, two.attempts, two.error) == ("rested", 1, None)
    assert two.state is not None
    assert two.state.output == "charged"
    assert (fences, ran) == (2, 1)


def test_one_that_was_fenced_out_in_the_middle_is_superseded_too(open_virtual: OpenVirtual) -> None:
    """L20: who takes over has the effect run a second time, and that is all."""
    (one, two), fences, ran = run_virtual(ping_pong(open_virtual, FENCED_OUT_IN_THE_MIDDLE))
    assert (one.outcome, one.attempts, type(one.error)) == ("superseded", 1, lf.StorageWriteError)
    assert isinstance(one.error, lf.StorageWriteError)
    assert isinstance(one.error.__cause__, lf.StaleFenceError)
    assert (two.outcome, two.attempts) == ("rested", 1)
    assert (fences, ran) == (2, 2)


@pytest.mark.parametrize(
    ("order", "ran"), [(LOST_AT_THE_BOOTSTRAP, 5), (FENCED_OUT_IN_THE_MIDDLE, 6)], ids=["lost", "fenced out"]
)
def test_tried_again_all_the_same_they_fence_each_other_out_until_no_attempt_is_left(
    order: tuple[str, ...], ran: int, open_virtual: OpenVirtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the rule is for: without it the tests above fail, as the record says."""

    async def nothing(allocation: lf.Allocation) -> None:
        pass

    monkeypatch.setattr(attempts, "superseded", lambda error, execution_id: False)
    monkeypatch.setattr(lf.Allocation, "check", nothing)
    both, fences, runs = run_virtual(ping_pong(open_virtual, order))
    assert outcomes(both) == ["failed", "rested"]
    assert [one.attempts for one in both] == [3, 3]
    assert (fences, runs) == (6, ran)


def test_a_start_that_was_fenced_out_by_one_who_was_only_slow_is_superseded(
    open_virtual: OpenVirtual,
) -> None:
    """L20: it may be tried again, but whoever has started it meanwhile must not be fenced out by that."""
    (one, two), fences, ran = run_virtual(ping_pong(open_virtual, REFUSED_BEFORE_ANYTHING_IS_WRITTEN))
    assert (one.outcome, one.attempts, type(one.error)) == ("superseded", 2, lf.StaleFenceError)
    assert (two.outcome, two.attempts) == ("rested", 1)
    assert (fences, ran) == (2, 1)


def test_without_that_look_it_would_be_fenced_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(allocation: lf.Allocation) -> None:
        pass

    monkeypatch.setattr(lf.Allocation, "check", nothing)
    _, fences, ran = run_virtual(ping_pong(memory, REFUSED_BEFORE_ANYTHING_IS_WRITTEN))
    assert (fences, ran) == (3, 2)


# --- any interleaving ----------------------------------------------------------------------------


async def contest(
    open_virtual: OpenVirtual, seed: int, lease_ttl_s: float | None, *, nodes: int = 3, apart: bool = True
) -> tuple[list[lf.Dispatched], int, int]:
    """Some nodes dispatch one execution at about the same time, each at its own pace.

    Return the outcomes, how often the effect ran, and how many have fenced what had started already.
    """
    draw = random.Random(seed)
    late = [0]

    class Noting(Node):
        async def acquire_fence(self, execution_id: str, *, lease: lf.Lease | None = None) -> int:
            token = await super().acquire_fence(execution_id, lease=lease)
            late[0] += await self.inner.last_sequence(execution_id) is not None
            return token

    async with open_virtual() as store:
        effects = Effects(lambda: asyncio.sleep(1))

        async def dispatched(number: int) -> lf.Dispatched:
            node = Noting(store, f"{number}", Script(), slowness(seed * 10 + number))
            await asyncio.sleep(draw.choice((0, 0, 0.01, 0.03)) if apart else 0)
            async with virtual_node(node, seed * 10 + number, lease_ttl_s=lease_ttl_s) as rt:
                dispatcher = lf.LocalDispatcher(lf.LocalWorkerRuntime(rt), max_attempts=3)
                return await dispatcher.dispatch(lf.Dispatch("x", effects.flow))

        found = await asyncio.gather(*map(dispatched, range(nodes)))
        await check_whole(store, "x")
        return list(found), effects.runs, late[0]


def test_with_leases_the_effect_runs_once_in_any_interleaving() -> None:
    for seed in range(1, 301):
        found, ran, late = run_virtual(contest(memory, seed, 5.0), seed=seed)
        assert outcomes(found) == ["rested", "superseded", "superseded"], seed
        assert (ran, late) == (1, 0), seed


def test_without_leases_it_runs_once_too_unless_somebody_takes_over_what_runs() -> None:
    ran_once = 0
    for seed in range(1, 601):
        at_once = seed > 200
        found, ran, late = run_virtual(
            contest(memory, seed, None, nodes=2 if at_once else 3, apart=not at_once), seed=seed
        )
        # One that was fenced out, and looks only when the other is done, has seen it rest.
        assert "rested" in outcomes(found), seed
        assert {"rested", "superseded"} >= set(outcomes(found)), seed
        assert 1 + (late > 0) <= ran <= 1 + late, seed  # of two who take over at once, one
        ran_once += ran == 1
    assert 200 < ran_once < 600


def test_on_sqlite_it_is_the_same(tmp_path: Path) -> None:
    for seed in range(1, 21):
        for lease_ttl_s in (None, 5.0):
            path = tmp_path / f"{seed}-{lease_ttl_s}.db"
            found, ran, late = run_virtual(
                contest(lambda path=path: virtual_sqlite(path), seed, lease_ttl_s), seed=seed
            )
            assert "rested" in outcomes(found), seed
            assert {"rested", "superseded"} >= set(outcomes(found)), seed
            assert 1 + (late > 0) <= ran <= 1 + late, seed
            assert not (late and lease_ttl_s), seed
