"""What our own stores promise beyond the contract: order of calls, several loops, nothing left behind.

The contract itself is checked by the conformance kit (`test_conformance.py`).
"""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings

import pytest

from loomfast._errors import DuplicateSequenceError, StaleFenceError
from tests.conftest import OpenStore

from .logs import event, log


async def test_an_append_queued_behind_a_fence_is_judged_by_it(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append(event("x", 0))
        results = await asyncio.gather(
            store.append(event("x", 1)),
            store.acquire_fence("x"),
            store.append(event("x", 2)),
            store.append(event("x", 2, fence=1)),
            return_exceptions=True,
        )
        assert results[:2] == [None, 1]
        assert isinstance(results[2], StaleFenceError)
        assert results[3] is None


async def test_a_copy_and_the_appends_around_it_see_each_other(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append_batch(log("s", 3))
        results = await asyncio.gather(
            store.append(event("s", 3)),
            store.copy_prefix("s", "t", 3),
            store.append(event("t", 4)),
            store.append(event("t", 4)),
            store.copy_prefix("s", "t", 3),
            store.copy_prefix("t", "u", 4),
            store.append(event("u", 5)),
            return_exceptions=True,
        )
        assert [type(r) for r in results] == [
            *[type(None)] * 3,
            *[DuplicateSequenceError] * 2,
            *[type(None)] * 2,
        ]
        assert [p.position for p in await store.read_all()] == list(range(1, 16))
        assert (await store.read("u"))[1].metadata["forkOf"] == {"executionId": "t", "sequence": 4}


async def test_a_store_serves_several_event_loops_in_several_threads(open_store: OpenStore) -> None:
    async with open_store() as store:
        failures: list[BaseException] = []

        async def append_all(name: str) -> None:
            for one in log(name, 30):
                await store.append(one)
                await store.last_sequence(name)

        def in_a_loop_of_its_own(name: str) -> None:
            try:
                asyncio.run(append_all(name))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=in_a_loop_of_its_own, args=(f"t{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        await append_all("main")
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
        assert failures == []
        assert len(await store.read_all()) == 150


async def test_the_error_of_a_refused_append_is_freed_without_the_cycle_collector(
    open_store: OpenStore,
) -> None:
    async with open_store() as store:
        await store.append(event("x", 0))
        gc.collect()
        gc.disable()
        try:
            before = sum(isinstance(o, DuplicateSequenceError) for o in gc.get_objects())
            for _ in range(50):
                with pytest.raises(DuplicateSequenceError):
                    await store.append(event("x", 0))
                await asyncio.sleep(0)
            after = sum(isinstance(o, DuplicateSequenceError) for o in gc.get_objects())
        finally:
            gc.enable()
        assert after - before <= 2


async def test_closing_finishes_what_was_queued(open_store: OpenStore) -> None:
    async with open_store() as store:
        tasks = [asyncio.create_task(store.append_batch(log(f"x{n}", 100))) for n in range(20)]
        await asyncio.sleep(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert await asyncio.gather(*tasks) == [None] * 20
