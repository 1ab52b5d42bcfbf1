"""The conformance kit catches stores that break their word: for every guarantee at least one.

That the same tests pass on the sound store is in `test_conformance.py`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loomfast.stores import EventStore, MemoryEventStore, SqliteEventStore
from loomfast.testing.conformance import EventStoreConformance, guarantee, guarantees_checked

from . import broken
from .programs import foreign
from .test_conformance import OnMemory, OnSqlite

# guarantee -> broken store -> the test that must fail on it
CASES: list[tuple[int, type[MemoryEventStore], str]] = [
    (1, broken.StoresHalfBatches, "test_a_conflict_on_the_last_event_of_a_batch_leaves_none_of_it"),
    (1, broken.LosesTheOrder, "test_a_batch_may_hold_several_executions_interleaved"),
    (2, broken.AcknowledgesBeforeItIsDurable, "test_an_append_that_returned_is_seen_by_every_kind_of_read"),
    (2, broken.AnswersThroughItsPrimary, "test_a_closed_store_refuses_every_call_and_closes_twice"),
    (3, broken.SwallowsDuplicates, "test_of_many_appends_of_one_sequence_never_two_succeed"),
    (3, broken.AcceptsGaps, "test_an_event_that_would_leave_a_gap_is_refused"),
    (4, broken.AcceptsStaleFences, "test_a_missing_or_older_token_is_refused_once_a_fence_is_acquired"),
    (4, broken.ChecksTheSlotBeforeTheToken, "test_the_token_is_checked_before_the_slot_on_every_envelope"),
    (5, broken.GivesOneTokenTwice, "test_tokens_of_one_execution_increase_strictly_under_concurrency"),
    (6, broken.SortsKeys, "test_a_value_comes_back_equal_from_the_payload_and_the_metadata"),
    (7, broken.PassesOverAnEventBetweenPages, "test_a_reader_beside_many_writers_sees_every_event_once"),
    (
        7,
        broken.NumbersByTheEndOfThePage,
        "test_a_position_is_where_reading_goes_on",
    ),
    (8, broken.BlocksTheLoop, "test_large_calls_leave_the_loop_to_others"),
    (8, broken.LeavesHalfOfACancelledBatch, "test_a_cancelled_append_is_whole_or_absent_and_makes_no_noise"),
    (9, broken.CutsWithoutASnapshot, "test_a_cut_needs_a_snapshot_that_covers_it"),
    (10, broken.IsSilentAboutWhatWasCut, "test_a_read_that_needs_what_is_gone_names_the_first_available"),
    (11, broken.CopiesFencesToo, "test_a_copy_is_the_prefix_with_its_own_ids_and_says_where_it_comes_from"),
    (
        12,
        broken.beside("snapshots", broken.KeepsTheFirstSnapshot),
        "test_a_second_snapshot_at_a_sequence_takes_the_first_ones_place",
    ),
    (13, broken.beside("snapshots", broken.BrokenSnapshots), "test_a_snapshot_never_runs_ahead_of_its_log"),
    (
        14,
        broken.beside("snapshots", broken.HidesDamagedSnapshots),
        "test_a_damaged_snapshot_is_found_by_its_reader_who_falls_back",
    ),
    (
        15,
        broken.beside("snapshots", broken.DeletesTheLastCover),
        "test_a_truncated_log_keeps_a_sound_snapshot_that_covers_its_cut",
    ),
    (16, broken.beside("branches", broken.ForgetsBranches), "test_a_lineage_has_names_parents_and_cuts"),
    (
        17,
        broken.beside("branches", broken.GivesANameAway),
        "test_of_many_that_want_one_name_exactly_one_gets_it",
    ),
    (18, broken.beside("branches", broken.HasTwoMainBranches), "test_a_lineage_has_exactly_one_main_branch"),
    (
        19,
        broken.beside("leases", broken.GivesALeaseTwice),
        "test_of_many_that_want_a_lease_exactly_one_gets_it",
    ),
    (
        19,
        broken.beside("leases", broken.ReusesTokens),
        "test_a_lease_is_held_by_one_owner_until_it_is_released",
    ),
    (
        20,
        broken.beside("leases", broken.NeverEndsALease),
        "test_a_lease_ends_when_its_time_by_the_stores_clock_is_over",
    ),
    (
        20,
        broken.beside("leases", broken.RenewsInWordsOnly),
        "test_a_lease_that_is_renewed_lasts_on_and_says_how_long",
    ),
    (
        20,
        broken.beside("leases", broken.ForgetsWhatItWasAskedFor),
        "test_which_of_many_keys_are_held_is_answered_in_the_order_of_the_keys",
    ),
    (
        20,
        broken.beside("leases", broken.NeverEndsALease),
        "test_which_of_many_keys_are_held_is_answered_in_the_order_of_the_keys",
    ),
    (
        22,
        broken.beside("recoveries", broken.MergesAccounts),
        "test_an_account_is_replaced_whole_and_can_be_forgotten",
    ),
    (
        23,
        broken.beside("timers", broken.ForgetsToStopATimer),
        "test_an_answer_or_an_end_takes_a_gate_off_the_list",
    ),
    (23, broken.beside("timers", broken.WakesEarly), "test_a_gate_is_due_from_its_time_on_and_not_before"),
    (24, broken.beside("timers", broken.IgnoresVersions), "test_an_older_version_replaces_nothing"),
    (
        24,
        broken.beside("timers", broken.CountsVersionsAnew),
        "test_a_version_is_never_given_twice_for_one_id",
    ),
    (
        24,
        broken.beside("timers", broken.HidesSchedulesBehindAPage),
        "test_schedules_that_are_due_are_paged_and_those_of_one_time_stand_by_code_point",
    ),
    (25, broken.KnowsEveryId, "test_what_is_no_text_is_refused_for_an_id_a_key_or_a_name"),
    (25, broken.beside("timers", broken.RoundsTimes), "test_a_number_that_is_not_whole_is_refused"),
    (25, broken.beside("timers", broken.CutsTimesOff), "test_a_number_that_64_bits_do_not_hold_is_not_kept"),
    (
        25,
        broken.CountsInMachineWords,
        "test_a_number_that_is_only_compared_may_be_beyond_all_that_are_kept",
    ),
    (25, broken.WritesNothing, "test_a_write_of_nothing_is_refused_and_a_batch_of_nothing_is_none"),
    (
        26,
        broken.IgnoresTheLease,
        "test_a_fence_under_a_lease_that_was_taken_over_is_refused_and_changes_nothing",
    ),
    (
        26,
        broken.LooksAtTheLeaseBeforeItFences,
        "test_no_late_fence_stops_whoever_takes_the_lease_over_fences_and_writes",
    ),
    (
        26,
        broken.LooksAtTheOwnerOnly,
        "test_a_lease_that_was_given_back_or_taken_anew_or_is_of_another_key_is_not_held",
    ),
    (
        26,
        broken.beside("leases", broken.FencesForWhomeverNobodyHasFollowed),
        "test_a_lease_that_has_run_out_is_not_held_though_nobody_has_taken_it",
    ),
]


def run(suite: EventStoreConformance, name: str) -> None:
    """Run one test of a suite, with every combination of its parameters."""
    test = getattr(suite, name)
    combinations: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", ()):
        argument, values = mark.args
        combinations = [{**given, argument: value} for given in combinations for value in values]
    for given in combinations:
        assert inspect.signature(test).parameters.keys() == given.keys()
        test(**given)


def is_caught(suite: EventStoreConformance, name: str) -> bool:
    try:
        run(suite, name)
    except (Exception, pytest.fail.Exception):
        return True
    return False


@pytest.mark.parametrize(
    ("number", "kind", "name"), CASES, ids=[f"{number}-{kind.__name__}" for number, kind, _ in CASES]
)
def test_a_store_that_breaks_a_guarantee_fails_its_test(
    tmp_path: Path, number: int, kind: type[MemoryEventStore], name: str
) -> None:
    class Suite(OnMemory, EventStoreConformance):
        made = kind

        @asynccontextmanager
        async def open_store(self) -> AsyncIterator[EventStore]:
            self.memory = self.made(now_ms=self.now_ms)
            async with self.memory as store:
                yield store

    assert name in guarantees_checked(EventStoreConformance)[number]
    suite = Suite()
    suite.place = tmp_path
    assert is_caught(suite, name)
    Suite.made = MemoryEventStore
    run(suite, name)  # it is the fault that fails it, and nothing else


# What is lost at a restart: a store on a file that forgets one table when it is opened.
FORGOTTEN = [
    (2, "DELETE FROM events", "test_what_returned_is_there_after_a_restart_and_nothing_that_was_refused"),
    (5, "UPDATE executions SET fence = NULL", "test_tokens_survive_a_restart_and_go_on_from_there"),
    (9, "UPDATE executions SET cut = 1", "test_a_cut_survives_a_restart"),
    (12, "DELETE FROM snapshots", "test_snapshots_survive_a_restart"),
    (16, "DELETE FROM branches", "test_branches_survive_a_restart"),
    (19, "DELETE FROM sqlite_sequence", "test_leases_and_the_count_of_tokens_survive_a_restart"),
    (21, "DELETE FROM leases", "test_leases_and_the_count_of_tokens_survive_a_restart"),
    (22, "DELETE FROM recoveries", "test_accounts_survive_a_restart"),
    (23, "UPDATE executions SET wake_at = NULL", "test_gates_are_due_after_a_restart"),
    (24, "DELETE FROM schedules", "test_schedules_survive_a_restart"),
    (24, "DELETE FROM sqlite_sequence", "test_schedules_survive_a_restart"),
]


@pytest.mark.parametrize(
    ("number", "loss", "name"), FORGOTTEN, ids=[f"{number}-{loss}" for number, loss, _ in FORGOTTEN]
)
def test_a_store_that_forgets_at_a_restart_fails_its_test(
    tmp_path: Path, number: int, loss: str, name: str
) -> None:
    class Suite(OnSqlite, EventStoreConformance):
        @asynccontextmanager
        async def open_store(self) -> AsyncIterator[EventStore]:
            path = self.place / "events.db"
            if path.exists():
                with foreign(path) as connection:
                    connection.execute(loss)
            async with await SqliteEventStore.open(path, synchronous="NORMAL", now_ms=self.now_ms) as store:
                yield store

    assert name in guarantees_checked(EventStoreConformance)[number]
    suite = Suite()
    suite.place = tmp_path
    assert is_caught(suite, name)


def test_every_guarantee_has_a_store_that_breaks_it() -> None:
    assert {number for number, *_ in (*CASES, *FORGOTTEN)} == set(range(1, 27))


def test_the_kit_fails_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loomfast.testing.conformance._suite.TEST_LIMIT_S", 0.01)

    @guarantee(1)
    async def hangs(self: EventStoreConformance) -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        hangs(EventStoreConformance())
