"""The guarantees 1 to 8 of the store contract, on every store. A comment names the guarantee.

9 and 10 are in `test_compaction.py`, 11 in `test_copying.py`, 12 to 15 in `test_snapshots.py`, 16 to 18 in
`test_branches.py`.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from typing import Any

import pytest

from loomfast import _events as ev
from loomfast._errors import (
    BadInputError,
    ConflictError,
    DuplicateSequenceError,
    MalformedEventError,
    StaleFenceError,
    StoreClosedError,
    UnsupportedTypeError,
)
from loomfast._kernels import Envelope, State, fold_events
from tests.conftest import OpenStore

from .logs import event, log

# --- 1: all or nothing, in order -----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 999, 1_000, 5_000, 40_000])
async def test_a_batch_of_any_size_is_stored_whole_and_in_order(open_store: OpenStore, size: int) -> None:
    async with open_store() as store:
        batch = log("x", size)
        await store.append_batch(batch)
        assert await store.read("x") == batch
        assert [p.event for p in await store.read_all(limit=size)] == batch


@pytest.mark.parametrize("size", [2, 5_000])
async def test_a_conflict_on_the_last_event_of_a_batch_leaves_none_of_it(
    open_store: OpenStore, size: int
) -> None:
    async with open_store() as store:
        await store.append(event("taken", 0))
        with pytest.raises(DuplicateSequenceError) as caught:
            await store.append_batch([*log("x", size - 1), event("taken", 0)])
        assert (caught.value.execution_id, caught.value.sequence) == ("taken", 0)
        assert await store.read("x") == []
        assert await store.last_sequence("x") is None
        assert len(await store.read_all()) == 1
        await store.append_batch(log("x", size))


async def test_a_batch_may_hold_several_executions_interleaved(open_store: OpenStore) -> None:
    async with open_store() as store:
        batch = [event("a", 0), event("b", 0), event("a", 1), event("b", 1)]
        await store.append_batch(batch)
        assert [p.event for p in await store.read_all()] == batch
        assert await store.read("b") == [batch[1], batch[3]]


async def test_a_batch_that_repeats_a_sequence_within_itself_is_refused_whole(open_store: OpenStore) -> None:
    async with open_store() as store:
        with pytest.raises(DuplicateSequenceError):
            await store.append_batch([event("x", 0), event("x", 1), event("x", 1)])
        assert await store.read("x") == []


async def test_an_empty_batch_is_no_append(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append_batch([])
        assert await store.read_all() == []


@pytest.mark.parametrize("sequence", [2, 7])
async def test_an_event_that_would_leave_a_gap_is_refused(open_store: OpenStore, sequence: int) -> None:
    async with open_store() as store:
        await store.append(event("x", 0))
        with pytest.raises(MalformedEventError) as caught:
            await store.append(event("x", sequence))
        assert (caught.value.execution_id, caught.value.sequence) == ("x", sequence)
        with pytest.raises(MalformedEventError):
            await store.append(event("fresh", 1))
        assert await store.last_sequence("x") == 0


# --- 2: what returned is seen by every later read ------------------------------------------------


async def test_an_append_that_returned_is_seen_by_every_kind_of_read(open_store: OpenStore) -> None:
    async with open_store() as store:
        for n in range(20):
            await store.append(event("x", n))
            assert (await store.read_from("x", n))[0].sequence == n
            assert await store.last_sequence("x") == n
            assert (await store.read_all(n))[0].position == n + 1
            assert (await store.list_executions())[0].last_sequence == n
            state = await store.fold("x")
            assert state is not None
            assert state.sequence == n


async def test_ranges_are_inclusive_and_may_lie_outside_the_log(open_store: OpenStore) -> None:
    async with open_store() as store:
        events = log("x", 10)
        await store.append_batch([*events, *log("y", 3)])
        assert await store.read_range("x", 2, 4) == events[2:5]
        assert await store.read_range("x", -5, 0) == events[:1]
        assert await store.read_range("x", 8, 2**40) == events[8:]
        assert await store.read_range("x", 5, 4) == []
        assert await store.read_range("x", 0, -1) == []
        assert await store.read_from("x", 10) == []
        assert await store.read_from("x", 2**32) == []
        assert await store.read("unknown") == []


# --- 3: one sequence, one event ------------------------------------------------------------------


async def test_of_many_appends_of_one_sequence_exactly_one_succeeds(open_store: OpenStore) -> None:
    async with open_store() as store:
        results = await asyncio.gather(
            *(store.append(event("x", 0)) for _ in range(50)), return_exceptions=True
        )
        assert results.count(None) == 1
        assert all(r is None or isinstance(r, DuplicateSequenceError) for r in results)
        assert len(await store.read("x")) == 1


async def test_a_conflict_rejects_only_the_caller_it_belongs_to(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append(event("x30", 0))
        results = await asyncio.gather(
            *(store.append_batch(log(f"x{n}", 3)) for n in range(64)), return_exceptions=True
        )
        assert [n for n, result in enumerate(results) if result is not None] == [30]
        assert isinstance(results[30], DuplicateSequenceError)
        assert len(await store.read_all()) == 1 + 63 * 3


async def test_sequence_numbers_repeat_across_executions(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append_batch([event("a", 0), event("a-0", 0), event("a-0-0", 0)])
        assert {p.event.id for p in await store.read_all()} == {"a-0", "a-0-0", "a-0-0-0"}


# --- 4 and 5: fences -----------------------------------------------------------------------------


async def test_a_missing_or_older_token_is_refused_once_a_fence_is_acquired(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append(event("x", 0))
        old, new = await store.acquire_fence("x"), await store.acquire_fence("x")
        for metadata, held in (({}, None), ({"fence": old}, old)):
            with pytest.raises(StaleFenceError) as caught:
                await store.append(event("x", 1, **metadata))
            assert (caught.value.execution_id, caught.value.fence, caught.value.current) == ("x", held, new)
        await store.append(event("x", 1, fence=new))
        await store.append(event("other", 0))


async def test_the_token_is_checked_before_the_slot_on_every_envelope(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append_batch(log("x", 2))
        await store.append(event("free", 0))
        token = await store.acquire_fence("x")
        with pytest.raises(StaleFenceError):
            await store.append(event("x", 0))
        with pytest.raises(DuplicateSequenceError):
            await store.append(event("x", 0, fence=token))
        with pytest.raises(StaleFenceError):
            await store.append_batch([event("free", 0), event("x", 2, fence=token), event("x", 3)])
        assert await store.last_sequence("x") == 1


async def test_an_execution_can_be_fenced_before_it_exists_and_is_then_not_listed(
    open_store: OpenStore,
) -> None:
    async with open_store() as store:
        token = await store.acquire_fence("early")
        assert await store.list_executions() == []
        assert await store.last_sequence("early") is None
        assert await store.read("early") == []
        assert await store.fold("early") is None
        await store.append(event("late", 0))
        with pytest.raises(StaleFenceError):
            await store.append(event("early", 0))
        await store.append(event("early", 0, fence=token))
        listed = await store.list_executions()
        assert [summary.execution_id for summary in listed] == ["late", "early"]
        assert await store.acquire_fence("early") == token + 1


async def test_tokens_of_one_execution_increase_strictly_under_concurrency(open_store: OpenStore) -> None:
    async with open_store() as store:
        tokens = await asyncio.gather(*(store.acquire_fence("x") for _ in range(40)))
        assert len(set(tokens)) == 40
        assert await store.acquire_fence("x") > max(tokens)
        assert await store.acquire_fence("y") < max(tokens)


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


# --- 6: events come back equal -------------------------------------------------------------------

TEXTS = [
    "plain",
    "a\x00b",
    "\ud800",
    "\udfff\ud800",
    "é\N{SNOWMAN}\U0001f600",
    "\x1e\x1f",
    "' OR 1=1 --",
    "1",
]
VALUES: list[Any] = [
    None,
    float("nan"),
    float("-inf"),
    -0.0,
    1e21,
    2**63,
    10**30,
    {"b": 1, "a": 2, "\udfff": 3, "": {}},
    [[], {}, "", "a\x00b", "\ud800"],
    *TEXTS,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
async def test_a_value_comes_back_equal_from_the_payload_and_the_metadata(
    open_store: OpenStore, value: Any
) -> None:
    async with open_store() as store:
        events = [event("x", 0), event("x", 1, "note", value, hint=value)]
        await store.append_batch(events)
        read = await store.read("x")
        assert read == events
        assert repr(read[1].payload) == repr(events[1].payload)
        assert repr(read[1].metadata) == repr(events[1].metadata)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
async def test_a_text_comes_back_equal_from_every_place_that_takes_one(
    open_store: OpenStore, text: str
) -> None:
    async with open_store() as store:
        events = [
            event(text, 0, "EXECUTION_STARTED", {"flowId": text, "flowVersion": text, "input": text}),
            event(text, 1, "STEP_STARTED", _step(text)),
            event(text, 2, "STEP_COMPLETED", {"key": text, "output": text}),
            event(text, 3, "DECISION_RECORDED", {"id": text, "choice": text}),
            event(text, 4, text, {text: text}, **{text: text}),
            event(text, 5, "EXECUTION_SUSPENDED", {"gate": 0, "on": text}),
            event(text, 6, text, text),
        ]
        for one in events:
            await store.append(one)
        await store.acquire_fence(text + text)
        assert await store.read(text) == events
        assert [p.event for p in await store.read_all()] == events
        assert await store.fold(text) == fold_events(None, events)
        summary = (await store.list_executions(status=ev.SUSPENDED))[0]
        assert (summary.execution_id, summary.flow_id) == (text, text)
        assert await store.last_sequence(text) == 6
        assert await store.read("other") == []


@pytest.mark.parametrize("stamp", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
async def test_every_bit_of_a_stamp_comes_back(open_store: OpenStore, stamp: int) -> None:
    async with open_store() as store:
        events = [event("x", 0), event("x", 1, flowEmit=f"{stamp:016x}", fence=2**63 - 1)]
        await store.append_batch(events)
        assert (await store.read("x"))[1].stamp == stamp
        assert await store.read("x") == events
        assert await store.fold("x") == fold_events(None, events)


async def test_a_payload_without_a_json_form_is_kept_or_refused_before_anything_is_written(
    open_store: OpenStore,
) -> None:
    async with open_store() as store:
        value = object()
        opaque = Envelope("x", 1, "note", ev.Opaque(value), 5)
        await store.append(event("x", 0))
        if store.persists_json:
            with pytest.raises(UnsupportedTypeError) as caught:
                await store.append_batch([event("x", 1), opaque])
            assert (caught.value.path, caught.value.type_name) == ("$", "object")
            assert await store.last_sequence("x") == 0
        else:
            await store.append(opaque)
            assert (await store.read("x"))[1].payload is value


# --- 7: one total order --------------------------------------------------------------------------


async def test_read_all_pages_through_every_event_once_in_commit_order(open_store: OpenStore) -> None:
    async with open_store() as store:
        await asyncio.gather(*(store.append_batch(log(f"x{n}", 5)) for n in range(30)))
        seen: list[tuple[int, str]] = []
        while page := await store.read_all(seen[-1][0] if seen else 0, limit=7):
            seen += [(p.position, p.event.id) for p in page]
        assert [position for position, _ in seen] == list(range(1, 151))
        assert len({event_id for _, event_id in seen}) == 150


async def test_a_refused_append_leaves_no_hole_in_the_order(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append(event("x", 0))
        with pytest.raises(ConflictError):
            await store.append_batch([event("y", 0), event("x", 0)])
        await store.append(event("x", 1))
        assert [p.position for p in await store.read_all()] == [1, 2]


async def test_pages_that_cannot_be_are_refused(open_store: OpenStore) -> None:
    async with open_store() as store:
        for after, limit in ((-1, 1), (0, 0), (0, -1)):
            with pytest.raises(BadInputError):
                await store.read_all(after, limit=limit)
            with pytest.raises(BadInputError):
                await store.list_executions(after=after, limit=limit)


# --- 8: cancellation, loops and threads ----------------------------------------------------------


async def test_a_cancelled_append_is_whole_or_absent_and_makes_no_noise(open_store: OpenStore) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with open_store() as store:
        await store.append(event("taken", 0))
        tasks = []
        for n in range(60):
            batch = log(f"x{n}", 5) if n % 2 else [*log(f"x{n}", 4), event("taken", 0)]
            tasks.append(asyncio.create_task(store.append_batch(batch)))
        await asyncio.sleep(0)
        for task in tasks[:40]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        lengths = [len(await store.read(f"x{n}")) for n in range(60)]
    assert {lengths[n] for n in range(0, 60, 2)} == {0}
    assert {lengths[n] for n in range(1, 60, 2)} <= {0, 5}
    assert all(lengths[n] == 5 for n in range(1, 60, 2) if results[n] is None)
    del tasks, results
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


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


# --- listing, status, folding, closing -----------------------------------------------------------


def _step(key: str) -> dict[str, Any]:
    return {"key": key, "stepId": "s", "attempt": 1, "inputDigest": "0" * 16}


# Event types and payloads, in log order; the status after each is compared with that of the folded state.
LIVES: dict[str, list[tuple[str, Any]]] = {
    "a gate, then the end": [
        ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}),
        ("note", None),
        ("go", 1),
        ("EXECUTION_RESUMED", {"gate": 0, "on": "go"}),
        ("EXECUTION_COMPLETED", {"output": 1}),
        ("note", None),
    ],
    "steps end while a gate is pending": [
        ("STEP_STARTED", _step("a")),
        ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}),
        ("STEP_COMPLETED", {"key": "a", "output": 1}),
        ("EXECUTION_CANCELLED", {"reason": None}),
    ],
    "steps in doubt keep it suspended until the last is resolved": [
        ("STEP_STARTED", _step("a")),
        ("STEP_STARTED", _step("\ud800")),
        ("EFFECT_INDOUBT", {"key": "a"}),
        ("EFFECT_INDOUBT", {"key": "a"}),
        ("EFFECT_INDOUBT", {"key": "\ud800"}),
        ("STEP_COMPLETED", {"key": "other", "output": 1}),
        ("STEP_COMPLETED", {"key": "a", "output": 1}),
        ("SURFACE_PATCH", {"surface": "s", "op": "set", "path": "p", "value": 1}),
        ("STEP_STARTED", _step("\ud800")),
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


@pytest.mark.parametrize("at_once", [False, True], ids=["one at a time", "in one batch"])
@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
async def test_the_listed_status_is_that_of_the_folded_state(
    open_store: OpenStore, life: list[tuple[str, Any]], at_once: bool
) -> None:
    events = [event("x", 0), *(event("x", n, kind, payload) for n, (kind, payload) in enumerate(life, 1))]
    async with open_store() as store:
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


async def test_a_listing_is_paged_oldest_first(open_store: OpenStore) -> None:
    async with open_store() as store:
        for n in range(10):
            await store.append(event(f"x{n}", 0))
        await store.append(event("x3", 1, "EXECUTION_COMPLETED", {"output": None}))
        first = await store.list_executions(status="running", limit=4)
        rest = await store.list_executions(status="running", after=first[-1].position)
        assert [s.execution_id for s in first + rest] == [f"x{n}" for n in range(10) if n != 3]
        assert [s.execution_id for s in await store.list_executions(limit=2)] == ["x0", "x1"]


async def test_a_fold_goes_on_from_any_state(open_store: OpenStore) -> None:
    async with open_store() as store:
        events = [event("x", 0), *(event("x", n, flowEmit=f"{n % 7:016x}") for n in range(1, 1_500))]
        await store.append_batch(events)
        whole = fold_events(None, events)
        for cut in (1, 700, 1_500):
            assert await store.fold("x", fold_events(None, events[:cut])) == whole
        unknown: State | None = await store.fold("unknown")
        assert unknown is None


async def test_a_closed_store_refuses_every_call_and_closes_twice(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append(event("x", 0))
    await store.close()
    for call in (
        lambda: store.append(event("x", 1)),
        lambda: store.append_batch([]),
        lambda: store.read("x"),
        lambda: store.fold("x"),
        lambda: store.last_sequence("x"),
        lambda: store.list_executions(),
        lambda: store.acquire_fence("x"),
        lambda: store.read_all(),
    ):
        with pytest.raises(StoreClosedError):
            await call()


async def test_closing_finishes_what_was_queued(open_store: OpenStore) -> None:
    async with open_store() as store:
        tasks = [asyncio.create_task(store.append_batch(log(f"x{n}", 100))) for n in range(20)]
        await asyncio.sleep(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert await asyncio.gather(*tasks) == [None] * 20
