"""The judge of a cluster can fail: it tells a sound history from those in which something is not right."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import loomfast as lf
from tests.cluster.agreed import SCHEDULES
from tests.cluster.judge import History, history_of, judged
from tests.soak.flows import ANSWER, Plan, errand_in
from tests.soak.outside import Outside, committed
from tests.soak.testimony import lines, say
from tests.soak.undisturbed import Leaping

PLAN: Plan = [
    ("note", "ask"),
    ("work", "ask"),
    ("once", "tell"),
    ("retries", "look"),
    ("gate", "ask"),
    ("sleep", 1),
]
E1 = "client-0-1"
OCCURRENCES = 4
PID = os.getpid()
OTHER = PID + 1


async def played(store: lf.EventStore, testimony: Path) -> History:
    """Play one errand of a client and some occurrences of each schedule, and return their history."""
    testimony.touch()
    said = os.open(testimony, os.O_WRONLY | os.O_APPEND)
    errand = errand_in(Outside(said, "0", 0))
    starts = [(E1, PLAN)]
    for each in SCHEDULES:
        step_ms = round(each.every_s * 1000)
        starts += [
            (lf.occurrence_id(each.schedule_id, n * step_ms), each.plan) for n in range(1, OCCURRENCES + 1)
        ]
    try:
        async with lf.WorkflowRuntime(store, clock=Leaping(), on_commit=partial(committed, said)) as runtime:
            for execution_id, plan in starts:
                say(said, "asked", execution_id, plan)
                handle = await runtime.start(errand, plan, execution_id=execution_id)
                say(said, "started", execution_id)
                while (state := await handle.rest()).ended is None:
                    gate = state.pending
                    assert gate is not None
                    if gate.wake_at is not None:
                        handle = await runtime.fire(execution_id)
                        continue
                    answer = {"to": gate.ordinal, "by": "client-0"}
                    handle = await runtime.resume(execution_id, ANSWER, answer)
                    say(said, "answered", execution_id, gate.ordinal, answer)
                say(said, "result", execution_id, await handle.result())
    finally:
        os.close(said)
    with open(testimony, "rb") as texts:
        return await history_of(store, list(lines(texts)))


@pytest.fixture
def testimony(tmp_path: Path) -> Path:
    return tmp_path / "testimony.jsonl"


async def test_nothing_is_wrong_with_a_history_that_nothing_has_befallen(testimony: Path) -> None:
    async with lf.MemoryEventStore() as store:
        verdict = await judged(await played(store, testimony))
    assert verdict.broken == []
    assert verdict.counts["executions"] == verdict.counts["compared"] == 1 + 3 * OCCURRENCES
    assert verdict.counts["occurrences of made-up"] == OCCURRENCES


# --- what must not be ----------------------------------------------------------------------------


def place(history: History, *beginning: Any) -> int:
    """The first line of the testimony that begins so."""
    return next(n for n, line in enumerate(history.lines) if line[: len(beginning)] == list(beginning))


def insert(history: History, at: int, *line: Any) -> None:
    history.lines = [*history.lines[:at], list(line), *history.lines[at:]]


def append(history: History, *line: Any) -> None:
    insert(history, len(history.lines), *line)


def cut_before(history: History, execution_id: str, event_type: str, occurrence: int = 0) -> None:
    """Let the log end in front of an event of this type, and nobody have said anything of what followed."""
    log = history.logs[execution_id]
    ends = [event.sequence for event in log if event.event_type == event_type][occurrence]
    history.logs[execution_id] = log[:ends]
    history.lines = [
        line
        for line in history.lines
        if line[:2] not in (["result", execution_id], ["answered", execution_id])
        and not (line[:2] == ["committed", execution_id] and line[2] >= ends)
    ]


def altered(event: lf.Envelope, **changes: Any) -> lf.Envelope:
    """The event with another type, body or fence."""
    return lf.Envelope(
        event.execution_id,
        event.sequence,
        changes.get("event_type", event.event_type),
        changes.get("body", event.body),
        event.timestamp,
        event.subject,
        event.stamp,
        changes.get("fence", event.fence),
    )


def executed_again(history: History) -> None:
    append(history, "begin", E1, "work", 2, OTHER)


def executed_beside(history: History) -> None:
    insert(history, place(history, "begin", E1, "work") + 1, "begin", E1, "work", 2, OTHER)


def paid_twice(history: History) -> None:
    insert(history, place(history, "begin", E1, "once") + 1, "begin", E1, "once", 2, OTHER)


def paid_unseen(history: History) -> None:
    log = history.logs[E1]
    history.logs[E1] = [
        altered(event, event_type="note")
        if event.event_type == "STEP_STARTED" and event.subject == "once"
        else event
        for event in log
    ]


def never_done(history: History) -> None:
    history.lines = [line for line in history.lines if line[:3] != ["end", E1, "work"]]


def occurrence_missing(history: History) -> None:
    missing = lf.occurrence_id("made-up", 4_000)
    del history.logs[missing]
    history.lines = [line for line in history.lines if line[1:2] != [missing]]


def occurrence_between(history: History) -> None:
    log = history.logs.pop(lf.occurrence_id("latest", 3_000))
    history.logs[lf.occurrence_id("latest", 3_100)] = log


def nothing_started(history: History) -> None:
    history.logs = {each: log for each, log in history.logs.items() if not each.startswith("on-time@")}


def other_input(history: History) -> None:
    execution_id = lf.occurrence_id("latest", 3_000)
    history.logs[execution_id] = history.logs[lf.occurrence_id("made-up", 4_000)]


def left_running(history: History) -> None:
    cut_before(history, E1, "EXECUTION_COMPLETED")


def left_sleeping(history: History) -> None:
    cut_before(history, E1, "EXECUTION_RESUMED", 1)
    history.logs[E1] = history.logs[E1][:-1]
    history.lines = [
        line for line in history.lines if line[:2] != ["committed", E1] or line[2] < len(history.logs[E1])
    ]


def left_waiting(history: History) -> None:
    cut_before(history, E1, ANSWER)


def lease_left(history: History) -> None:
    history.leases.append(lf.Lease(E1, "somebody", 9, 99))


def answer_lost(history: History) -> None:
    append(history, "answered", E1, 7, {"to": 7, "by": "client-1"})


def answer_changed(history: History) -> None:
    history.lines = [
        ["answered", E1, 0, {"by": "client-1"}] if line[0] == "answered" else line for line in history.lines
    ]


def two_answers(history: History) -> None:
    append(history, "answered", E1, 0, {"to": 0, "by": "client-1"})


def two_starts(history: History) -> None:
    append(history, "started", E1)


def start_lost(history: History) -> None:
    append(history, "started", "client-1-1")


def result_changed(history: History) -> None:
    append(history, "result", E1, "another")


def event_lost(history: History) -> None:
    history.logs[E1] = history.logs[E1][:-1]


def gap(history: History) -> None:
    del history.logs[E1][3]


def fences_crossed(history: History) -> None:
    log = history.logs[E1]
    log[3:5] = [altered(log[3], fence=7), altered(log[4], fence=6)]


def cancelled_unasked(history: History) -> None:
    log = history.logs[E1]
    log[-1] = altered(log[-1], event_type="EXECUTION_CANCELLED", body=b'{"reason":null}')


def cancel_lost(history: History) -> None:
    append(history, "cancelled", E1)


def failed(history: History) -> None:
    log = history.logs[E1]
    error = b'{"error":{"type":"E","message":"m"}}'
    log[-1] = altered(log[-1], event_type="EXECUTION_FAILED", body=error)


def other_output(history: History) -> None:
    log = history.logs[E1]
    log[-1] = altered(log[-1], body=b'{"output":[]}')


def process_died(history: History) -> None:
    append(history, "broken", "worker-1 ended by itself")


def unsound(history: History) -> None:
    history.unsound.append("verify: a head is wrong")


BAD: dict[Callable[[History], None], str] = {
    executed_again: "'work' was executed again",
    executed_beside: "nothing had befallen process",
    paid_twice: "'once', at most once, ran 2 times",
    paid_unseen: "'once', at most once, ran before its start was durable",
    never_done: "which no effect gave",
    occurrence_missing: "has not started made-up@1970-01-01T00:00:04Z",
    occurrence_between: "does not name latest@1970-01-01T00:00:03.100Z",
    nothing_started: "'on-time' has started nothing",
    other_input: "has started latest@1970-01-01T00:00:03Z with",
    left_running: "is left running at",
    left_sleeping: "sleeps past its time",
    left_waiting: "still waits at gate 0",
    lease_left: "is held by somebody",
    answer_lost: "the answer to gate 7 was acknowledged and is lost",
    answer_changed: "to gate 0 was acknowledged, and the log has",
    two_answers: "two answers to gate 0 were acknowledged",
    two_starts: "2 starts were acknowledged",
    start_lost: "'client-1-1': was acknowledged and is lost",
    result_changed: "gave the result another",
    event_lost: "EXECUTION_COMPLETED at",
    gap: "sequence: must be 3",
    fences_crossed: "of fence 6, stands behind fence 7",
    cancelled_unasked: "nobody has asked for it",
    cancel_lost: "its cancel was acknowledged, and it is completed",
    failed: "has failed",
    other_output: "a re-run is not served it",
    process_died: "ended by itself",
    unsound: "a head is wrong",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
async def test_a_bad_history_is_told_by_the_right_sentence(
    spoil: Callable[[History], None], testimony: Path
) -> None:
    async with lf.MemoryEventStore() as store:
        history = await played(store, testimony)
        spoil(history)
        verdict = await judged(history)
    assert any(BAD[spoil] in sentence for sentence in verdict.broken), verdict.broken


# --- what excuses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reason", [("disturbed", "kill", PID), ("disturbed", "restart", None), ("lost", E1, PID)], ids=str
)
async def test_an_effect_may_begin_again_where_its_process_was_lost(
    reason: tuple[Any, ...], testimony: Path
) -> None:
    async with lf.MemoryEventStore() as store:
        history = await played(store, testimony)
        executed_beside(history)
        insert(history, place(history, "begin", E1, "work") + 1, *reason)
        verdict = await judged(history)
    assert verdict.broken == []
    assert sum(count for what, count in verdict.counts.items() if what.startswith("again after ")) == 1


@pytest.mark.parametrize("reason", [("disturbed", "kill", OTHER), ("lost", "another", PID)], ids=str)
async def test_what_befell_another_process_excuses_nothing(reason: tuple[Any, ...], testimony: Path) -> None:
    async with lf.MemoryEventStore() as store:
        history = await played(store, testimony)
        executed_beside(history)
        insert(history, place(history, "begin", E1, "work") + 1, *reason)
        verdict = await judged(history)
    assert any("nothing had befallen" in sentence for sentence in verdict.broken)


async def test_what_was_over_before_excuses_nothing(testimony: Path) -> None:
    async with lf.MemoryEventStore() as store:
        history = await played(store, testimony)
        executed_beside(history)
        insert(history, 0, "calm", "cut", PID)
        insert(history, 0, "disturbed", "cut", PID)
        verdict = await judged(history)
    assert any("nothing had befallen" in sentence for sentence in verdict.broken)


async def test_a_store_that_holds_a_running_execution_and_one_set_aside_is_not_at_rest(
    testimony: Path,
) -> None:
    async with lf.MemoryEventStore() as store:
        await played(store, testimony)
        started = {"flowId": "errand", "flowVersion": "1", "input": PLAN}
        await store.append(lf.Envelope("left", 0, "EXECUTION_STARTED", lf.encode(started), 0))
        await store.recoveries.put(lf.Recovery("left", 5, 0, orderly=False, set_aside="it crashed 5 times"))
        await store.leases.acquire("left", "somebody", 60)
        verdict = await judged(await history_of(store, []))
    expected = (
        "'left': is left running at 0",
        "'left' is set aside",
        "the lease of 'left' is held by somebody",
    )
    assert all(sentence in verdict.broken for sentence in expected), verdict.broken
