"""What the driver knows of an execution, and so what it may tell a worker to do about it.

What lives here: `Expected`, one execution as the driver has heard of it. What must not: processes.

The driver hears of durable facts only, and may have missed the last ones before a kill. What it has not heard
of for a while is `stale`: a worker is told to look. Every command may be repeated: a start is start-once, an
answer has a `resume_id`, a gate or a step in doubt that is settled by now refuses the second one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tests.soak.flows import ANSWER, ONCE, Plan
from tests.soak.undisturbed import answer_to

# How long after a command failed, and how long without news, before a worker is told to look.
AGAIN_S = 0.1
SILENCE_S = 1.0
ENDS = ("EXECUTION_COMPLETED", "EXECUTION_FAILED", "EXECUTION_CANCELLED")
# Behind these a log may be cut for a fork.
CUTS = (
    "note",
    "DECISION_RECORDED",
    "STEP_STARTED",
    "STEP_COMPLETED",
    "EXECUTION_SUSPENDED",
    "EXECUTION_RESUMED",
)


@dataclass
class Expected:
    """One execution. `plan` is None for a fork: it brings its own, and may never have been made."""

    execution_id: str
    plan: Plan | None
    exists: bool = False
    ended: bool = False
    stale: bool = False
    gate: list[Any] | None = None
    doubted: str | None = None
    sent: tuple[Any, ...] | None = None
    at_s: float = field(default_factory=time.monotonic)
    once: dict[str, str | None] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)

    def hear(self, word: str, said: list[Any]) -> None:
        """Take in a line of testimony about this execution."""
        self.at_s = time.monotonic()
        if word in ("started", "existed"):
            self.exists = True
        elif word == "forked":
            self.exists, self.ended = True, False
        elif word == "begin" and said[0].startswith(ONCE):
            self.once.setdefault(said[0], None)
        elif word == "end" and said[0].startswith(ONCE):
            self.once[said[0]] = said[1]
        elif word == "committed":
            self._committed(*said)
        elif word == "failed":
            self.stale = True
            self.at_s += AGAIN_S - SILENCE_S
        elif word == "absent":
            self.exists, self.stale, self.sent = False, False, None
            self.ended = self.plan is None  # whoever was to fork it is dead
        elif word == "state":
            status, self.gate, doubted = said
            self.exists, self.stale, self.sent = True, False, None
            self.ended = status not in ("running", "suspended")
            self.doubted = doubted[0] if doubted else None
            if status == "running":
                self.gate = self.doubted = None

    def _committed(self, sequence: int, kind: str, checksum: int, payload: Any) -> None:
        self.exists = True
        if kind in CUTS:
            self.cuts.append(sequence)
        if kind in ENDS:
            self.ended = True
        elif kind == "EXECUTION_SUSPENDED":
            self.gate = [payload["gate"], payload["on"], payload.get("wakeAt")]
        elif kind == "EXECUTION_RESUMED":
            self.gate = None
        elif kind == "EFFECT_INDOUBT":
            self.doubted = payload["key"]
        elif kind in ("STEP_COMPLETED", "STEP_CANCELLED") and payload["key"] == self.doubted:
            self.doubted = None

    def forget_commands(self) -> None:
        """Whoever was told something is dead: whether it was done is not known."""
        self.sent, self.stale = None, True
        self.at_s = 0.0

    def command(self) -> tuple[Any, ...] | None:
        """Return what a worker should be told now, None if nothing; it is then taken as told."""
        silent = time.monotonic() - self.at_s > SILENCE_S
        wanted: tuple[Any, ...] | None = None
        if not self.exists and self.plan is not None:
            wanted = ("start", self.execution_id, self.plan)
        elif self.stale:
            wanted = ("look", self.execution_id) if silent else None
        elif self.doubted is not None:
            output = self.once.get(self.doubted) or "unknown"
            released = self.doubted not in self.once  # it has not begun
            wanted = ("resolve", self.execution_id, self.doubted, None if released else output)
        elif self.gate is not None and self.gate[2] is None:
            wanted = ("answer", self.execution_id, ANSWER, self.gate[0], answer_to(self.gate[0]))
        elif self.gate is not None and self.gate[2] <= time.time() * 1000:
            wanted = ("fire", self.execution_id)
        if self.ended or wanted is None or wanted == self.sent:
            if silent and not self.ended and self.exists:
                self.stale = True
            return None
        if wanted[0] == "look":
            self.at_s = time.monotonic()
        self.sent = wanted
        return wanted
