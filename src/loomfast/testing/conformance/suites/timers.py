"""Guarantee 23: which gates are due."""

from __future__ import annotations

import pytest

from loomfast._core.snapshots import snapshot_of
from loomfast._errors import BadInputError, DuplicateSequenceError
from loomfast._kernels import fold_events
from loomfast.stores import Wake
from loomfast.testing.conformance._suite import Conformance, guarantee
from loomfast.testing.conformance.logs import event, log, parked

LATEST_MS = 2**63 - 1


class TimerConformance(Conformance):
    """Gates that a timer answers."""

    @guarantee(23)
    async def test_a_gate_is_due_from_its_time_on_and_not_before(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(parked("x", 1_000))
            assert await store.timers.due_wakes(999) == []
            assert await store.timers.due_wakes(1_000) == [Wake("x", 1_000)]
            assert await store.timers.due_wakes(LATEST_MS) == [Wake("x", 1_000)]

    @guarantee(23)
    @pytest.mark.parametrize(
        "ending",
        [
            [("go", None), ("EXECUTION_RESUMED", {"gate": 0, "on": "go"})],
            [("EXECUTION_CANCELLED", {"reason": None})],
            [("EXECUTION_COMPLETED", {"output": 1})],
            [("EXECUTION_FAILED", {"error": {"type": "E", "message": "m"}})],
        ],
        ids=lambda ending: ending[-1][0],
    )
    @pytest.mark.parametrize("at_once", [False, True], ids=["one at a time", "in one batch"])
    async def test_an_answer_or_an_end_takes_a_gate_off_the_list(
        self, ending: list[tuple[str, object]], at_once: bool
    ) -> None:
        """F40: an execution that is over has no timer."""
        async with self.open_store() as store:
            await store.append_batch(parked("other", 1_000))
            rest = [event("x", n, kind, payload) for n, (kind, payload) in enumerate(ending, 2)]
            if at_once:
                await store.append_batch([*parked("x", 1_000), *rest])
            else:
                await store.append_batch(parked("x", 1_000))
                assert await store.timers.due_wakes(1_000) == [Wake("other", 1_000), Wake("x", 1_000)]
                await store.append_batch(rest)
            assert await store.timers.due_wakes(LATEST_MS) == [Wake("other", 1_000)]

    @guarantee(23)
    async def test_what_comes_between_a_gate_and_its_answer_changes_nothing(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(parked("x", 1_000))
            await store.append_batch(
                [
                    event("x", 2, "note", 1),
                    event("x", 3, "SURFACE_PATCH", {"surface": "s", "op": "set", "path": "p", "value": 1}),
                    event("x", 4, "go", {"answer": 1}),
                ]
            )
            await store.acquire_fence("x")
            assert await store.timers.due_wakes(1_000) == [Wake("x", 1_000)]

    @guarantee(23)
    async def test_the_next_gate_has_its_own_time(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(parked("x", 1_000))
            await store.append_batch(
                [
                    event("x", 2, "go"),
                    event("x", 3, "EXECUTION_RESUMED", {"gate": 0, "on": "go"}),
                    event("x", 4, "EXECUTION_SUSPENDED", {"gate": 1, "on": "go", "wakeAt": 5_000}),
                ]
            )
            assert await store.timers.due_wakes(4_999) == []
            assert await store.timers.due_wakes(5_000) == [Wake("x", 5_000)]
            await store.append_batch(
                [
                    event("x", 5, "go"),
                    event("x", 6, "EXECUTION_RESUMED", {"gate": 1, "on": "go"}),
                    event("x", 7, "EXECUTION_SUSPENDED", {"gate": 2, "on": "go"}),
                ]
            )
            assert await store.timers.due_wakes(LATEST_MS) == []

    @guarantee(23)
    async def test_what_waits_for_nobody_or_for_no_time_is_never_due(self) -> None:
        async with self.open_store() as store:
            await store.append_batch([*log("running", 3), *parked("waiting", None)])
            await store.append_batch([event("doubt", 0), event("doubt", 1, "EFFECT_INDOUBT", {"key": "a"})])
            assert await store.timers.due_wakes(LATEST_MS) == []

    @guarantee(23)
    async def test_a_refused_append_sets_no_timer(self) -> None:
        async with self.open_store() as store:
            await store.append(event("taken", 0))
            with pytest.raises(DuplicateSequenceError):
                await store.append_batch([*parked("x", 1_000), event("taken", 0)])
            assert await store.timers.due_wakes(LATEST_MS) == []

    @guarantee(23)
    async def test_due_gates_are_paged_earliest_first_and_of_one_time_in_the_order_of_executions(
        self,
    ) -> None:
        async with self.open_store() as store:
            times = {f"x{n}": 1_000 * (1 + n * 7 % 4) for n in range(20)}
            for name, wake_at in times.items():
                await store.append_batch(parked(name, wake_at))
            expected = [
                Wake(name, wake_at) for name, wake_at in sorted(times.items(), key=lambda one: one[1])
            ]
            assert await store.timers.due_wakes(9_999) == expected
            for limit in (1, 3, 20, 21):
                read: list[Wake] = []
                while page := await store.timers.due_wakes(
                    9_999, after=read[-1] if read else None, limit=limit
                ):
                    assert len(page) <= limit
                    read += page
                assert read == expected
            early = [wake for wake in expected if wake.wake_at <= 2_000]
            assert await store.timers.due_wakes(2_000, after=early[3]) == early[4:]
            await store.append(event(early[3].execution_id, 2, "EXECUTION_CANCELLED", {"reason": None}))
            assert await store.timers.due_wakes(2_000, after=early[3]) == early[4:]  # though it is gone

    @guarantee(23)
    async def test_a_fork_parked_at_a_gate_wakes_as_its_source_does(self) -> None:
        async with self.open_store() as store:
            await store.append_batch(parked("x", 1_000))
            await store.append_batch(
                [event("x", 2, "go"), event("x", 3, "EXECUTION_RESUMED", {"gate": 0, "on": "go"})]
            )
            await store.copy_prefix("x", "parked", 1)
            await store.copy_prefix("x", "answered", 3)
            assert await store.timers.due_wakes(LATEST_MS) == [Wake("parked", 1_000)]

    @guarantee(23)
    async def test_a_cut_log_wakes_as_a_whole_one_does(self) -> None:
        async with self.open_store() as store:
            events = [
                *log("x", 8),
                event("x", 8, "EXECUTION_SUSPENDED", {"gate": 0, "on": "go", "wakeAt": 7}),
            ]
            await store.append_batch(events)
            await store.snapshots.save(snapshot_of(fold_events(None, events)))
            await store.truncate_prefix("x", 8)
            assert await store.timers.due_wakes(7) == [Wake("x", 7)]

    @guarantee(23)
    async def test_times_that_no_calendar_has_are_kept_in_order(self) -> None:
        """F40."""
        async with self.open_store() as store:
            await store.append_batch(parked("beyond", 2**80))
            await store.append_batch(parked("last", LATEST_MS - 1))
            await store.append_batch(parked("first", 0))
            assert [wake.execution_id for wake in await store.timers.due_wakes(LATEST_MS - 1)] == [
                "first",
                "last",
            ]

    @guarantee(23)
    async def test_pages_of_gates_that_cannot_be_are_refused(self) -> None:
        async with self.open_store() as store:
            for limit in (0, -1):
                with pytest.raises(BadInputError):
                    await store.timers.due_wakes(0, limit=limit)

    @guarantee(23, needs="restart")
    async def test_gates_are_due_after_a_restart(self) -> None:
        async with self.open_store() as store:
            await store.append_batch([*parked("x", 1_000), *parked("y", 1_000)])
            await store.append(event("y", 2, "EXECUTION_CANCELLED", {"reason": None}))
        async with self.open_store() as store:
            assert await store.timers.due_wakes(1_000) == [Wake("x", 1_000)]
