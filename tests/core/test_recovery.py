"""When a crash counts: the account from one recovery to the next (F16)."""

from __future__ import annotations

from typing import Any

import loomfast as lf
from loomfast._core.recovery import Recovery, found, progress_of, stopped


def state(*facts: tuple[str, Any]) -> lf.State:
    log = [("EXECUTION_STARTED", {"flowId": "f", "flowVersion": "1", "input": None}), *facts]
    events = [lf.Envelope.make("x", n, kind, payload, 0) for n, (kind, payload) in enumerate(log)]
    return lf.fold_events(None, events)


def started(key: str, attempt: int = 1) -> tuple[str, Any]:
    return "STEP_STARTED", {"key": key, "stepId": key, "attempt": attempt, "inputDigest": "0" * 16}


A = (started("a"), ("STEP_COMPLETED", {"key": "a", "output": 1}))


def test_crashes_in_a_row_are_counted_and_the_last_one_sets_aside() -> None:
    here, account = state(started("a")), None
    counts = []
    while account is None or account.set_aside is None:
        account = found(account, "x", progress_of(here), 3)
        assert account is not None
        counts.append(account.crashes)
    assert counts == [1, 2, 3]
    assert account.set_aside == "3 runs in a row crashed without progress"
    assert found(account, "x", progress_of(here), 9) == account


def test_progress_between_two_crashes_starts_the_count_anew() -> None:
    account = found(Recovery("x", 2, 0, False, None), "x", progress_of(state(*A)), 3)
    assert account == Recovery("x", 1, 1, False, None)


def test_progress_is_what_a_rerun_is_served_and_a_started_step_is_none() -> None:
    assert progress_of(state(started("a"))) == 0
    untyped = ("STEP_FAILED", {"key": "a", "typed": False, "error": {"type": "E", "message": ""}})
    assert progress_of(state(started("a"), untyped)) == 0
    assert progress_of(state(started("a"), ("STEP_CANCELLED", {"key": "a", "reason": "r"}))) == 0
    typed = ("STEP_FAILED", {"key": "a", "typed": True, "error": {"type": "E", "message": ""}})
    assert progress_of(state(started("a"), typed)) == 1
    gate = (
        ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}),
        ("go", None),
        ("EXECUTION_RESUMED", {"gate": 0, "on": "go"}),
    )
    assert progress_of(state(*A, ("DECISION_RECORDED", {"id": "d", "choice": 1}), *gate)) == 3


def test_a_run_that_was_stopped_in_order_has_not_crashed_and_its_mark_is_used_up() -> None:
    here = state(started("a"))
    assert stopped(None, "x", progress_of(here)) == Recovery("x", 0, 0, True, None)
    assert found(stopped(None, "x", progress_of(here)), "x", progress_of(here), 1) is None
    twice = stopped(Recovery("x", 2, 0, False, None), "x", progress_of(here))
    assert twice == Recovery("x", 2, 0, True, None)
    assert found(twice, "x", progress_of(here), 3) == Recovery("x", 2, 0, False, None)
    assert found(twice, "x", progress_of(state(*A)), 3) is None
