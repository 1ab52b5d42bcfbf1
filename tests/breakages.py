"""A runtime broken in one place: what a harness must catch.

What lives here: the breakages, each a function that breaks the runtime of this process by a `MonkeyPatch`.
What must not: the harnesses that have to find them (tests/crash, tests/soak).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from loomfast._core.emit_rule import EmitRule, Verdict
from loomfast._kernels import Envelope, encode_digest
from loomfast._runtime.context import WorkflowContext
from loomfast._runtime.effects import LiveStep
from loomfast._runtime.journal import ExecutionJournal
from loomfast.stores import SqliteEventStore

Patch = pytest.MonkeyPatch


def verdict(always: Verdict) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(EmitRule, "judge", lambda self, *emit, inside=False: always)


def the_unsettled_flag_is_off(patch: Patch) -> None:
    patch.setattr(EmitRule, "ended_unsettled", lambda self: None)


def the_in_flight_window_is_off(patch: Patch) -> None:
    true = EmitRule.judge
    patch.setattr(EmitRule, "judge", lambda self, *emit, inside=False: true(self, *emit))
    patch.setattr(EmitRule, "began", lambda self: None)
    patch.setattr(EmitRule, "ended", lambda self: None)


def emits_know_no_segment(patch: Patch) -> None:
    patch.setattr(
        "loomfast._runtime.context.encode_digest", lambda segment, *content: encode_digest(0, *content)
    )


class Forgetful:
    """A state that has forgotten its steps, or its decisions."""

    def __init__(self, state: Any, what: str) -> None:
        self._state = state
        self._what = what

    def __getattr__(self, name: str) -> Any:
        return {} if name == self._what else getattr(self._state, name)


def forgets(what: str) -> Callable[[Patch], None]:
    def broken(patch: Patch) -> None:
        true = WorkflowContext.__init__

        class Journal:
            def __init__(self, journal: ExecutionJournal) -> None:
                self._journal = journal

            def __getattr__(self, name: str) -> Any:
                value = getattr(self._journal, name)
                return Forgetful(value, what) if name == "state" else value

        def init(self: WorkflowContext, journal: ExecutionJournal, deps: Any) -> None:
            true(self, journal, deps)
            self._journal = Journal(journal)  # type: ignore[assignment]  # that is the breakage

        patch.setattr(WorkflowContext, "__init__", init)

    return broken


def drains_do_not_wait(patch: Patch) -> None:
    async def at_once(self: ExecutionJournal) -> None:
        pass

    patch.setattr(ExecutionJournal, "drain", at_once)
    patch.setattr(ExecutionJournal, "outcomes_durable", at_once)


def loses_an_event(patch: Patch) -> None:
    true = ExecutionJournal.commit

    def commit(self: ExecutionJournal, event_type: str, *rest: Any, **more: Any) -> Any:
        if event_type != "C":
            return true(self, event_type, *rest, **more)
        return None

    patch.setattr(ExecutionJournal, "commit", commit)


def attempts_begin_again(patch: Patch) -> None:
    def first(tools: Any, step: Any, key: str, number: int, digest: str) -> Any:
        return LiveStep(tools, step, key, 1, digest)

    patch.setattr("loomfast._runtime.context.LiveStep", first)


def in_doubt_runs_again(patch: Patch) -> None:
    patch.setattr(WorkflowContext, "_park_in_doubt", lambda self, key, phase: None)


def acknowledges_before_it_is_durable(patch: Patch) -> None:
    async def append(store: SqliteEventStore, envelopes: Sequence[Envelope], delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await SqliteEventStore.append_batch(store, envelopes)

    behind: set[asyncio.Task[None]] = set()

    def write(self: SqliteEventStore, envelopes: Sequence[Envelope]) -> None:
        behind.add(asyncio.get_running_loop().create_task(append(self, envelopes, 0.05)))

    patch.setattr(SqliteEventStore, "write", write)


# Those that a process is told of by name.
BY_NAME: dict[str, Callable[[Patch], None]] = {
    "acknowledges-early": acknowledges_before_it_is_durable,
    "executes-steps-again": forgets("steps"),
    "appends-every-emit": verdict(Verdict.STAMPED),
    "serves-every-emit": verdict(Verdict.SERVED),
    "pays-twice": in_doubt_runs_again,
}
