"""Guarantee 2, of listings and folds: both say what the log says."""

from __future__ import annotations

from typing import Any, Final

import pytest

from loomfast import _events as ev
from loomfast._kernels import fold_events
from loomfast.testing.conformance._suite import Conformance, guarantee
from loomfast.testing.conformance.logs import event, log, step_started

# Event types and payloads, in log order; the status after each is compared with that of the folded state.
LIVES: Final[dict[str, list[tuple[str, Any]]]] = {
    "a gate, then the end": [
        ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}),
        ("note", None),
        ("go", 1),
        ("EXECUTION_RESUMED", {"gate": 0, "on": "go"}),
        ("EXECUTION_COMPLETED", {"output": 1}),
        ("note", None),
    ],
    "steps end while a gate is pending": [
        ("STEP_STARTED", step_started("a")),
        ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}),
        ("STEP_COMPLETED", {"key": "a", "output": 1}),
        ("EXECUTION_CANCELLED", {"reason": None}),
    ],
    "steps in doubt keep it suspended until the last is resolved": [
        ("STEP_STARTED", step_started("a")),
        ("STEP_STARTED", step_started("\ud800")),
        ("EFFECT_INDOUBT", {"key": "a"}),
        ("EFFECT_INDOUBT", {"key": "a"}),
        ("EFFECT_INDOUBT", {"key": "\ud800"}),
        ("STEP_COMPLETED", {"key": "other", "output": 1}),
        ("STEP_COMPLETED", {"key": "a", "output": 1}),
        ("SURFACE_PATCH", {"surface": "s", "op": "set", "path": "p", "value": 1}),
        ("STEP_STARTED", step_started("\ud800")),
        ("STEP_FAILED", {"key": "\ud800", "typed": False, "error": {"type": "E", "message": "m"}}),
        ("EXECUTION_FAILED", {"error": {"type": "E", "message": "m"}}),
    ],
    "a gate is passed while a step is in doubt": [
        ("EFFECT_INDOUBT", {"key": "a"}),
        ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}),
        ("go", 1),
        ("EXECUTION_RESUMED", {"gate": 0, "on": "go"}),
        ("DECISION_RECORDED", {"id": "d", "choice": 1}),
        ("STEP_CANCELLED", {"key": "a", "reason": None}),
        ("STREAM_CHUNK", {"channel": "c", "chunk": "t"}),
    ],
}


class ListingConformance(Conformance):
    """Listing executions, and folding them."""

    @guarantee(2)
    @pytest.mark.parametrize("at_once", [False, True], ids=["one at a time", "in one batch"])
    @pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
    async def test_the_listed_status_is_that_of_the_folded_state(
        self, life: list[tuple[str, Any]], at_once: bool
    ) -> None:
        events = [event("x", 0), *(event("x", n, kind, payload) for n, (kind, payload) in enumerate(life, 1))]
        async with self.open_store() as store:
            for some in [events] if at_once else [[one] for one in events]:
                await store.append_batch(some)
                state = await store.fold("x")
                assert state is not None
                [summary] = await store.list_executions()
                assert (summary.status, summary.last_sequence) == (state.status, state.sequence)
                assert summary.flow_id == state.flow_id
                assert await store.list_executions(status=state.status) == [summary]
                for other in set(ev.STATUSES) - {state.status}:
                    assert await store.list_executions(status=other) == []

    @guarantee(2)
    async def test_a_listing_is_paged_oldest_first(self) -> None:
        async with self.open_store() as store:
            for n in range(10):
                await store.append(event(f"x{n}", 0))
            await store.append(event("x3", 1, "EXECUTION_COMPLETED", {"output": None}))
            first = await store.list_executions(status="running", limit=4)
            rest = await store.list_executions(status="running", after=first[-1].position)
            assert [s.execution_id for s in first + rest] == [f"x{n}" for n in range(10) if n != 3]
            assert [s.execution_id for s in await store.list_executions(limit=2)] == ["x0", "x1"]

    @guarantee(2)
    async def test_a_fold_goes_on_from_any_state(self) -> None:
        async with self.open_store() as store:
            events = [event("x", 0), *(event("x", n, flowEmit=f"{n % 7:016x}") for n in range(1, 1_500))]
            await store.append_batch(events)
            whole = fold_events(None, events)
            for cut in (1, 700, 1_500):
                assert await store.fold("x", fold_events(None, events[:cut])) == whole
            assert await store.fold("unknown") is None

    @guarantee(2)
    async def test_a_page_of_a_listing_is_as_full_as_it_can_be(self) -> None:
        async with self.open_store() as store:
            for n in range(12):
                await store.append_batch(log(f"x{n}", 1 + n % 3))
            listed: list[str] = []
            after = 0
            while page := await store.list_executions(after=after, limit=5):
                assert len(page) == min(5, 12 - len(listed))
                listed += [summary.execution_id for summary in page]
                after = page[-1].position
            assert listed == [f"x{n}" for n in range(12)]
