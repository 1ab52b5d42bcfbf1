"""`loomfast demo`: real processes, a real SIGKILL, and claims that fail when they are not so."""

from __future__ import annotations

import dataclasses
import re
import sqlite3
from collections.abc import Callable

import pytest

import loomfast as lf
from loomfast.cli.demo_proof import Evidence, Notes, claims

from .conftest import read_log


def test_the_demo_holds_and_says_so(spawn):
    ended = spawn("demo")
    out = ended.out.decode("ascii")
    assert (ended.code, ended.err) == (0, "")
    assert "FAIL" not in out
    assert "\x1b" not in out
    assert re.search(r"^ +10  EXECUTION_SUSPENDED +1 ", out, re.MULTILINE)
    assert re.search(r"^ +11  approval +2 ", out, re.MULTILINE)
    assert "killed: SIGKILL" in out
    for line in (
        "inspect ran once, in process 1",
        "assess ran once, in process 1",
        "apply ran once, in process 2",
    ):
        assert f"ok   {line}" in out
    assert "ok   each of 6 patches is in the log once" in out


def test_the_log_of_the_demo_can_be_kept_and_exported(spawn, tmp_path):
    log = tmp_path / "demo.db"
    ended = spawn("demo", "--db", log)
    assert ended.code == 0
    execution_id = re.search(rb"loomfast export \S+ (\S+)", ended.out)[1].decode()
    events = read_log(log, execution_id)
    assert [event.sequence for event in events] == list(range(17))
    assert (events[10].event_type, events[-1].event_type) == ("EXECUTION_SUSPENDED", "EXECUTION_COMPLETED")
    assert spawn("demo", "--db", log).code == 0  # a second demo in one log has an execution of its own


def test_the_demo_does_not_touch_a_database_of_another_application(spawn, tmp_path):
    path = tmp_path / "shop.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE customers (id)")
    connection.close()
    before = path.read_bytes()
    ended = spawn("demo", "--db", path)
    assert (ended.code, ended.out) == (2, b"")
    assert "is not a loomfast database" in ended.err
    assert path.read_bytes() == before


def test_the_demo_exits_1_when_a_claim_does_not_hold(invoke, monkeypatch):
    monkeypatch.setattr("loomfast.cli.demo_proof.GATE_SEQUENCE", 9)
    result = invoke("demo")
    assert result.exit_code == 1
    assert "FAIL process 1 was killed with sequence 9, its gate, durable" in result.stdout


def test_the_demo_says_when_a_process_does_not_get_where_it_should(invoke, monkeypatch):
    monkeypatch.setattr("loomfast.cli.demo.sys.executable", "/bin/false")
    result = invoke("demo")
    assert result.exit_code == 2
    assert "the process that should start the flow said nothing, and ended" in result.stderr


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """The evidence of one honest demo."""
    import asyncio

    from loomfast.cli.demo import _perform

    folder = tmp_path_factory.mktemp("demo")
    return asyncio.run(_perform(folder / "log.db", "honest", folder / "shop.db", folder / "notes.jsonl"))


def altered(**changes: Callable[[Evidence], object]) -> Callable[[Evidence], Evidence]:
    return lambda honest: dataclasses.replace(
        honest, **{name: make(honest) for name, make in changes.items()}
    )


def with_patch_repeated(evidence: Evidence) -> list[lf.Envelope]:
    """The log as it would be had the re-run appended its first patch again."""
    events = list(evidence.events)
    again = lf.Envelope.make("honest", 13, "SURFACE_PATCH", events[1].payload, 0)
    rest = [
        lf.Envelope.make("honest", event.sequence + 1, event.event_type, event.payload, 0)
        for event in events[13:]
    ]
    return [*events[:13], again, *rest]


LIES = {
    "a patch appended by both runs": altered(events=with_patch_repeated),
    "a step that ran again": altered(
        notes=lambda e: Notes([*e.notes.effects, ("inspect", e.pids[1])], e.notes.durable)
    ),
    "a step that ran nowhere": altered(notes=lambda e: Notes(e.notes.effects[1:], e.notes.durable)),
    "steps that ran in the other process": altered(pids=lambda e: e.pids[::-1]),
    "a kill before the gate was durable": altered(at_the_kill=lambda e: e.at_the_kill[:-1]),
    "a process that was never killed": altered(killed_by=lambda e: 0),
    "an execution that did not end": altered(events=lambda e: e.events[:-1]),
    "a log that was rewritten": altered(
        at_the_kill=lambda e: [*e.at_the_kill[:1], e.at_the_kill[2], *e.at_the_kill[2:]]
    ),
}


def test_all_claims_hold_for_the_honest_evidence(evidence):
    assert all(claim.holds for claim in claims(evidence))


@pytest.mark.parametrize("lie", LIES)
def test_a_claim_fails_for(evidence, lie):
    assert not all(claim.holds for claim in claims(LIES[lie](evidence)))


def test_a_claim_fails_for_a_change_made_twice(evidence, tmp_path):
    shop = tmp_path / "shop.db"
    shop.write_bytes(evidence.shop.read_bytes())
    connection = sqlite3.connect(shop)
    with connection:
        connection.execute("INSERT INTO schema_changes VALUES ('again', 'ALTER TABLE')")
    connection.close()
    assert not all(claim.holds for claim in claims(dataclasses.replace(evidence, shop=shop)))
