"""What `loomfast demo` claims, computed from what is there afterwards: log, notes of the processes, shop.

Nothing here runs a flow or knows how many events there ought to be, save the one number the demo is about:
the sequence of the gate.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import loomfast

# Where a change that needs a person rests; see the table in `loomfast.examples.migration_guard`.
GATE_SEQUENCE = 10


class Claim(NamedTuple):
    """One thing the demo says, and whether it is so."""

    holds: bool
    text: str


@dataclass
class Notes:
    """What the processes noted: who began which effect, and who saw which sequence become durable."""

    effects: list[tuple[str, int]] = field(default_factory=list)
    durable: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Notes:
        """Read the notes of both processes."""
        notes = cls()
        for text in path.read_bytes().splitlines():
            fact: Any = loomfast.decode(text)
            if "effect" in fact:
                notes.effects.append((fact["effect"], fact["pid"]))
            else:
                notes.durable.setdefault(fact["durable"], []).append(fact["pid"])
        return notes


@dataclass(frozen=True)
class Evidence:
    """Everything the claims are computed from. `pids` are the two processes, in order."""

    events: Sequence[loomfast.Envelope]
    at_the_kill: Sequence[loomfast.Envelope]
    notes: Notes
    pids: tuple[int, int]
    killed_by: int
    shop: Path


def claims(evidence: Evidence) -> list[Claim]:
    """Return every claim with its verdict."""
    return [*_log(evidence), *_effects(evidence), *_patches(evidence), *_shop(evidence)]


def _log(evidence: Evidence) -> list[Claim]:
    last = evidence.at_the_kill[-1] if evidence.at_the_kill else None
    parked = last is not None and (last.sequence, last.event_type) == (GATE_SEQUENCE, "EXECUTION_SUSPENDED")
    kept = list(evidence.events[: len(evidence.at_the_kill)]) == list(evidence.at_the_kill)
    state = loomfast.fold_events(None, evidence.events)
    return [
        Claim(
            evidence.killed_by != 0 and parked,
            f"process 1 was killed with sequence {GATE_SEQUENCE}, its gate, durable",
        ),
        Claim(
            kept and len(evidence.events) > len(evidence.at_the_kill),
            "what it had written was kept as it was",
        ),
        Claim(
            state.status == "completed" and state.output["outcome"] == "applied",
            f"process 2 completed it: the log folds to {state.status!r} at sequence {state.sequence}",
        ),
    ]


def _effects(evidence: Evidence) -> list[Claim]:
    ran = Counter(name for name, _ in evidence.notes.effects)
    logged = Counter(e.payload["stepId"] for e in evidence.events if e.event_type == "STEP_STARTED")
    found = []
    for name, place in (("inspect", 0), ("assess", 0), ("apply", 1)):
        where = [pid for effect, pid in evidence.notes.effects if effect == name]
        numbers = [evidence.pids.index(pid) + 1 for pid in where]
        found.append(
            Claim(
                ran[name] == logged[name] == 1 and where == [evidence.pids[place]],
                f"{name} ran {_times(ran[name])}" + "".join(f", in process {n}" for n in numbers),
            )
        )
    return found


def _patches(evidence: Evidence) -> list[Claim]:
    patches = Counter(
        loomfast.canonical(e.payload) for e in evidence.events if e.event_type == "SURFACE_PATCH"
    )
    steps = {e.payload["key"] for e in evidence.events if e.event_type == "STEP_COMPLETED"}
    repeated = sum(count > 1 for count in patches.values())
    return [
        Claim(
            not repeated and len(patches) == 2 * len(steps),
            f"each of {len(patches)} patches is in the log once, though process 2 ran the flow from its top"
            if not repeated
            else f"{repeated} of {len(patches)} patches are in the log more than once",
        )
    ]


def _shop(evidence: Evidence) -> list[Claim]:
    connection = sqlite3.connect(evidence.shop)
    try:
        columns = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info('customers')")]
        changes = connection.execute("SELECT count(*) FROM schema_changes").fetchone()[0]
    except sqlite3.Error as error:
        return [Claim(False, f"the shop cannot be read: {error}")]
    finally:
        connection.close()
    text = f"the table lost its column, and its book of changes has {_times(changes, 'row', 'rows')}"
    return [Claim("fax" not in columns and changes == 1, text)]


def _times(count: int, one: str = "time", many: str = "times") -> str:
    if one == "time" and count == 1:
        return "once"
    return f"{count} {one if count == 1 else many}"


def describe(event: loomfast.Envelope) -> str:
    """Return what an event says, in a few words."""
    payload: Any = event.payload
    match event.event_type:
        case "EXECUTION_STARTED":
            return f"flow {payload['flowId']}"
        case "STEP_STARTED":
            return f"{payload['key']}, attempt {payload['attempt']}"
        case "STEP_COMPLETED":
            return f"{payload['key']}"
        case "SURFACE_PATCH":
            value = payload["value"]
            return (
                f"{payload['path']} = {value}" if isinstance(value, str) else f"{payload['path']} = {{...}}"
            )
        case "EXECUTION_SUSPENDED":
            return f"waits for {payload['on']!r}"
        case "EXECUTION_RESUMED":
            return f"gate {payload['gate']} passed"
        case "EXECUTION_COMPLETED":
            return f"outcome: {payload['output']['outcome']}"
        case _:
            return "approved" if isinstance(payload, dict) and payload.get("approved") else ""
