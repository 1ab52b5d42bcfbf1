"""`verify_store`, on every store: what is whole passes, and what is not is named."""

from __future__ import annotations

import dataclasses

import pytest

import loomfast as lf
from loomfast import Fault, Verified, verify_store
from loomfast._core.snapshots import snapshot_of
from loomfast._kernels import fold_events
from loomfast.stores import ExecutionSummary, Wake
from loomfast.stores._memory_timers import MemoryTimerStore
from tests.conftest import OpenStore
from tests.stores.logs import event, log
from tests.stores.whole import fill, verify


async def test_a_whole_store_has_no_fault_and_everything_is_counted(open_store: OpenStore) -> None:
    async with open_store() as store:
        await fill(store)
        faults, counts = await verify(store)
        assert faults == []
        assert dataclasses.astuple(counts) == (8, 4 + 12 + 11 + 4 + 4 + 6 + 6 + 4, 6, 3, 0)


async def test_an_empty_store_is_whole(open_store: OpenStore) -> None:
    async with open_store() as store:
        assert await verify(store) == ([], Verified())


async def test_a_long_log_is_read_in_pages_and_progress_is_told(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loomfast.verification.PAGE", 3)
    told: list[int] = []
    async with open_store() as store:
        await fill(store)
        faults: list[Fault] = []
        counts = await verify_store(store, faults.append, progress=lambda counts: told.append(counts.events))
        assert faults == []
        assert told == sorted(told)
        assert len(told) > 20
        assert told[-1] == counts.events == 51


async def test_a_payload_that_is_not_json_is_a_fault_of_its_event(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append_batch([*log("x", 2), lf.Envelope("x", 2, "note", b"{", 0), *log("y", 1)])
        faults, _ = await verify(store)
        assert len(faults) == 1
        assert faults[0].startswith("execution 'x', sequence 2: not JSON at byte 1")


async def test_a_log_that_does_not_fold_is_a_fault(open_store: OpenStore) -> None:
    async with open_store() as store:
        resumed = event("x", 2, "EXECUTION_RESUMED", {"gate": 0, "on": "go"})
        await store.append_batch([*log("x", 2), resumed, event("x", 3)])
        faults, _ = await verify(store)
        assert faults == ["execution 'x', sequence 2: does not fold: payload.gate: gate 0 is not pending"]


async def test_a_snapshot_of_another_state_is_found_though_its_checksum_passes(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append_batch(log("x", 5))
        other = [*log("x", 2), event("x", 2, flowEmit="0" * 16), event("x", 3)]
        await store.snapshots.save(snapshot_of(fold_events(None, other)))
        faults, counts = await verify(store)
        assert faults == ["execution 'x', sequence 3: the snapshot is another state than the log folds to"]
        assert counts.snapshots == 1


async def test_a_decorator_passes_on_what_the_storage_finds_wrong_with_itself() -> None:
    class Ailing(lf.MemoryEventStore):
        async def check_storage(self) -> list[str]:
            return ["page 5 is gone"]

    for decorated in (lf.CoalescingEventStore(Ailing()), lf.TenantScopedEventStore(Ailing(), "acme")):
        async with decorated:
            assert (await verify(decorated))[0] == ["the store: page 5 is gone"]


class Circling(lf.MemoryEventStore):
    """Holds an index so damaged that what comes behind something is found no more: pages begin anew."""

    def __init__(self) -> None:
        super().__init__()
        self._timers = CirclingTimers(self._shared)
        self.lists = False

    async def list_executions(
        self, *, status: str | None = None, after: int = 0, limit: int = 100
    ) -> list[ExecutionSummary]:
        return await super().list_executions(status=status, after=0 if self.lists else after, limit=limit)


class CirclingTimers(MemoryTimerStore):
    async def due_wakes(self, at_ms: int, *, after: Wake | None = None, limit: int = 100) -> list[Wake]:
        lost = None if after is None else after._replace(execution_id="nowhere")
        return await super().due_wakes(at_ms, after=lost, limit=limit)


@pytest.mark.parametrize("page", [1, 2, 3, 1_000])
async def test_a_store_whose_pages_go_round_in_a_circle_is_verified_to_an_end(
    page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loomfast.verification.PAGE", page)
    async with Circling() as store:
        for n in range(5):
            gate = event(f"x{n}", 1, "EXECUTION_SUSPENDED", {"gate": 0, "on": "go", "wakeAt": 9})
            await store.append_batch([event(f"x{n}", 0), gate])
        faults, _ = await verify(store)
        assert any(fault.startswith("the store: the gates that are due lead back to") for fault in faults)
        store.lists = True
        faults, _ = await verify(store)
        assert any(fault.startswith("the store: the listing goes on from") for fault in faults)
