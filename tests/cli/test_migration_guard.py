"""The migration-guard example: where it rests, and what it does to a real database."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import loomfast as lf
from loomfast.cli.demo_proof import GATE_SEQUENCE
from loomfast.examples import migration_guard as guard

EXAMPLE = Path(__file__).parents[2] / "examples" / "migration_guard.py"
YES = {"approved": True, "by": "ada"}


@pytest.fixture
def shop(tmp_path: Path) -> str:
    path = str(tmp_path / "shop with ? and #.db")
    guard.create_sample(path)
    return path


def change(shop: str, **members: Any) -> dict[str, Any]:
    return {"database": shop, "table": "customers", "action": "drop", "column": "fax", **members}


def columns(shop: str) -> list[str]:
    with closing(sqlite3.connect(shop)) as connection:
        return guard.columns_of(connection, "customers")


def book(shop: str) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(shop)) as connection:
        return connection.execute("SELECT * FROM schema_changes").fetchall()


async def drive(
    order: dict[str, Any],
    answer: dict[str, Any] | None = None,
    before: list[lf.Envelope] | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[lf.State, list[lf.Envelope]]:
    """Run the flow until it rests, answering its gate; `before` is a log it recovers from."""
    async with (
        lf.MemoryEventStore() as store,
        lf.WorkflowRuntime(store, flows=[guard.migration_guard]) as runtime,
    ):
        if before is None:
            handle = await runtime.start(guard.migration_guard, order, execution_id="e")
        else:
            await store.append_batch(before)
            handle = await runtime.recover("e")
        state = await handle.rest()
        if answer is not None and state.status == "suspended":
            meanwhile()
            handle = await runtime.resume("e", "approval", answer)
            await handle.result()
            state = await handle.rest()
        return state, await store.read("e")


async def test_a_risky_change_rests_at_sequence_10_with_the_events_its_table_lists(shop):
    state, events = await drive(change(shop))
    assert (state.status, state.sequence, state.pending.on) == ("suspended", GATE_SEQUENCE, "approval")
    listed = [
        line.split()[:2]
        for line in guard.__doc__.splitlines()
        if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert [[str(e.sequence), e.event_type] for e in events] == listed[: len(events)]
    assert "fax" in columns(shop)


@pytest.mark.parametrize("kept", [1, 2, 4, 5, 6, 8, 9, 10, 11])
async def test_a_rerun_from_any_point_between_steps_rests_at_sequence_10_too(shop, kept):
    _, events = await drive(change(shop))
    state, again = await drive(change(shop), before=events[:kept])
    assert (state.status, state.sequence) == ("suspended", 10)
    assert [event.event_type for event in again] == [event.event_type for event in events]


async def test_approved_it_applies_once_and_ends_at_sequence_16(shop):
    state, events = await drive(change(shop), YES)
    assert (state.status, state.sequence) == ("completed", 16)
    assert state.output == {"outcome": "applied", "statement": 'ALTER TABLE "customers" DROP COLUMN "fax"'}
    assert columns(shop) == ["id", "name"]
    assert book(shop) == [("e", 'ALTER TABLE "customers" DROP COLUMN "fax"')]
    listed = [
        line.split()[1]
        for line in guard.__doc__.splitlines()
        if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert [event.event_type for event in events] == listed


async def test_a_death_between_the_change_and_its_record_changes_nothing_twice(shop):
    _, events = await drive(change(shop), YES)
    state, again = await drive(change(shop), before=events[:14])
    assert state.status == "completed"
    assert again[14].payload["attempt"] == 2
    assert len(book(shop)) == 1


async def test_rejected_it_leaves_the_table_alone(shop):
    state, _ = await drive(change(shop), {"approved": False, "by": "ada"})
    assert state.output == {"outcome": "rejected", "by": "ada"}
    assert "fax" in columns(shop)


async def test_a_harmless_change_asks_nobody(shop):
    state, _ = await drive(change(shop, action="add", column="email", type="TEXT"))
    assert state.output["outcome"] == "applied"
    assert columns(shop) == ["id", "name", "fax", "email"]


async def test_more_values_than_were_approved_are_not_lost(shop):
    def meanwhile() -> None:
        with closing(sqlite3.connect(shop)) as connection, connection:
            connection.execute("UPDATE customers SET fax = '+49 30 1'")

    state, _ = await drive(change(shop), YES, meanwhile=meanwhile)
    assert state.output["outcome"] == "refused"
    assert "gained values" in state.output["reason"]
    assert "fax" in columns(shop)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"table": "nope"}, "has no table 'nope'"),
        ({"column": "nope"}, "column 'nope' is not there"),
        ({"action": "add", "type": "TEXT"}, "column 'fax' is already there"),
        ({"database": "/nowhere/shop.db"}, "unable to open database file"),
        ({"action": "add", "column": "x", "type": "TEXT; DROP TABLE customers"}, "one statement at a time"),
    ],
)
async def test_a_change_that_makes_no_sense_is_refused_and_says_why(shop, members, reason):
    state, _ = await drive(change(shop, **members), YES)
    assert state.output["outcome"] == "refused"
    assert reason in state.output["reason"]
    assert columns(shop) == ["id", "name", "fax"]


@pytest.mark.parametrize("members", [{"action": "rename"}, {"table": ""}, {"column": 7}, {"action": "add"}])
async def test_a_change_that_is_not_one_is_refused_before_anything_is_logged(shop, members):
    async with lf.MemoryEventStore() as store, lf.WorkflowRuntime(store) as runtime:
        with pytest.raises(lf.InputValidationError):
            await runtime.start(guard.migration_guard, change(shop, **members))
        assert await store.list_executions() == []


@pytest.mark.parametrize("answer", [True, {"approved": "yes", "by": "ada"}, {"approved": True}])
async def test_an_answer_that_is_not_one_is_refused_and_the_gate_stays_open(shop, answer):
    async with lf.MemoryEventStore() as store, lf.WorkflowRuntime(store) as runtime:
        handle = await runtime.start(guard.migration_guard, change(shop))
        await handle.rest()
        with pytest.raises(lf.InputValidationError):
            await runtime.resume(handle.execution_id, "approval", answer)
        assert (await handle.rest()).sequence == 10


def example(*args: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLE, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_parks_a_change_and_another_process_answers_it(tmp_path):
    shop = str(tmp_path / "shop.db")
    example("sample", shop)
    parked = example("change", shop, "customers", "drop", "fax")
    assert "60 of 240 rows lose a value" in parked
    execution_id = parked.split()[parked.split().index("yes") - 1]
    assert "applied" in example("answer", shop, execution_id, "yes", "--by", "ada")
    assert columns(shop) == ["id", "name"]
