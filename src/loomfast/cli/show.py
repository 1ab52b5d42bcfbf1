"""`loomfast show`: what one execution is, where it stands, and why it is no further."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import click

import loomfast
from loomfast import _events as ev
from loomfast._runtime.clock import moment
from loomfast._runtime.loading import StateLoader
from loomfast.cli.output import CommandError, Whole
from loomfast.stores import EventStore

# Events read from the store at a time.
PAGE_EVENTS = 2_000

# What an execution that ended this way has to say.
_ENDINGS = {ev.COMPLETED: "output", ev.FAILED: "error", ev.CANCELLED: "reason"}


@click.command("show")
@click.argument("db")
@click.argument("execution_id")
@click.option("--events", is_flag=True, help="Also print a line for each event of its log.")
@click.option("--json", "as_json", is_flag=True, help="Print lines of JSON.")
def show(db: str, execution_id: str, *, events: bool, as_json: bool) -> None:
    """Show one execution: its flow and status, the open gate, steps in trouble, crashes, how it ended.

    DB is the path of a SQLite file, or a postgresql:// URL.
    """
    with Whole() as out:
        asyncio.run(_show(db, execution_id, out, events=events, as_json=as_json))


async def _show(db: str, execution_id: str, out: Whole, *, events: bool, as_json: bool) -> None:
    async with await loomfast.open_store(db, create=False) as store:
        state = await StateLoader(store).find(execution_id)
        if state is None:
            raise CommandError(f"no execution {execution_id!r}", "loomfast list DB names those there are")
        account = await store.recoveries.get(execution_id)
        facts = _facts(state, account, await store.branches.branch_of(execution_id))
        if as_json:
            out.line(loomfast.encode(facts))
        else:
            for name, text in _lines(facts):
                out.text(f"{name:<12}{text}")
        if events:
            async for event in _log(store, execution_id, state.sequence):
                fact = _event(event)
                out.line(loomfast.encode(fact)) if as_json else out.text(_event_line(fact))


# --- the execution --------------------------------------------------------------------------------


def _facts(
    state: loomfast.State, account: loomfast.Recovery | None, branch: loomfast.Branch | None
) -> dict[str, Any]:
    """Return what is told of an execution, as plain JSON values."""
    facts: dict[str, Any] = {
        "executionId": state.execution_id,
        "flowId": state.flow_id,
        "flowVersion": state.flow_version,
        "status": state.status,
        "lastSequence": state.sequence,
        "gate": _gate(state),
        "steps": [_step(str(key), step) for key, step in sorted(state.steps.items()) if _in_trouble(step)],
        "crashes": 0 if account is None else account.crashes,
        "setAside": None if account is None else account.set_aside,
        "branch": None if branch is None else _branch(branch),
    }
    if state.status in _ENDINGS:
        name = _ENDINGS[state.status]
        facts[name] = getattr(state, name)
    return facts


def _gate(state: loomfast.State) -> dict[str, Any] | None:
    gate = state.pending
    if gate is None:
        return None
    return {
        "on": gate.on,
        "ordinal": gate.ordinal,
        "correlationKey": gate.correlation_key,
        "wakeAt": gate.wake_at,
        "wakeTime": None if gate.wake_at is None else moment(gate.wake_at),
        "answered": gate.answer is not None,
    }


def _in_trouble(step: Any) -> bool:
    return step.phase in (ev.FAILED, ev.IN_DOUBT)


def _step(key: str, step: Any) -> dict[str, Any]:
    fact = {"key": key, "phase": step.phase, "sequence": step.sequence, "attempt": step.attempt}
    return {**fact, "error": step.error} if step.phase == ev.FAILED else fact


def _branch(branch: loomfast.Branch) -> dict[str, Any]:
    return {
        "name": branch.name,
        "originId": branch.origin_id,
        "parentId": branch.parent_id,
        "cut": branch.cut,
        "main": branch.main,
    }


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what there is to say to a person: a name and a text each."""
    yield "execution", facts["executionId"]
    yield "flow", f"{facts['flowId']}, version {facts['flowVersion']}"
    yield "status", facts["status"]
    yield "sequence", str(facts["lastSequence"])
    if facts["gate"] is not None:
        yield "gate", _gate_text(facts["gate"])
    for step in facts["steps"]:
        said = f": {_error_text(step['error'])}" if "error" in step else ""
        yield "step", f"{step['key']}  {step['phase']}, attempt {step['attempt']}{said}"
    if "output" in facts:
        yield "output", _json_text(facts["output"])
    if "error" in facts:
        yield "error", _error_text(facts["error"])
    if "reason" in facts:
        yield "reason", _json_text(facts["reason"])
    if facts["crashes"]:
        yield "crashes", str(facts["crashes"])
    if facts["setAside"] is not None:
        yield "set aside", facts["setAside"]
    if facts["branch"] is not None:
        yield "branch", _branch_text(facts["branch"])


def _gate_text(gate: dict[str, Any]) -> str:
    text = f"{gate['ordinal']} on {gate['on']}"
    if gate["correlationKey"] is not None:
        text += f", correlation key {gate['correlationKey']}"
    if gate["wakeAt"] is not None:
        text += f", wakes {_time_text(gate['wakeAt'], gate['wakeTime'])}"
    return text + (", answered" if gate["answered"] else "")


def _branch_text(branch: dict[str, Any]) -> str:
    text: str = branch["name"]
    if branch["parentId"] is not None:
        text += f" of {branch['originId']}, cut from {branch['parentId']} at {branch['cut']}"
    return text + (", the main one" if branch["main"] else "")


def _error_text(error: dict[str, Any]) -> str:
    return f"{error['type']}: {error['message']}"


def _time_text(ms: int, time: str | None) -> str:
    return f"at {ms} ms" if time is None else f"{time} ({ms} ms)"


def _json_text(value: object) -> str:
    return loomfast.encode(value).decode()


# --- its log --------------------------------------------------------------------------------------


async def _log(store: EventStore, execution_id: str, last: int) -> AsyncIterator[loomfast.Envelope]:
    """Yield the events up to `last` that are there, a page at a time: a log may have been truncated."""
    first = 0
    while first <= last:
        through = 0 if first == 0 else min(first + PAGE_EVENTS - 1, last)
        try:
            page = await store.read_range(execution_id, first, through)
        except loomfast.PrefixTruncatedError as truncated:
            first = truncated.first_available
            continue
        for event in page:
            yield event
        first = through + 1


def _event(event: loomfast.Envelope) -> dict[str, Any]:
    return {
        "sequence": event.sequence,
        "eventType": event.event_type,
        "subject": _subject(event),
        "timestamp": event.timestamp,
        "time": moment(event.timestamp),
    }


def _subject(event: loomfast.Envelope) -> str | None:
    """Return what the event is about: a step's key, a decision's id, what a gate waits for."""
    if event.kind == ev.DOMAIN:
        return None
    if event.kind in (ev.EXECUTION_SUSPENDED, ev.EXECUTION_RESUMED):
        on: str = event.payload["on"]
        return on
    return event.subject


def _event_line(fact: dict[str, Any]) -> str:
    when = fact["time"] or f"{fact['timestamp']} ms"
    subject = "" if fact["subject"] is None else f"  {fact['subject']}"
    return f"{fact['sequence']}  {when}  {fact['eventType']}{subject}"
