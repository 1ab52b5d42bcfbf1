"""A log that is damaged where no checksum looked: the run stops, and what it could not read is no outcome."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import loomfast as lf
from tests.runtime.harness import kinds, runtime


@lf.step
async def charge(amount: int) -> dict[str, int]:
    return {"paid": amount}


class Declined(Exception):
    pass


@lf.step(failures=[Declined])
async def declined() -> None:
    raise Declined("no")


@lf.flow
async def order(ctx: lf.WorkflowContext, input: Any) -> Any:
    paid = await ctx.run(charge, input["amount"])
    with contextlib.suppress(Declined):
        await ctx.run(declined)
    route = await ctx.decide("route", lambda: "fast")
    at = ctx.now().isoformat()
    answer = await ctx.suspend("go")
    return [paid, route, at, answer]


def replace(store: lf.MemoryEventStore, execution_id: str, sequence: int, body: Any) -> bytes:
    """Put another body into an event, and return the one it had."""
    log = store._logs[execution_id]
    event = log[sequence]
    log[sequence] = lf.Envelope(
        execution_id, sequence, event.event_type, body, event.timestamp, event.subject, event.stamp
    )
    assert isinstance(event.body, bytes)
    return event.body


async def answered(store: lf.MemoryEventStore) -> None:
    """Leave the execution "o" with an answer, and nobody to run it: its process died."""
    async with runtime(store, order) as rt:
        await (await rt.start(order, {"amount": 5}, execution_id="o")).rest()
    sequence = await store.last_sequence("o") or 0
    resumed = ("EXECUTION_RESUMED", {"gate": 0, "on": "go"})
    for n, (kind, payload) in enumerate([("go", {"ok": True}), resumed], sequence + 1):
        await store.append(lf.Envelope.make("o", n, kind, payload, 0))


@pytest.mark.parametrize("body", [b"{", b"[1]", b"{}", b"5", b'{"key":"charge","output":'])
@pytest.mark.parametrize("kind", ["EXECUTION_STARTED", "STEP_COMPLETED", "STEP_FAILED", "DECISION_RECORDED"])
async def test_damage_stops_the_run_as_a_storage_fault_and_a_repaired_log_goes_on(
    kind: str, body: bytes
) -> None:
    store = lf.MemoryEventStore()
    await answered(store)
    before = await store.read("o")
    sequence = kinds(before).index(kind)
    whole = replace(store, "o", sequence, body)
    async with runtime(store, order) as rt:
        with pytest.raises(lf.StoreReadError, match=f"execution 'o', sequence {sequence}: ") as caught:
            await (await rt.recover("o")).result()
        assert caught.value.execution_id == "o"
        assert len(await store.read("o")) == len(before)
    replace(store, "o", sequence, whole)
    async with runtime(store, order) as rt:
        paid, route, _, answer = await (await rt.recover("o")).result()
        assert (paid, route, answer) == ({"paid": 5}, "fast", {"ok": True})
    assert kinds(await store.read("o")).count("STEP_STARTED") == 2


async def test_a_damaged_answer_is_no_answer_but_a_fault() -> None:
    store = lf.MemoryEventStore()
    await answered(store)
    before = await store.read("o")
    whole = replace(store, "o", len(before) - 2, b"{")
    async with runtime(store, order) as rt:
        with pytest.raises(lf.StoreReadError, match=f"sequence {len(before) - 2}: "):
            await (await rt.recover("o")).result()
        assert len(await store.read("o")) == len(before)
    replace(store, "o", len(before) - 2, whole)
    async with runtime(store, order) as rt:
        assert (await (await rt.recover("o")).result())[3] == {"ok": True}


async def test_a_flow_that_catches_everything_cannot_go_on_past_damage() -> None:
    reached: list[str] = []

    @lf.flow
    async def stubborn(ctx: lf.WorkflowContext, input: Any) -> str:
        with contextlib.suppress(Exception):
            await ctx.run(charge, 5)
        with contextlib.suppress(Exception):
            ctx.emit("past the damage")
        with contextlib.suppress(Exception):
            await ctx.suspend("go")
            reached.append("the gate")
        return "done"

    store = lf.MemoryEventStore()
    async with runtime(store, stubborn) as rt:
        await (await rt.start(stubborn, execution_id="o")).rest()
    before = await store.read("o")
    replace(store, "o", 2, b"{")
    async with runtime(store, stubborn) as rt:
        resumed = await rt.resume("o", "go")
        with pytest.raises(lf.StoreReadError, match="sequence 2"):
            await resumed.result()
    assert reached == []
    assert kinds(await store.read("o")) == [*kinds(before), "go", "EXECUTION_RESUMED"]


async def test_an_outcome_that_is_damaged_is_reported_as_damage_to_whoever_waits_for_it() -> None:
    @lf.flow
    async def short(ctx: lf.WorkflowContext, input: Any) -> int:
        return 5

    store = lf.MemoryEventStore()
    async with runtime(store, short) as rt:
        await (await rt.start(short, execution_id="o")).result()
    replace(store, "o", 1, b"{")
    async with runtime(store, short) as rt:
        with pytest.raises(lf.StoreReadError, match="execution 'o', sequence 1: "):
            await rt.handle("o").result()


async def test_a_suspension_that_is_no_json_is_named_and_nothing_is_appended() -> None:
    store = lf.MemoryEventStore()
    await answered(store)
    before = await store.read("o")
    sequence = kinds(before).index("EXECUTION_SUSPENDED")
    replace(store, "o", sequence, b"{")
    async with runtime(store, order) as rt:
        with pytest.raises(lf.MalformedEventError) as caught:
            await rt.recover("o")
        assert (caught.value.execution_id, caught.value.sequence, caught.value.field) == (
            "o",
            sequence,
            "payload",
        )
    assert len(await store.read("o")) == len(before)
