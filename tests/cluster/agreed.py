"""What the processes of a cluster agree on: where testimony goes, schedules, and what each execution does.

What lives here: names, plans and schedules. What must not: anything that runs.

Testimony is that of `tests/soak/testimony.py`, with these further words:

    lost id pid               this process has lost its lease on an execution
    cancelling id             somebody is about to cancel it
    cancelled id              the cancel returned
    disturbed kind pid        this process is about to be disturbed; pid is null for all of them
    calm kind pid             and this is over, its lease time included
    process pid name          a process was started
    closed pid                it was ended in order
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from loomfast import CatchUp
from tests.soak.flows import ACTS, Plan, plan_of

# The variable of the environment that names the file of the testimony.
TESTIMONY = "LOOMFAST_CLUSTER_TESTIMONY"

SLEEP_MS = 1_500
# Work and waiting, where processes are lost in the middle, more often than emits.
WEIGHTS = ACTS | {"note": 3, "work": 5, "thread": 2, "stream": 2, "sleep": 2}


class Scheduled(NamedTuple):
    """A schedule of the app. Those that are `whole` miss nothing, whatever happens to the workers."""

    schedule_id: str
    every_s: float
    catch_up: CatchUp
    whole: bool
    plan: Plan


SCHEDULES = (
    Scheduled("made-up", 2, 1_000, True, [("note", "tell"), ("work", "look")]),
    Scheduled("on-time", 3, "skip", True, [("once", "ask"), ("sleep", 0.05), ("note", "ask")]),
    Scheduled("latest", 1.5, "latest", False, [("work", "tell")]),
)
# How late an occurrence of "on-time" may start.
GRACE_S = 3_600


def plan_for(seed: int, execution_id: str) -> Plan:
    """Return what the execution of this id does, whoever starts it."""
    return plan_of(Random(f"{seed}/{execution_id}"), WEIGHTS, sleep_ms=SLEEP_MS)
