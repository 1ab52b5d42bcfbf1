"""When a flow-level emit is served, appended with a stamp, or appended without: ADR 0102, D2 and D4.

No I/O, no clock, no event loop: one object per run, fed by the context.

Theory of operation
-------------------
A flow re-runs from the top, so a re-run makes again every emit that the log already holds. The rule serves
(appends nothing) only what LOGGED facts prove to be a replay; anything else is appended, because a duplicate
is acceptable and a lost emit is not.

The log holds, for each identity (segment, event type, payload), how many STAMPED emits it has: `logged`.
This run counts how many of that identity it has made so far: `n`. Then

    served   iff  logged > n   and no syscall of this segment was live
    stamped  iff  n >= logged  and nothing of this context is executing  and nothing ended unsettled

Worked example. The log holds one stamped `note` in segment 0, then a gate. The re-run emits `note` (n = 0,
logged = 1: served), emits `note` again (n = 1, logged = 1: appended, stamped, logged becomes 2), passes the
gate (segment 1: a new identity altogether).

Why three guards, each with a test that fails without it:

- live guard: a deploy inserts a live step before identical content; the run has left what the log proves.
- unsettled flag: after an outcome that a re-run does not serve (an untyped failure, a timeout, ...) the next
  run may take another path; a stamp made now could absorb an emit of that other path.
- in-flight window: an emit made while an effect or decider executes may come from inside it, and does not
  recur when the step is served. Nor does one from a task that an effect left running behind it (`inside`).

Timing decides only between stamped and unstamped, and an unstamped emit can only cause a later duplicate.
"""

from __future__ import annotations

import enum


class Verdict(enum.Enum):
    """What becomes of one emit."""

    SERVED = "served"
    STAMPED = "stamped"
    UNSTAMPED = "unstamped"


class EmitRule:
    """The emit rule of one run.

    `segment`: gate passthroughs this run has consumed. `segment_live`: whether a syscall of this segment was
    executed live. `unsettled`: whether a step or decider of this run ended in an outcome that a re-run does
    not serve; sticky. `in_flight`: effects and deciders of this context that have not themselves ended.
    """

    __slots__ = ("_made", "in_flight", "segment", "segment_live", "unsettled")

    def __init__(self) -> None:
        self.segment = 0
        self.segment_live = False
        self.unsettled = False
        self.in_flight = 0
        self._made: dict[int, int] = {}

    def judge(self, digest: int, logged: int, *, inside: bool = False) -> Verdict:
        """Judge the next emit of this identity; `logged` is the number of stamped ones in the log.

        `inside`: it is known to come from an effect or decider, or from what one left running behind it.
        """
        n = self._made.get(digest, 0)
        self._made[digest] = n + 1
        if logged > n and not self.segment_live:
            return Verdict.SERVED
        if n >= logged and self.in_flight == 0 and not inside and not self.unsettled:
            return Verdict.STAMPED
        return Verdict.UNSTAMPED

    def syscall_live(self) -> None:
        """A step was not served, or a decider is being invoked."""
        self.segment_live = True

    def gate_passed(self) -> None:
        """A gate let this run through: the next segment begins, with nothing live in it yet."""
        self.segment += 1
        self.segment_live = False

    def ended_unsettled(self) -> None:
        """A step or decider of this run ended, for the flow, in an outcome that a re-run does not serve."""
        self.unsettled = True

    def began(self) -> None:
        """An effect or decider begins to execute."""
        self.in_flight += 1

    def ended(self) -> None:
        """An effect or decider has itself ended, whatever its caller gave up on before."""
        self.in_flight -= 1
