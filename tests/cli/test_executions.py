"""`loomfast list` and `loomfast show`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import loomfast as lf
from loomfast.stores import EventStore
from tests.stores.whole import fill

from .conftest import log_of, write_log

LISTED = """\
first  guard  suspended  sequence 3  position 1
x  guard  running  sequence 11  position 2
s  guard  completed  sequence 10  position 3
second  guard  suspended  sequence 3  position 4
third  guard  suspended  sequence 3  position 5
cut  guard  running  sequence 11  position 6
fork  guard  running  sequence 5  position 7
fork-2  guard  running  sequence 3  position 8
"""


def at(path: Path | str, act: Callable[[EventStore], Coroutine[Any, Any, None]]) -> Path:
    """Do something to a store, and close it. Returns its path."""

    async def run() -> None:
        async with await lf.open_store(str(path)) as store:
            await act(store)

    asyncio.run(run())
    return Path(path)


def write_events(path: Path, execution_id: str, *events: tuple[str, Any]) -> Path:
    """Write a log behind its start, a second between two events."""
    start = ("EXECUTION_STARTED", {"flowId": "shop", "flowVersion": "2", "input": None})
    write_log(
        path,
        [
            lf.Envelope.make(execution_id, place, *event, 1_700_000_000_000 + place * 1_000)
            for place, event in enumerate([start, *events])
        ],
    )
    return path


def step_started(key: str, attempt: int = 1) -> tuple[str, Any]:
    return "STEP_STARTED", {"key": key, "stepId": key, "attempt": attempt, "inputDigest": "0" * 16}


def shown(result: Any) -> list[str]:
    assert (result.exit_code, result.stderr) == (0, "")
    lines: list[str] = result.stdout.splitlines()
    return lines


# --- list -----------------------------------------------------------------------------------------


def test_executions_are_listed_oldest_first_without_those_that_hold_no_event(invoke, tmp_path):
    assert invoke("list", at(tmp_path / "a.db", fill)).stdout == LISTED


def test_the_listing_is_read_page_by_page(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr("loomfast.cli.executions.PAGE", 3)
    assert invoke("list", at(tmp_path / "a.db", fill)).stdout == LISTED
    limited = invoke("list", tmp_path / "a.db", "--limit", 4)
    assert limited.stdout.splitlines() == LISTED.splitlines()[:4]


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (("--status", "suspended"), ["first", "second", "third"]),
        (("--status", "suspended", "--limit", 2), ["first", "second"]),
        (("--status", "suspended", "--after", 1), ["second", "third"]),
        (("--after", 6), ["fork", "fork-2", "e"]),
        (("--after", 2**70), []),
        (("--flow", "shop"), ["e"]),
        (("--flow", "shop", "--status", "completed"), []),
        (("--flow", "guard", "--after", 4, "--limit", 1), ["third"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_listing_is_narrowed_by_status_flow_limit_and_position(invoke, tmp_path, options, ids):
    at(tmp_path / "a.db", fill)
    write_events(tmp_path / "a.db", "e", ("EXECUTION_CANCELLED", {"reason": None}))
    lines = shown(invoke("list", tmp_path / "a.db", *options, "--json"))
    assert [json.loads(line)["executionId"] for line in lines] == ids


def test_a_line_of_json_holds_the_same_facts(invoke, tmp_path):
    write_events(tmp_path / "a.db", "a\ud800\n", ("note", 1))
    assert lf.decode(invoke("list", tmp_path / "a.db", "--json").stdout_bytes) == {
        "executionId": "a\ud800\n",
        "flowId": "shop",
        "status": "running",
        "lastSequence": 1,
        "position": 1,
    }
    line = rb"a\ud800\n  shop  running  sequence 1  position 1"
    assert invoke("list", tmp_path / "a.db").stdout_bytes == line + b"\n"


@pytest.mark.parametrize("options", [("--status", "lost"), ("--limit", 0), ("--after", -1)])
def test_options_that_make_no_sense_are_refused(invoke, tmp_path, options):
    result = invoke("list", at(tmp_path / "a.db", fill), *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert options[0] in result.stderr


@pytest.mark.parametrize("command", [("list",), ("show", "x")], ids=lambda command: command[0])
def test_looking_neither_makes_a_database_nor_changes_one(invoke, tmp_path, command):
    name, *ids = command
    result = invoke(name, tmp_path / "none.db", *ids)
    assert result.exit_code == 2
    assert "no loomfast store is there" in result.stderr
    assert list(tmp_path.iterdir()) == []
    before = at(tmp_path / "a.db", fill).read_bytes()
    assert invoke(name, tmp_path / "a.db", *ids).exit_code == 0
    assert (tmp_path / "a.db").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.db"]


def test_a_store_on_postgresql_is_listed_and_shown_by_its_url(invoke, postgres_server):
    start = {"flowId": "seen-by-listing", "flowVersion": "1", "input": None}
    event = lf.Envelope.make("seen-by-listing-1", 0, "EXECUTION_STARTED", start, 0)
    at(postgres_server.dsn, lambda store: store.append(event))
    (line,) = shown(invoke("list", postgres_server.dsn, "--flow", "seen-by-listing"))
    assert line.startswith("seen-by-listing-1  seen-by-listing  running  sequence 0  position ")
    assert shown(invoke("show", postgres_server.dsn, "seen-by-listing-1", "--events"))[3:] == [
        "sequence    0",
        "0  1970-01-01T00:00:00.000Z  EXECUTION_STARTED",
    ]


# --- show -----------------------------------------------------------------------------------------


def test_what_is_parked_is_shown_with_the_gate_it_waits_at(invoke, tmp_path):
    gate = {"gate": 0, "on": "approve", "correlationKey": "k-1", "wakeAt": 1_700_000_060_500}
    path = write_events(tmp_path / "a.db", "order-7", ("EXECUTION_SUSPENDED", gate))
    assert shown(invoke("show", path, "order-7")) == [
        "execution   order-7",
        "flow        shop, version 2",
        "status      suspended",
        "sequence    1",
        "gate        0 on approve, correlation key k-1, wakes 2023-11-14T22:14:20.500Z (1700000060500 ms)",
    ]
    assert json.loads(invoke("show", path, "order-7", "--json").stdout) == {
        "executionId": "order-7",
        "flowId": "shop",
        "flowVersion": "2",
        "status": "suspended",
        "lastSequence": 1,
        "gate": {
            "on": "approve",
            "ordinal": 0,
            "correlationKey": "k-1",
            "wakeAt": 1_700_000_060_500,
            "wakeTime": "2023-11-14T22:14:20.500Z",
            "answered": False,
        },
        "steps": [],
        "crashes": 0,
        "setAside": None,
        "branch": None,
    }


def test_an_answer_that_nobody_has_acted_on_is_told(invoke, tmp_path):
    path = write_events(tmp_path / "a.db", "e", ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}), ("go", 1))
    assert shown(invoke("show", path, "e"))[-1] == "gate        0 on go, answered"


def test_a_time_beyond_the_calendar_is_shown_in_milliseconds(invoke, tmp_path):
    gate = {"gate": 0, "on": "go", "wakeAt": 2**62}
    path = write_events(tmp_path / "a.db", "e", ("EXECUTION_SUSPENDED", gate))
    assert shown(invoke("show", path, "e"))[-1] == f"gate        0 on go, wakes at {2**62} ms"
    assert json.loads(invoke("show", path, "e", "--json").stdout)["gate"]["wakeTime"] is None


def test_steps_that_failed_or_are_in_doubt_are_shown_and_no_others(invoke, tmp_path):
    declined = {"type": "Declined", "message": "no\nfunds", "data": {"code": 7}}
    path = write_events(
        tmp_path / "a.db",
        "e",
        step_started("fetch"),
        ("STEP_COMPLETED", {"key": "fetch", "output": 1}),
        step_started("pay", 2),
        ("STEP_FAILED", {"key": "pay", "typed": True, "error": declined}),
        step_started("mail"),
        ("EFFECT_INDOUBT", {"key": "mail"}),
        step_started("pack"),
    )
    assert shown(invoke("show", path, "e"))[4:] == [
        "step        mail  in-doubt, attempt 1",
        r"step        pay  failed, attempt 2: Declined: no\nfunds",
    ]
    assert json.loads(invoke("show", path, "e", "--json").stdout)["steps"] == [
        {"key": "mail", "phase": "in-doubt", "sequence": 6, "attempt": 1},
        {"key": "pay", "phase": "failed", "sequence": 4, "attempt": 2, "error": declined},
    ]


@pytest.mark.parametrize(
    ("event", "line", "name"),
    [
        (("EXECUTION_COMPLETED", {"output": {"n": [1, None]}}), 'output      {"n":[1,null]}', "output"),
        (("EXECUTION_FAILED", {"error": {"type": "T", "message": "m"}}), "error       T: m", "error"),
        (("EXECUTION_CANCELLED", {"reason": "enough"}), 'reason      "enough"', "reason"),
    ],
    ids=["output", "error", "reason"],
)
def test_what_has_ended_is_shown_with_how_it_ended(invoke, tmp_path, event, line, name):
    path = write_events(tmp_path / "a.db", "e", event)
    assert shown(invoke("show", path, "e"))[4:] == [line]
    fact = json.loads(invoke("show", path, "e", "--json").stdout)
    assert fact[name] == event[1][name]
    assert {"output", "error", "reason"} & fact.keys() == {name}


def test_crashes_and_why_something_is_set_aside_are_shown(invoke, tmp_path):
    """F16: the account of what kills its process."""
    path = write_events(tmp_path / "a.db", "e", step_started("boom"))
    at(path, lambda store: store.recoveries.put(lf.Recovery("e", 3, 0, False, "3 runs in a row crashed")))
    assert shown(invoke("show", path, "e"))[4:] == [
        "crashes     3",
        "set aside   3 runs in a row crashed",
    ]
    fact = json.loads(invoke("show", path, "e", "--json").stdout)
    assert (fact["crashes"], fact["setAside"]) == (3, "3 runs in a row crashed")


def test_a_branch_is_shown_with_where_it_was_cut(invoke, tmp_path):
    path = at(tmp_path / "a.db", fill)
    assert shown(invoke("show", path, "fork-2"))[-1] == "branch      deeper of x, cut from fork at 3"
    assert shown(invoke("show", path, "x"))[-1] == "branch      origin, the main one"
    assert json.loads(invoke("show", path, "fork-2", "--json").stdout)["branch"] == {
        "name": "deeper",
        "originId": "x",
        "parentId": "fork",
        "cut": 3,
        "main": False,
    }


def test_events_are_a_line_each_with_what_they_are_about(invoke, tmp_path):
    path = write_events(
        tmp_path / "a.db",
        "e",
        step_started("pay"),
        ("note", {"n": 1}),
        ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}),
    )
    assert shown(invoke("show", path, "e", "--events"))[5:] == [
        "0  2023-11-14T22:13:20.000Z  EXECUTION_STARTED",
        "1  2023-11-14T22:13:21.000Z  STEP_STARTED  pay",
        "2  2023-11-14T22:13:22.000Z  note",
        "3  2023-11-14T22:13:23.000Z  EXECUTION_SUSPENDED  go",
    ]
    facts = [json.loads(line) for line in shown(invoke("show", path, "e", "--events", "--json"))]
    assert facts[0]["executionId"] == "e"
    assert facts[2] == {
        "sequence": 1,
        "eventType": "STEP_STARTED",
        "subject": "pay",
        "timestamp": 1_700_000_001_000,
        "time": "2023-11-14T22:13:21.000Z",
    }


def test_a_log_longer_than_a_page_is_shown_whole(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr("loomfast.cli.show.PAGE_EVENTS", 4)
    write_log(tmp_path / "a.db", log_of("e", notes=11))
    lines = shown(invoke("show", tmp_path / "a.db", "e", "--events", "--json"))[1:]
    assert [json.loads(line)["sequence"] for line in lines] == list(range(13))


def test_a_truncated_log_is_shown_from_its_snapshot_with_the_events_that_are_left(invoke, tmp_path):
    lines = shown(invoke("show", at(tmp_path / "a.db", fill), "cut", "--events"))
    assert lines[3] == "sequence    11"
    assert [line.split()[0] for line in lines[4:]] == ["0", "7", "8", "9", "10", "11"]


def test_an_unknown_execution_is_a_one_line_error_that_names_the_listing(spawn, tmp_path):
    ended = spawn("show", at(tmp_path / "a.db", fill), "unborn")
    assert (ended.code, ended.out) == (2, b"")
    assert ended.err == "loomfast: no execution 'unborn' (loomfast list DB names those there are)\n"
