"""Loading states: warm or cold, the answer is the store's."""

from __future__ import annotations

from typing import Any

import loomfast as lf
from loomfast._runtime.loading import LONG_LOG, StateLoader
from tests.conftest import OpenStore
from tests.runtime.harness import runtime


@lf.flow
async def session(ctx: lf.WorkflowContext, input: Any) -> Any:
    said = []
    while len(said) < input:
        said.append(await ctx.suspend("say"))
        for n in range(3):
            ctx.emit("heard", [len(said), n])
    return said


async def long_session(rt: lf.WorkflowRuntime, events: int) -> lf.ExecutionHandle:
    """A parked session with so many events at least."""
    handle = await rt.start(session, events)
    while (await handle.rest()).sequence + 1 < events:
        await rt.resume(handle.execution_id, "say")
    return handle


async def test_what_others_append_is_seen_although_the_state_is_warm(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store, session) as one, runtime(store, session) as two:
        handle = await one.start(session, 4)
        await handle.rest()
        for turn, rt in enumerate((one, two, one, two)):
            await rt.resume(handle.execution_id, "say", turn)
            await rt.handle(handle.execution_id).rest()
        assert await handle.result() == [0, 1, 2, 3]


async def test_a_turn_reads_what_is_new_and_not_the_whole_log_once_that_is_long() -> None:
    read: list[int] = []

    class Counting(lf.MemoryEventStore):
        async def fold(self, execution_id: str, state: lf.State | None = None) -> lf.State | None:
            folded = await super().fold(execution_id, state)
            if folded is not None:
                read.append(folded.sequence - (-1 if state is None else state.sequence))
            return folded

    async with runtime(Counting(), session) as rt:
        handle = await rt.start(session, 30)
        for turn in range(29):
            await handle.rest()
            read.clear()
            length = await rt.store.last_sequence(handle.execution_id)
            await rt.resume(handle.execution_id, "say", turn)
            assert length is not None
            assert read == ([0] if length + 1 >= LONG_LOG else [length + 1])


async def test_warm_states_are_bounded_by_their_size() -> None:
    store = lf.MemoryEventStore()
    async with runtime(store, session) as rt:
        loader = StateLoader(store, warm_entries=100)
        for _ in range(30):
            handle = await long_session(rt, LONG_LOG)
            await loader.load(handle.execution_id)
        assert 0 < loader._entries <= 100
        assert len(loader._warm) > 1
        assert loader._entries == sum(1 + len(s.gates) + len(s.emits) for s in loader._warm.values())
        assert handle.execution_id in loader._warm
        await rt.cancel(handle.execution_id)
        await loader.load(handle.execution_id)
        assert handle.execution_id not in loader._warm


async def test_warm_states_are_bounded_in_number_however_small_they_are() -> None:  # F37
    store = lf.MemoryEventStore()
    async with runtime(store, session) as rt:
        loader = StateLoader(store, warm_states=5)
        ids = []
        for _ in range(8):
            handle = await long_session(rt, LONG_LOG)
            ids.append(handle.execution_id)
            await loader.load(handle.execution_id)
        assert list(loader._warm) == ids[-5:]


async def test_a_state_of_a_short_log_is_not_kept() -> None:  # F37
    async with runtime(lf.MemoryEventStore(), session) as rt:
        for _ in range(20):
            handle = await rt.start(session, 3)
            await handle.rest()
            await rt.load_state(handle.execution_id)
        assert not rt._driven.states._warm
