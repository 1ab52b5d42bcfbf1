"""Virtual time: what jumps, what keeps its order, what a seed repeats, and what is refused."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

import loomfast as lf
from loomfast.testing import (
    VirtualClock,
    VirtualTimeError,
    counted_ids,
    run_virtual,
    running_loop,
    seeded_entropy,
)

SEEDS = range(1, 30)


def test_a_day_passes_in_no_time_and_every_timer_is_due_at_its_moment() -> None:
    async def main() -> list[tuple[int, float]]:
        order = []

        async def nap(seconds: int) -> None:
            await asyncio.sleep(seconds)
            order.append((seconds, running_loop().time()))

        await asyncio.gather(*(nap(seconds) for seconds in (86_400, 1, 3600, 2)))
        return order

    began = time.monotonic()
    assert run_virtual(main()) == [(1, 1.0), (2, 2.0), (3600, 3600.0), (86_400, 86_400.0)]
    assert time.monotonic() - began < 60


def test_the_clock_shows_the_loops_time() -> None:
    async def main() -> list[int]:
        clock = VirtualClock()
        first = clock.now_ms()
        await clock.sleep(0.0015)
        second = clock.now_ms()
        await clock.sleep(10)
        return [first, second, clock.now_ms()]

    assert run_virtual(main(), start_ms=1_000) == [1_000, 1_001, 11_001]


async def woken(width: int) -> list[int]:
    order: list[int] = []
    signal = asyncio.Event()

    async def waits(n: int) -> None:
        await signal.wait()
        order.append(n)

    waiting = [asyncio.create_task(waits(n)) for n in range(width)]
    await asyncio.sleep(1)
    signal.set()
    await asyncio.wait(waiting)
    return order


def test_a_seed_shuffles_who_wakes_first_and_repeats_it() -> None:
    orders = [run_virtual(woken(5), seed=seed) for seed in SEEDS]
    assert orders == [run_virtual(woken(5), seed=seed) for seed in SEEDS]
    assert len({tuple(order) for order in orders}) > 15
    assert run_virtual(woken(5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_tasks_begin_and_callbacks_run_in_the_order_they_were_made(seed: int) -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def begins(n: int) -> None:
            order.append(n)
            await asyncio.sleep(0)
            order.append(n + 10)

        tasks = [asyncio.create_task(begins(n)) for n in range(5)]
        running_loop().call_soon(order.append, 5)
        await asyncio.gather(*tasks)
        return order

    assert run_virtual(main(), seed=seed) == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14]


def test_threads_take_no_virtual_time_and_answer_at_the_same_place_however_slow_they_are() -> None:
    def trace(pause_s: float) -> list[str]:
        async def main() -> list[str]:
            seen: list[str] = []

            async def branch(name: str) -> None:
                seen.append(f"{name} begins")
                await asyncio.to_thread(time.sleep, pause_s)
                seen.append(f"{name} at {running_loop().time()}")
                await asyncio.sleep(1)
                seen.append(f"{name} ends")

            await asyncio.gather(branch("a"), branch("b"), asyncio.sleep(0.5))
            return seen

        return run_virtual(main(), seed=4)

    assert trace(0) == trace(0.002) == trace(0.01)


def test_a_thread_may_call_into_the_loop_while_it_works() -> None:
    async def main() -> int:
        loop = running_loop()

        async def answer() -> int:
            await asyncio.sleep(0)
            return 42

        return await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(answer(), loop).result())

    assert run_virtual(main()) == 42


def test_outside_work_runs_one_piece_at_a_time_in_the_order_asked_for() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def piece(n: int) -> None:
            async with running_loop().outside():
                order.append(n)
                await asyncio.sleep(0)
                order.append(n)

        pieces = [asyncio.create_task(piece(n)) for n in range(4)]
        await asyncio.sleep(0)
        pieces[1].cancel()
        await asyncio.wait(pieces)
        return order

    assert run_virtual(main()) == [0, 0, 2, 2, 3, 3]


def test_waiting_for_what_can_never_happen_is_an_error() -> None:
    async def main() -> None:
        await running_loop().create_future()

    with pytest.raises(VirtualTimeError, match="can never happen"):
        run_virtual(main())


def test_a_call_from_a_thread_without_a_turn_is_refused() -> None:
    async def main() -> None:
        loop = running_loop()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(print,), name="stranger")
        thread.start()
        thread.join()
        await asyncio.sleep(1)

    with pytest.raises(VirtualTimeError, match="stranger"):
        run_virtual(main())


def test_sockets_are_refused() -> None:
    async def main() -> None:
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            await running_loop().sock_recv(one, 1)

    with pytest.raises(VirtualTimeError, match="socket"):
        run_virtual(main())


def test_only_a_virtual_loop_has_virtual_time() -> None:
    async def main() -> None:
        running_loop()

    with pytest.raises(VirtualTimeError, match="run_virtual"):
        asyncio.run(main())


def test_entropy_and_ids_are_repeatable() -> None:
    one, other = seeded_entropy(3), seeded_entropy(3)
    assert [one(16), one(7)] == [other(16), other(7)]
    assert seeded_entropy(4)(16) != seeded_entropy(3)(16)
    ids = counted_ids("run")
    assert [ids(), ids()] == ["run-1", "run-2"]


def test_a_runtime_waits_out_a_year_of_sleep_and_every_retry() -> None:
    @lf.step(retry=lf.RetryPolicy(max_attempts=5, initial_s=3600, max_s=86_400))
    def flaky(fx: lf.EffectContext) -> int:
        if fx.attempt < 5:
            raise OSError("again")
        return fx.attempt

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        await ctx.run(flaky)
        await ctx.sleep(365 * 86_400)
        return "woken"

    async def main() -> Any:
        clock = VirtualClock()
        async with lf.WorkflowRuntime(
            lf.MemoryEventStore(), clock=clock, executor=running_loop().executor()
        ) as runtime:
            handle = await runtime.start(flow)
            state = await handle.rest()
            assert state.pending is not None
            assert state.pending.wake_at is not None
            with pytest.raises(lf.GateRefusedError, match="not due"):
                await runtime.fire(handle.execution_id)
            await clock.sleep((state.pending.wake_at - clock.now_ms()) / 1000)
            return await (await runtime.fire(handle.execution_id)).result()

    assert run_virtual(main()) == "woken"
