"""The harness itself: a runtime that is broken in one place must be caught, and by the right sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import loomfast as lf
from loomfast._core.emit_rule import Verdict
from loomfast.testing import Crash, InvariantError, crash_matrix, play_case
from tests.breakages import (
    Patch,
    attempts_begin_again,
    drains_do_not_wait,
    emits_know_no_segment,
    forgets,
    in_doubt_runs_again,
    loses_an_event,
    the_in_flight_window_is_off,
    the_unsettled_flag_is_off,
    verdict,
)
from tests.crash.flows import SCENARIOS
from tests.crash.stores import memory

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}

REPEATABLE = "a re-run may not make it"
CASES: dict[str, tuple[Callable[[Patch], None], str, str]] = {
    "appends every emit": (verdict(Verdict.STAMPED), "output-before-gates", "stamped more often"),
    "stamps no emit": (verdict(Verdict.UNSTAMPED), "output-before-gates", "without a reason"),
    "serves every emit": (verdict(Verdict.SERVED), "emits-around-a-step", "lost"),
    "no unsettled flag": (the_unsettled_flag_is_off, "untyped-failures", REPEATABLE),
    "no window of an effect": (the_in_flight_window_is_off, "sync-steps-that-emit", REPEATABLE),
    "no window of a decider": (the_in_flight_window_is_off, "a-decider-that-emits", REPEATABLE),
    "no segments": (emits_know_no_segment, "identical-emits", "stamped more often|lost"),
    "executes steps again": (forgets("steps"), "output-before-gates", "executed again"),
    "decides anew": (forgets("decisions"), "decisions", "recorded again"),
    "an effect runs before its start is written": (drains_do_not_wait, "at-most-once", "before its start"),
    "rests before it is written": (
        drains_do_not_wait,
        "output-before-gates",
        "was acknowledged at sequence",
    ),
    "drops an event": (loses_an_event, "emits-around-a-step", "lost"),
    "counts attempts anew": (attempts_begin_again, "emits-around-a-step", "expected the next number"),
    "pays twice": (in_doubt_runs_again, "at-most-once", "run 2 times"),
}


@pytest.mark.parametrize(("broken", "name", "sentence"), CASES.values(), ids=CASES)
def test_a_runtime_broken_in_one_place_is_caught(
    broken: Callable[[Patch], None], name: str, sentence: str, monkeypatch: Patch
) -> None:
    broken(monkeypatch)
    with pytest.raises(InvariantError, match=sentence):
        plays(name)


def plays(name: str) -> None:
    for seed in (0, 1):  # a store that is never slow hides what should have waited for it
        crash_matrix(BY_NAME[name], memory(), seed=seed)


def test_what_fails_is_replayed_from_what_the_error_says(monkeypatch: Patch) -> None:
    verdict(Verdict.SERVED)(monkeypatch)
    scenario = BY_NAME["gathers"]
    with pytest.raises(InvariantError) as caught:
        crash_matrix(scenario, memory(), seed=3)
    played = caught.value.played
    replay = f"play_case('gathers', seed=3, batch_events=1, crashes={list(played.crashes)!r})"
    assert replay in str(caught.value)
    again = play_case(scenario, memory(), seed=3, batch_events=1, crashes=played.crashes)
    assert [event.to_json() for event in again.log] == [event.to_json() for event in played.log]


def test_nothing_of_a_killed_process_reaches_the_store_or_the_world() -> None:
    """The cancelled step, the flow's `finally`, a closing runtime: all of it happens without power."""
    scenario = BY_NAME["cancelled-in-a-step"]
    played = play_case(scenario, memory(), crashes=[Crash(3), Crash(0)])
    types = [event.event_type for event in played.log]
    assert types[:3] == ["EXECUTION_STARTED", "before", "STEP_STARTED"]
    assert played.lives == [0, 3, 3]
    assert types[3] == "STEP_STARTED"
    assert played.world.violations == []


def test_a_store_that_is_not_empty_is_refused() -> None:
    open_store = memory()
    play_case(BY_NAME["streams"], open_store)
    with pytest.raises(lf.BadInputError, match="an empty one"):
        play_case(BY_NAME["streams"], open_store)
