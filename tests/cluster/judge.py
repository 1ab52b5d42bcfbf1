"""The judge of a cluster: what a history must not hold.

What lives here: `History`, how it is read from a store that has come to rest, and `judged`. What must not:
processes, and anything that writes.

- Every execution has ended, once, as its log implies: the log is well-formed, its fold is the store's, a
  re-run of its flow is served all of it, it is that of an undisturbed run (`tests/soak`), and cancelled only
  if somebody has asked for that. Nothing is left running, sleeping or set aside, no lease is left, and the
  store is sound as a whole.
- What was acknowledged holds, and no completed step is executed again (`tests/soak/told.py`). Of several who
  start the same id, or answer the same gate, one was told that it did.
- An effect begins again only if its attempt failed on the record, or if its process was disturbed, or lost
  its lease, between the two beginnings. How often that was is counted.
- No event of an older fence stands behind one of a newer.
- Of the occurrences of a schedule, between its first and its last, none is missing, save where `latest`
  leaves out what nobody was there to start; and none is that the trigger does not name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import loomfast as lf
from loomfast._runtime.replay import check_log
from loomfast.stores import EventStore
from loomfast.testing import log_faults
from tests.cluster.agreed import SCHEDULES, Scheduled
from tests.soak.flows import errand_in
from tests.soak.told import OTHERS, PROMISES, Told, effects, promises
from tests.soak.undisturbed import Recorded, differences, undisturbed

PAGE = 1_000


@dataclass
class History:
    """What a cluster has left: testimony, logs by execution, what leases are held, and what is unsound."""

    lines: Sequence[list[Any]] = ()
    logs: dict[str, list[lf.Envelope]] = field(default_factory=dict)
    leases: list[lf.Lease] = field(default_factory=list)
    unsound: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    """What was counted, and what is broken, a sentence each."""

    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


async def history_of(store: EventStore, lines: Sequence[list[Any]]) -> History:
    """Read what a cluster has left in a store that nobody writes to any more."""
    history = History(lines)
    after = 0
    while page := await store.list_executions(after=after, limit=PAGE):
        for summary in page:
            log = history.logs[summary.execution_id] = await store.read(summary.execution_id)
            if await store.fold(summary.execution_id) != lf.fold_events(None, log):
                history.unsound.append(f"{summary.execution_id!r}: the store's fold is not that of its log")
        after = page[-1].position
    history.leases = await store.leases.held(list(history.logs))
    history.unsound += [
        f"{each.execution_id!r} is set aside" for each in await store.recoveries.list() if each.set_aside
    ]
    await lf.verify_store(store, lambda fault: history.unsound.append(f"verify: {fault}"))
    return history


async def judged(history: History) -> Verdict:
    """Judge a history."""
    verdict = Verdict()
    counts, broken = verdict.counts, verdict.broken
    told, starts = _told(history.lines, verdict)
    broken += history.unsound
    broken += (f"the lease of {lease.key!r} is held by {lease.owner}" for lease in history.leases)
    broken += (f"{each!r}: was acknowledged and is lost" for each in told if _lost(told[each], each, history))
    broken += (f"{each!r}: {count} starts were acknowledged" for each, count in starts.items() if count > 1)
    hearing = Hearing(history.lines, told)
    for execution_id, log in history.logs.items():
        counts["events"] += len(log)
        broken += [f"{execution_id!r}: {fault}" async for fault in hearing.of(execution_id, log, counts)]
    counts["executions"] = len(history.logs)
    for schedule in SCHEDULES:
        broken += (
            f"schedule {schedule.schedule_id!r} {fault}" for fault in _missing(schedule, history, counts)
        )
    return verdict


class Hearing:
    """What is known from testimony, held against one log after another."""

    def __init__(self, lines: Sequence[list[Any]], told: dict[str, Told]) -> None:
        self._told = told
        self._beginnings = Beginnings(lines)
        self._asked = {line[1] for line in lines if line[0] == "cancelling"}
        self._cancelled = {line[1] for line in lines if line[0] == "cancelled"}

    async def of(self, execution_id: str, log: list[lf.Envelope], counts: Counter[str]) -> AsyncIterator[str]:
        """Yield what is wrong with one execution."""
        try:
            state = lf.fold_events(None, log)
        except lf.MalformedEventError as error:
            yield str(error)
            return
        counts[f"{state.status} executions"] += 1
        counts["in doubt"] += sum(event.event_type == "EFFECT_INDOUBT" for event in log)
        told = self._told.get(execution_id, Told())
        for fault in (
            *log_faults(log),
            *promises(log, told),
            *effects(log, told),
            *_fences(log),
            *self._beginnings.unexplained(execution_id, log, counts),
            *self._ending(execution_id, state),
        ):
            yield fault
        if state.status == "completed":
            plan = log[0].payload["input"]
            counts["compared"] += 1
            for fault in differences(plan, log, await undisturbed(plan, log)):
                yield fault
        if state.ended is not None:
            divergence = await check_log(errand_in(Recorded(log)), log)
            if divergence is not None:
                yield f"a re-run is not served it: {divergence}"

    def _ending(self, execution_id: str, state: lf.State) -> Iterator[str]:
        if state.ended is None:
            yield _stuck(state)
        elif state.status == "failed":
            yield f"has failed: {state.error}"
        elif state.status == "cancelled" and execution_id not in self._asked:
            yield "was cancelled, and nobody has asked for it"
        if state.status != "cancelled" and execution_id in self._cancelled:
            yield f"its cancel was acknowledged, and it is {state.status}"


def _told(lines: Sequence[list[Any]], verdict: Verdict) -> tuple[dict[str, Told], Counter[str]]:
    told: dict[str, Told] = defaultdict(Told)
    starts: Counter[str] = Counter()
    for word, *said in lines:
        verdict.counts[f"{word} {said[0]}" if word == "disturbed" else word] += 1
        if word == "broken":
            verdict.broken.append(said[0])
        elif word == "started":
            starts[said[0]] += 1
        if word in PROMISES or word in OTHERS:
            found = told[said[0]].hear(word, said[1:])
            verdict.broken += (f"{said[0]!r}: {fault}" for fault in found)
    return dict(told), starts


def _lost(told: Told, execution_id: str, history: History) -> bool:
    return (told.exists or bool(told.committed) or bool(told.begun)) and execution_id not in history.logs


def _stuck(state: lf.State) -> str:
    gate = state.pending
    doubted = [key for key, step in state.steps.items() if step.phase == "in-doubt"]
    if state.status == "running":
        return f"is left running at {state.sequence}"
    if doubted:
        return f"is left in doubt of {doubted}"
    assert gate is not None
    if gate.wake_at is not None:
        return f"sleeps past its time, {gate.wake_at}"
    return f"still waits at gate {gate.ordinal}"


def _fences(log: list[lf.Envelope]) -> Iterator[str]:
    newest = -1
    for event in log:
        fence = (event.metadata or {}).get("fence", -1)
        if fence < newest:
            yield f"{event.event_type} at {event.sequence}, of fence {fence}, stands behind fence {newest}"
        newest = max(newest, fence)


# --- effects that begin again --------------------------------------------------------------------


class Begin(NamedTuple):
    """The beginning of an effect: at which line of the testimony, and in which process."""

    line: int
    pid: int


class Disturbance(NamedTuple):
    """A disturbance of one process, or of all (None), from one line of the testimony to another."""

    kind: str
    pid: int | None
    first: int
    last: int


class Beginnings:
    """The beginnings of effects, and what may explain that one began again."""

    def __init__(self, lines: Sequence[list[Any]]) -> None:
        self._begun: dict[tuple[str, str], list[Begin]] = defaultdict(list)
        self._lost: set[tuple[str, int]] = set()
        self._disturbances: list[Disturbance] = []
        since: dict[tuple[str, int | None], list[int]] = defaultdict(list)
        for number, (word, *said) in enumerate(lines):
            if word == "begin":
                self._begun[said[0], said[1]].append(Begin(number, said[3]))
            elif word == "lost":
                self._lost.add((said[0], said[1]))
            elif word == "disturbed":
                since[said[0], said[1]].append(number)
            elif word == "calm":
                first = since[said[0], said[1]].pop(0)
                self._disturbances.append(Disturbance(said[0], said[1], first, number))
        for (kind, pid), firsts in since.items():
            self._disturbances += (Disturbance(kind, pid, first, len(lines)) for first in firsts)

    def unexplained(self, execution_id: str, log: list[lf.Envelope], counts: Counter[str]) -> Iterator[str]:
        """Yield the effects of an execution that began again without a reason; count the others by theirs."""
        failed = Counter(
            event.payload["key"]
            for event in log
            if event.event_type == "STEP_CANCELLED"
            or (event.event_type == "STEP_FAILED" and not event.payload["typed"])
        )
        for (begun_by, key), begun in self._begun.items():
            if begun_by != execution_id:
                continue
            befallen = []
            for before, after in pairwise(begun):
                kind = self._reason(execution_id, before, after)
                if kind is not None:
                    befallen.append(kind)
                elif failed[key]:
                    failed[key] -= 1
                else:
                    yield (
                        f"step {key!r} began again in process {after.pid}, though nothing had befallen "
                        f"process {before.pid}, where it began at line {before.line}"
                    )
            # Those that failed on the record would have begun again anyway.
            counts.update(f"again after {kind}" for kind in befallen[failed[key] :])

    def _reason(self, execution_id: str, before: Begin, after: Begin) -> str | None:
        for befallen in (before.pid, None):
            for kind, pid, first, last in self._disturbances:
                if pid == befallen and first <= after.line and last >= before.line:
                    return kind
        return "a lost lease" if (execution_id, before.pid) in self._lost else None


# --- schedules -----------------------------------------------------------------------------------


def _missing(schedule: Scheduled, history: History, counts: Counter[str]) -> Iterator[str]:
    step_ms = round(schedule.every_s * 1000)
    found = [
        occurrence.at_ms
        for occurrence in map(lf.occurrence_of, history.logs)
        if occurrence is not None and occurrence.schedule_id == schedule.schedule_id
    ]
    if not found:
        yield "has started nothing"
        return
    for at_ms in found:
        execution_id = lf.occurrence_id(schedule.schedule_id, at_ms)
        if at_ms % step_ms:
            yield f"does not name {execution_id}"
        given = history.logs[execution_id][0].payload["input"]
        if given != [list(act) for act in schedule.plan]:
            yield f"has started {execution_id} with {given}"
    missing = sorted(set(range(min(found), max(found), step_ms)) - set(found))
    counts[f"occurrences of {schedule.schedule_id}"] = len(found)
    counts[f"left out of {schedule.schedule_id}"] = len(missing)
    if schedule.whole:
        yield from (f"has not started {lf.occurrence_id(schedule.schedule_id, at_ms)}" for at_ms in missing)
