"""`loomfast bench`: verdicts, exit codes, and the check that guards flatness. Nothing is measured here."""

from __future__ import annotations

import dataclasses

import pytest

import loomfast as lf
from loomfast.bench import cases, driver, fold, logs, parked, replay, startup
from loomfast.cli.bench import figure


def fake(name: str, seconds: float, **changes: object) -> cases.Case:
    case = cases.Case(
        name,
        f"what {name} is",
        lambda quick: {"loomfast": seconds, "peer": 1.0},
        cases.of("loomfast", "peer"),
        0.5,
    )
    return dataclasses.replace(case, **changes)


@pytest.fixture
def only(monkeypatch):
    """Make these all the cases there are."""

    def set_cases(*some: cases.Case) -> None:
        monkeypatch.setattr(cases, "CASES", some)

    return set_cases


def test_a_case_within_its_limit_is_ok_and_one_over_it_exits_1(invoke, only):
    only(fake("fast", 0.25))
    result = invoke("bench")
    assert result.exit_code == 0
    assert "0.250    0.500  ok" in result.stdout
    only(fake("fast", 0.25), fake("slow", 0.75))
    result = invoke("bench")
    assert result.exit_code == 1
    assert "0.750    0.500  OVER" in result.stdout


def test_wrong_answers_are_no_measurement(invoke, only):
    def disagree(quick: bool) -> dict[str, float]:
        raise AssertionError("they disagree")

    only(fake("wrong", 0.1, measure=disagree))
    result = invoke("bench")
    assert result.exit_code == 1
    assert "BAD  they disagree" in result.stdout


def test_a_missing_peer_is_said_and_fails_only_the_check(invoke, only):
    def lack(quick: bool) -> dict[str, float]:
        raise ModuleNotFoundError("No module named 'immutables'")

    only(fake("peerless", 0.1, measure=lack, gate=True))
    result = invoke("bench")
    assert result.exit_code == 0
    assert "not measured: No module named 'immutables'" in result.stdout
    assert invoke("bench", "--check").exit_code == 1


def test_json_carries_versions_cpu_implementation_and_every_figure(invoke, only):
    only(fake("fast", 0.25))
    value = lf.decode(invoke("bench", "--json").stdout_bytes)
    assert value["version"] == lf.__version__
    assert value["implementation"] == lf.implementation()
    assert value["cpu"]
    assert value["cases"] == [
        {
            "name": "fast",
            "what": "what fast is",
            "unit": "s",
            "measured": {"loomfast": 0.25, "peer": 1},
            "ratio": 0.25,
            "limit": 0.5,
            "answers_equal": True,
            "ok": True,
            "reason": "",
        }
    ]


def test_the_check_runs_the_gate_cases_quickly_and_fails_when_a_ratio_breaks(invoke, only):
    asked: list[bool] = []

    def measure(quick: bool) -> dict[str, float]:
        asked.append(quick)
        return {"loomfast": 2.0, "peer": 1.0}

    only(fake("other", 9.0), fake("flat", 0, measure=measure, gate=True))
    result = invoke("bench", "--check")
    assert result.exit_code == 1
    assert set(asked) == {True}
    assert "other" not in result.stdout


def test_the_check_measures_again_before_it_fails(invoke, only):
    seconds = iter([2.0, 0.25])
    only(fake("flat", 0, measure=lambda quick: {"loomfast": next(seconds), "peer": 1.0}, gate=True))
    assert invoke("bench", "--check").exit_code == 0
    assert next(seconds, None) is None


def test_the_check_does_not_try_again_after_a_wrong_answer(invoke, only):
    calls: list[bool] = []

    def disagree(quick: bool) -> dict[str, float]:
        calls.append(quick)
        raise AssertionError("they disagree")

    only(fake("flat", 0, measure=disagree, gate=True))
    assert invoke("bench", "--check").exit_code == 1
    assert len(calls) == 1


def test_the_check_covers_every_map_of_the_state_at_50_000():
    gates = {case.name for case in cases.CASES if case.gate}
    assert gates >= {"emit-flat", "steps-flat", "decisions-flat", "gates-flat"}


def test_an_unknown_case_is_refused_with_the_known_ones(invoke):
    result = invoke("bench", "nope")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no case 'nope' (choose from fnv1a64," in result.stderr


def test_the_list_measures_nothing(invoke):
    result = invoke("bench", "--list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [case.name for case in cases.CASES]


def test_a_long_case_runs_only_when_it_is_named(invoke, only):
    only(fake("fast", 0.25), fake("long", 0.25, long=True))
    assert "what long is" not in invoke("bench").stdout
    assert "what long is" in invoke("bench", "long").stdout
    assert "what long is" in invoke("bench", "--list").stdout


@pytest.mark.parametrize("part", logs.PARTS)
def test_live_logs_of_each_part_fold_on_and_keep_their_older_states(part):
    measured = fold.live_cost(part, (10, 40), rounds=2)
    assert set(measured) == {"k=10", "k=40"}
    assert all(seconds > 0 for seconds in measured.values())


def test_the_flatness_case_fails_for_a_fold_that_copies_its_history(monkeypatch):
    """The check is worth something: a fold whose live commit costs O(history) breaks its ratio."""
    from loomfast import _kernels

    honest = _kernels.fold_events

    def copying(state, events):
        if state is not None:
            dict(state.emits.items())
        return honest(state, events)

    monkeypatch.setattr(_kernels, "fold_events", copying)
    case = next(case for case in cases.CASES if case.name == "emit-flat")
    small = dataclasses.replace(
        case,
        measure=lambda quick: fold.live_cost("emits", (100, 5_000), 2),
        judge=cases.of("k=5000", "k=100"),
    )
    assert cases.run(small).ok is False


def test_crowded_digests_are_all_different_and_share_a_leaf():
    digests = [logs.crowded(n) for n in range(60_000)]
    assert len(set(digests)) == len(digests)
    assert len({digest & 0xFFF for digest in digests}) == 1


def test_the_mixed_log_has_every_kind_and_folds():
    from loomfast import _kernels

    events = list(logs.mixed(_kernels, 2_000))
    state = lf.fold_events(None, events)
    assert state.sequence == 1_999
    assert sum(event.stamp is not None for event in events) / len(events) == pytest.approx(0.5, abs=0.02)
    assert min(map(len, (state.steps, state.decisions, state.gates, state.emits))) > 1


def test_the_drivers_return_the_same_rows_and_are_measured_on_both_tasks():
    measured = driver.drivers(640, 1)
    assert set(measured) == {"apsw fetch", "apsw insert", "sqlite3 fetch", "sqlite3 insert"}
    assert min(measured.values()) > 0


def test_replay_from_sqlite_checks_its_answer_and_measures():
    assert replay.from_sqlite(500, 1)["loomfast"] > 0


def test_parked_executions_are_measured_few_and_many_in_the_same_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kinds = parked.TIMES + parked.MEMORY
    measured = parked.on_sqlite(200, 400, 20, 2, kinds)
    assert set(measured) == {f"{kind} {number}" for kind in kinds for number in (200, 400)}
    assert min(measured.values()) > 0
    assert not list(tmp_path.iterdir())


def test_what_grows_most_with_the_number_of_parked_executions_is_judged():
    measured = {"start 10": 2.0, "wake 10": 1.0, "start 100": 3.0, "wake 100": 4.0}
    assert cases._worst_growth(measured) == 4


async def test_wakes_that_do_not_run_each_effect_once_are_no_measurement(tmp_path, monkeypatch):
    clock = parked._Clock()
    store = await lf.SqliteEventStore.open(tmp_path / "parked.db")
    async with store, lf.WorkflowRuntime(store, clock=clock) as runtime:
        some = parked._Parked(store, runtime, clock, 200)
        await some.park(20, 2)
        await some.play(1, 20)
        parked._ran[7] += 1
        monkeypatch.setattr(parked._ran, "clear", lambda: None)
        with pytest.raises(AssertionError, match="effects ran 41 times for 20 that were due"):
            await some.play(2, 20)


def test_import_cost_is_what_comes_beyond_asyncio():
    cost = startup.import_cost(1)
    assert cost["beyond"] == pytest.approx(cost["loomfast"] - cost["asyncio"])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5, "s", "1.5 s"),
        (2.5e-3, "s", "2.5 ms"),
        (3e-7, "s", "300 ns"),
        (0.0, "s", "0 ns"),
        (1536, "B", "1.54 KB"),
    ],
)
def test_figures_are_written_for_people(value, unit, text):
    assert figure(value, unit) == text
