"""The emit rule, alone: each sentence of ADR 0102, D2 and D4 that it decides."""

from __future__ import annotations

import pytest

from loomfast._core.emit_rule import EmitRule, Verdict

NOTE, OTHER = 0x1111, 0x2222


class Log:
    """The stamped emits of a log, counted the way the fold counts them."""

    def __init__(self, **stamped: int) -> None:
        self.stamped = {NOTE: stamped.get("note", 0), OTHER: stamped.get("other", 0)}
        self.unstamped = 0

    def emit(self, rule: EmitRule, digest: int = NOTE) -> Verdict:
        verdict = rule.judge(digest, self.stamped[digest])
        if verdict is Verdict.STAMPED:
            self.stamped[digest] += 1
        elif verdict is Verdict.UNSTAMPED:
            self.unstamped += 1
        return verdict


def test_a_first_run_stamps_every_emit() -> None:
    log, rule = Log(), EmitRule()
    assert [log.emit(rule), log.emit(rule), log.emit(rule, OTHER)] == [Verdict.STAMPED] * 3


def test_a_re_run_is_served_as_often_as_the_log_holds_it_and_then_appends() -> None:
    log, rule = Log(note=2), EmitRule()
    assert [log.emit(rule) for _ in range(3)] == [Verdict.SERVED, Verdict.SERVED, Verdict.STAMPED]


def test_equal_content_of_another_identity_is_not_served() -> None:
    log, rule = Log(note=1), EmitRule()
    assert log.emit(rule, OTHER) is Verdict.STAMPED


def test_nothing_is_served_once_a_syscall_of_the_segment_was_live() -> None:
    log, rule = Log(note=1), EmitRule()
    rule.syscall_live()
    assert log.emit(rule) is Verdict.UNSTAMPED


def test_an_emit_beyond_the_logged_count_is_stamped_even_in_a_live_segment() -> None:
    log, rule = Log(note=1), EmitRule()
    rule.syscall_live()
    assert [log.emit(rule), log.emit(rule)] == [Verdict.UNSTAMPED, Verdict.STAMPED]


def test_an_emit_from_inside_an_effect_is_never_stamped() -> None:
    assert EmitRule().judge(NOTE, 0, inside=True) is Verdict.UNSTAMPED


def test_a_passed_gate_begins_a_segment_in_which_nothing_is_live() -> None:
    log, rule = Log(note=1), EmitRule()
    rule.syscall_live()
    rule.gate_passed()
    assert rule.segment == 1
    assert log.emit(rule) is Verdict.SERVED


def test_an_emit_during_an_effect_is_appended_without_a_stamp() -> None:
    log, rule = Log(), EmitRule()
    rule.began()
    assert log.emit(rule) is Verdict.UNSTAMPED
    rule.ended()
    assert log.emit(rule) is Verdict.STAMPED


def test_the_window_stays_open_until_the_last_effect_has_ended() -> None:
    log, rule = Log(), EmitRule()
    rule.began()
    rule.began()
    rule.ended()
    assert log.emit(rule) is Verdict.UNSTAMPED


def test_after_an_unsettled_outcome_nothing_is_stamped_any_more_in_any_segment() -> None:
    log, rule = Log(), EmitRule()
    rule.ended_unsettled()
    rule.gate_passed()
    assert log.emit(rule) is Verdict.UNSTAMPED


def test_an_unsettled_outcome_does_not_stop_proven_replays() -> None:
    log, rule = Log(note=1), EmitRule()
    rule.ended_unsettled()
    assert log.emit(rule) is Verdict.SERVED


@pytest.mark.parametrize("digest", [0, 2**64 - 1])
def test_the_extreme_digests_are_ordinary(digest: int) -> None:
    rule = EmitRule()
    assert rule.judge(digest, 0) is Verdict.STAMPED
    assert rule.judge(digest, 2) is Verdict.SERVED
