"""The fold: `state = fold_events(state, events)`. This file specifies it; `_native/fold.pyx` is its fast
copy.

What lives here: the in-memory form of one event (`Envelope`), the records a state is made of (`Step`,
`Decision`, `Gate`), the state itself (`State`) and the two folds. What must not: clocks, stores, asyncio,
or any opinion about what a flow may do next.

Theory of operation
-------------------
A state is a value. `fold_events` never changes the state it is given; it makes a new one. All of a state's
size sits in four persistent maps (steps, decisions, passed gates, stamps), and a new version of such a map
shares all but a few nodes with the old one, so folding one event costs the same after ten events or ten
million. Within one call, the maps that the pass has drafted are changed in place: nobody else has seen them.

An event is kept the way it is stored: its payload stays JSON text (`body`), and the one field the fold
looks it up by stands beside it (`subject`: a step's key, a decision's id, a domain event's type). So a
replay parses a body only for the rare events whose content steers the fold (suspensions, resumptions).
Outputs, choices and answers are parsed when somebody is served them, into fresh objects each time: what
one run does to a value it was served cannot reach the next.

A stamped emit needs nothing but its digest. `fold_rows` folds rows whose bodies were never fetched.
`fold_guarded` also makes sure that a row is what was written: its *guard* is a CRC-32 over just what the fold
reads of it, so that checking it fetches nothing more. `event_rows` makes such rows; besides, they carry a
checksum of the whole.

Worked example, one gate:

    0 EXECUTION_STARTED     status running
    1 note (stamp d)        emits[d] = 1
    2 EXECUTION_SUSPENDED   status suspended, pending gate 0 on "go"
    3 go                    pending gate 0 holds the answer
    4 EXECUTION_RESUMED     gates[0] = that answer, pending none, status running
    5 EXECUTION_COMPLETED   status completed

Invariants, each a `MalformedEventError` when broken: the first event is EXECUTION_STARTED at sequence 0;
sequences have no gap and no repeat; one execution per log; gates open in order, one at a time, and are
passed by the answer that directly precedes EXECUTION_RESUMED; nothing but domain events follows an end.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias

from loomfast import _events as ev
from loomfast import _wire
from loomfast._errors import BadInputError, MalformedEventError
from loomfast._pure.digest import decode, encode, format_digest, parse_digest
from loomfast._pure.trie import Table, Trie

# What `_wire` builds from and with: this kernel's classes, and this kernel's JSON.
__all__ = [
    "REVISION",
    "Decision",
    "Envelope",
    "Gate",
    "State",
    "Step",
    "Table",
    "Trie",
    "decode",
    "encode",
    "event_rows",
    "fold_events",
    "fold_guarded",
    "fold_rows",
    "parse_digest",
    "row_checksum",
    "row_guard",
]
_KERNEL = sys.modules[__name__]

REVISION: Final = 3

_MASK: Final = 2**64 - 1

_SEQUENCE: Final = 0xFFFFFFFF
_GUARD: Final = 0xFFFFFFFF
_GUARDED = struct.Struct("<QIIQ")

Row: TypeAlias = tuple[int, int, str | None, int | None, bytes | None]
GuardedRow: TypeAlias = tuple[int, int, str | bytes | None, int | None, bytes | None]


def _whole(value: object, name: str) -> None:
    if type(value) is not int:
        raise BadInputError(f"{name}: must be an int, not {type(value).__name__}")


class Envelope:
    """One event of a log.

    The constructor trusts its arguments: stores and the journal use it, whose bytes were checked when they
    were first made. `Envelope.make` and `Envelope.from_json` check everything.

    - `id` (str): `<executionId>-<sequence>`
    - `execution_id` (str): whose log it is in
    - `sequence` (int): its place there, from 0
    - `event_type` (str): the name of a kernel fact such as `STEP_COMPLETED`, or the domain event's own
    - `kind` (int): that name as a number, see `loomfast._events`
    - `subject` (str | None): what it is looked up by: a step's key, a decision's id, a domain event's type
    - `timestamp` (int): when it was made, ms since the epoch
    - `payload` (Any): what it says, as plain Python values
    - `body` (bytes | Opaque | None): the payload as persisted JSON; None where a replay did not fetch it
    - `stamp` (int | None): the digest of a flow-level emit
    - `fence` (int | None): the fencing token of whoever wrote it
    - `extra` (bytes | None): all other metadata, as persisted JSON
    - `metadata` (dict[str, Any]): all metadata, `fence` and `flowEmit` included
    """

    __slots__ = (
        "body",
        "event_type",
        "execution_id",
        "extra",
        "fence",
        "kind",
        "sequence",
        "stamp",
        "subject",
        "timestamp",
    )

    def __init__(
        self,
        execution_id: str,
        sequence: int,
        event_type: str,
        body: bytes | ev.Opaque | None,
        timestamp: int,
        subject: str | None = None,
        stamp: int | None = None,
        fence: int | None = None,
        extra: bytes | None = None,
    ) -> None:
        self.execution_id: str = execution_id
        self.sequence: int = sequence
        self.kind: int = ev.KIND_OF.get(event_type, ev.DOMAIN)
        self.event_type: str = event_type
        self.body: bytes | ev.Opaque | None = body
        self.timestamp: int = timestamp
        self.subject: str | None = event_type if self.kind == ev.DOMAIN else subject
        self.stamp: int | None = stamp
        self.fence: int | None = fence
        self.extra: bytes | None = extra

    @classmethod
    def make(
        cls,
        execution_id: str,
        sequence: int,
        event_type: str,
        payload: object,
        timestamp: int,
        metadata: Mapping[str, object] | None = None,
    ) -> Envelope:
        """Check, encode and wrap one event; see `loomfast._wire.make_event`."""
        event: Envelope = _wire.make_event(
            _KERNEL, execution_id, sequence, event_type, payload, timestamp, metadata
        )
        return event

    @classmethod
    def from_json(cls, value: object) -> Envelope:
        """Read the language-neutral form, checking every field; see `loomfast._wire.read_event`."""
        event: Envelope = _wire.read_event(_KERNEL, value)
        return event

    @property
    def id(self) -> str:
        """`<executionId>-<sequence>`."""
        return f"{self.execution_id}-{self.sequence}"

    @property
    def payload(self) -> Any:
        """The payload as plain Python values, fresh at each access."""
        if isinstance(self.body, bytes):
            return decode(self.body)
        if isinstance(self.body, ev.Opaque):
            return self.body.value
        raise MalformedEventError(self.execution_id, self.sequence, "payload", "was not fetched")

    @property
    def metadata(self) -> dict[str, Any]:
        """All metadata, `fence` and `flowEmit` included; empty when there is none."""
        rest: dict[str, Any] = {} if self.extra is None else decode(self.extra)
        if self.fence is not None:
            rest["fence"] = self.fence
        if self.stamp is not None:
            rest["flowEmit"] = format_digest(self.stamp)
        return rest

    def to_json(self) -> dict[str, Any]:
        """The language-neutral form; `metadata` is absent when empty."""
        return _wire.write_event(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Envelope):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in Envelope.__slots__)

    __hash__ = None  # type: ignore[assignment]  # holds an Opaque at times, which has no stable hash

    def __repr__(self) -> str:
        return f"<Envelope {self.id} {self.event_type}>"


class Step:
    """What the log knows of one step key: its latest start, and its outcome.

    - `phase` (str): `open`, `completed`, `failed`, `cancelled` or `in-doubt`
    - `sequence` (int): that of its latest event
    - `attempt` (int): the number of its latest attempt, from 1; 0 for an outcome without a start
    - `input_digest` (str | None): the digest of what the latest attempt was asked
    - `served` (bool): whether a re-run is answered from the log
    - `output` (Any), `error` (dict): of a completed step, of a failed one; `BadInputError` for any other
    - `started`, `outcome` (bytes | None): bodies of its latest STEP_STARTED and of its outcome
    """

    __slots__ = ("outcome", "phase", "sequence", "started")

    def __init__(self, phase: str, sequence: int, started: bytes | None, outcome: bytes | None) -> None:
        self.phase: str = phase
        self.sequence: int = sequence
        self.started: bytes | None = started
        self.outcome: bytes | None = outcome

    @property
    def attempt(self) -> int:
        """The number of the latest attempt, from 1; 0 when the log holds an outcome without a start."""
        attempt: int = 0 if self.started is None else decode(self.started)["attempt"]
        return attempt

    @property
    def input_digest(self) -> str | None:
        """The digest of what the latest attempt was asked; None when the log holds no start."""
        digest: str | None = None if self.started is None else decode(self.started)["inputDigest"]
        return digest

    @property
    def served(self) -> bool:
        """Whether a re-run is answered from the log: completed, or failed through a declared type."""
        if self.phase == ev.FAILED and self.outcome is not None:
            return bool(decode(self.outcome)["typed"])
        return self.phase == ev.COMPLETED

    @property
    def output(self) -> Any:
        """The output of a completed step, fresh at each access."""
        return self._field(ev.COMPLETED, "output")

    @property
    def error(self) -> Any:
        """The `{type, message, data?}` of a failed step."""
        return self._field(ev.FAILED, "error")

    def _field(self, phase: str, name: str) -> Any:
        if self.phase != phase or self.outcome is None:
            raise BadInputError(f"a step that is {self.phase} has no {name}")
        return decode(self.outcome)[name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in Step.__slots__)

    __hash__ = None  # type: ignore[assignment]  # a record, compared and never looked up

    def __repr__(self) -> str:
        return f"<Step {self.phase} at {self.sequence}>"


class Decision:
    """A recorded decision; `body` is the payload of its DECISION_RECORDED."""

    __slots__ = ("body", "sequence")

    def __init__(self, sequence: int, body: bytes) -> None:
        self.sequence: int = sequence
        self.body: bytes = body

    @property
    def choice(self) -> Any:
        """What was chosen, fresh at each access."""
        return decode(self.body)["choice"]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decision):
            return NotImplemented
        return self.sequence == other.sequence and self.body == other.body

    __hash__ = None  # type: ignore[assignment]  # a record, compared and never looked up


class Gate:
    """One gate, pending or passed.

    - `ordinal` (int): its number among the gates of its execution, from 0
    - `on` (str): the type of the event that passes it
    - `correlation_key` (str | None): what an answer must name to fit it
    - `wake_at` (int | None): when a timer passes it, ms since the epoch
    - `payload` (Any): the answer; `BadInputError` before there is one
    - `sequence` (int): that of the latest event that concerns it
    - `opened` (bytes): the body of its EXECUTION_SUSPENDED
    - `answer` (bytes | None): the body of the event that passes it; None until that is logged
    """

    __slots__ = ("answer", "on", "opened", "ordinal", "sequence")

    def __init__(self, ordinal: int, on: str, sequence: int, opened: bytes, answer: bytes | None) -> None:
        self.ordinal: int = ordinal
        self.on: str = on
        self.sequence: int = sequence
        self.opened: bytes = opened
        self.answer: bytes | None = answer

    @property
    def correlation_key(self) -> str | None:
        """What an answer must name to fit this gate, if the flow gave it a key."""
        key: str | None = decode(self.opened).get("correlationKey")
        return key

    @property
    def wake_at(self) -> int | None:
        """When a timer passes this gate, in ms, if it waits for one."""
        wake_at: int | None = decode(self.opened).get("wakeAt")
        return wake_at

    @property
    def payload(self) -> Any:
        """The answer, fresh at each access."""
        if self.answer is None:
            raise BadInputError(f"gate {self.ordinal} has no answer yet")
        return decode(self.answer)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Gate):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in Gate.__slots__)

    __hash__ = None  # type: ignore[assignment]  # a record, compared and never looked up

    def __repr__(self) -> str:
        standing = "open" if self.answer is None else "answered"
        return f"<Gate {self.ordinal} on {self.on}, {standing} at {self.sequence}>"


class State:
    """What a log amounts to. A value: nothing changes it once `fold_events` has returned it.

    - `execution_id` (str), `flow_id` (str), `flow_version` (str): what was started
    - `sequence` (int): that of the last folded event
    - `status` (str): `running`, `suspended`, `completed`, `failed` or `cancelled`
    - `input` (Any): what it was started with
    - `output` (Any), `error` (dict), `reason` (Any): how it ended: completed, failed or cancelled;
      `BadInputError` for the other two, and while it lives
    - `pending` (Gate | None): the open gate
    - `gates` (Table): passed gates, ordinal -> `Gate`
    - `steps` (Table): key -> `Step`
    - `decisions` (Table): id -> `Decision`
    - `in_doubt` (int): how many steps are parked in doubt
    - `emits` (Trie): digest -> how many stamped emits of it the log holds
    - `started` (bytes), `ended` (bytes | None): bodies of the first and of the final EXECUTION_* event
    """

    __slots__ = (
        "decisions",
        "emits",
        "ended",
        "execution_id",
        "gates",
        "in_doubt",
        "pending",
        "sequence",
        "started",
        "status",
        "steps",
    )

    def __init__(
        self,
        execution_id: str,
        sequence: int,
        status: str,
        started: bytes,
        ended: bytes | None,
        steps: Table,
        decisions: Table,
        gates: Table,
        pending: Gate | None,
        in_doubt: int,
        emits: Trie,
    ) -> None:
        self.execution_id: str = execution_id
        self.sequence: int = sequence
        self.status: str = status
        self.started: bytes = started
        self.ended: bytes | None = ended
        self.steps: Table = steps
        self.decisions: Table = decisions
        self.gates: Table = gates
        self.pending: Gate | None = pending
        self.in_doubt: int = in_doubt
        self.emits: Trie = emits

    @property
    def flow_id(self) -> str:
        """The id of the flow that was started."""
        flow_id: str = decode(self.started)["flowId"]
        return flow_id

    @property
    def flow_version(self) -> str:
        """The version of the flow that was started."""
        flow_version: str = decode(self.started)["flowVersion"]
        return flow_version

    @property
    def input(self) -> Any:
        """The input the execution was started with, fresh at each access."""
        return decode(self.started)["input"]

    @property
    def output(self) -> Any:
        """The output of a completed execution, fresh at each access."""
        return self._ending(ev.COMPLETED, "output")

    @property
    def error(self) -> Any:
        """The `{type, message, data?}` of a failed execution."""
        return self._ending(ev.FAILED, "error")

    @property
    def reason(self) -> Any:
        """Why a cancelled execution was cancelled."""
        return self._ending(ev.CANCELLED, "reason")

    def _ending(self, status: str, name: str) -> Any:
        if self.status != status or self.ended is None:
            raise BadInputError(f"an execution that is {self.status} has no {name}")
        return decode(self.ended)[name]

    def to_json(self) -> dict[str, Any]:
        """The language-neutral form; see `loomfast._wire.write_state`."""
        return _wire.write_state(_KERNEL, self)

    @classmethod
    def from_json(cls, value: object) -> State:
        """Read what `to_json` wrote, checking every part; see `loomfast._wire.read_state`."""
        state: State = _wire.read_state(_KERNEL, value)
        return state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in State.__slots__)

    __hash__ = None  # type: ignore[assignment]  # a record, compared and never looked up

    def __repr__(self) -> str:
        return f"<State {self.execution_id} {self.status} at {self.sequence}>"


def fold_events(state: State | None, events: Iterable[Envelope | Mapping[str, Any]]) -> State:
    """Fold events onto a state (None before the first) and return the state after them.

    An event may also be given in its language-neutral form. Raises `MalformedEventError` naming the
    execution, the sequence and the field; the state given in is never changed. Contract, section 5.
    """
    fold = _Pass(state)
    for event in events:
        if not isinstance(event, Envelope):
            event = Envelope.from_json(event)
        body = event.body if isinstance(event.body, bytes) else None
        fold.apply(event.execution_id, event.sequence, event.kind, event.subject, event.stamp, body)
    return fold.result()


def fold_rows(state: State | None, execution_id: str, rows: Iterable[Row]) -> State:
    """Fold `(sequence, kind, subject, stamp, body)` rows, as a store keeps them, onto a state.

    A row of an inert kind (see `loomfast._events`) or with a stamp needs neither subject nor body. A stamp
    may be given as the signed 64-bit integer that databases keep. Otherwise as `fold_events`.
    """
    fold = _Pass(state)
    for sequence, kind, subject, stamp, body in rows:
        _whole(sequence, "sequence")
        _whole(kind, "kind")
        digest = None if stamp is None else stamp & _MASK
        fold.apply(execution_id, sequence, kind, subject, digest, body)
    return fold.result()


def fold_guarded(state: State | None, execution_id: str, rows: Iterable[GuardedRow]) -> State:
    """Fold `(row_id, word, subject, stamp, body)` rows onto a state, each of which must pass its guard.

    The low 32 bits of `row_id` are the sequence; those of `word` are the row's `row_guard`, the others its
    kind. A subject may be given as bytes (UTF-8, surrogates passed). Otherwise as `fold_rows`; a row that is
    not as it was written is a `MalformedEventError` whose field is `guard`.
    """
    fold = _Pass(state)
    for row_id, word, subject, stamp, body in rows:
        sequence = row_id & _SEQUENCE
        try:
            kind = word >> 32
            intact = word & _GUARD == row_guard(row_id, kind, subject, stamp, body)
        except (TypeError, AttributeError, struct.error):
            intact = False
        if not intact:
            raise MalformedEventError(execution_id, sequence, "guard", "the row is not as it was written")
        text = subject.decode("utf-8", "surrogatepass") if isinstance(subject, bytes) else subject
        fold.apply(execution_id, sequence, kind, text, None if stamp is None else stamp & _MASK, body)
    return fold.result()


def row_guard(
    row_id: int, kind: int, subject: str | bytes | None, stamp: int | None, body: bytes | None
) -> int:
    """Return the CRC-32 over what `fold_guarded` reads of a row.

    That is 24 bytes, little-endian: the id (64 bits), the kind (32), the shape (32) and the stamp (64, 0 for
    none). The shape's lowest bit tells whether there is a stamp. A row that steers the fold (a kernel fact,
    or an unstamped domain event) goes on with the bytes of its subject, whose number, plus 1, stands in the
    rest of the shape, and of its body. Raises `TypeError` where a part has another type.
    """
    shape = 0 if stamp is None else 1
    digest = 0 if stamp is None else stamp & _MASK
    if not (kind > ev.LAST_INERT or (kind == ev.DOMAIN and stamp is None)):
        return zlib.crc32(_GUARDED.pack(row_id & _MASK, kind, shape, digest))
    name = subject.encode("utf-8", "surrogatepass") if isinstance(subject, str) else subject
    if name is not None:
        shape |= len(name) + 1 << 1
    if not isinstance(body, bytes):
        raise TypeError(f"body: must be bytes, not {type(body).__name__}")
    head = _GUARDED.pack(row_id & _MASK, kind, shape, digest)
    return zlib.crc32(body, zlib.crc32(head if name is None else head + name))


def row_checksum(
    row_id: int,
    word: int,
    stamp: int | None,
    subject: str | bytes | None,
    fence: int | None,
    timestamp: int,
    extra: bytes | None,
    body: bytes | None,
) -> int:
    """Return the CRC-32 over a whole row.

    That is the text `id,word,stamp,fence,timestamp,size,` with decimal numbers, `None` for what is not there
    and the size of the subject in bytes; then the bytes of the subject, the body, and, if there is one, `+`
    and `extra`. Raises `TypeError` where a text has another type.
    """
    name = subject.encode() if isinstance(subject, str) else subject
    for field, value in (("subject", name), ("extra", extra)):
        if value is not None and not isinstance(value, bytes):
            raise TypeError(f"{field}: must be bytes, not {type(value).__name__}")
    if not isinstance(body, bytes):
        raise TypeError(f"body: must be bytes, not {type(body).__name__}")
    head = f"{row_id},{word},{stamp},{fence},{timestamp},{None if name is None else len(name)},".encode()
    crc = zlib.crc32(body, zlib.crc32(head if name is None else head + name))
    return crc if extra is None else zlib.crc32(extra, zlib.crc32(b"+", crc))


def event_rows(number: int, position: int, events: Sequence[Envelope]) -> list[Any]:
    """Return the values of the rows of these events, one row after another.

    A row is `id, word, stamp, subject, position, fence, timestamp, checksum, extra, body`. The id is `number`
    above the 32 bits of the sequence, the word the kind above those of the `row_guard`, the checksum the
    `row_checksum`. The stamp is the signed number of the same 64 bits; a subject without a UTF-8 form is
    bytes (surrogates passed). Positions count on from `position`. Raises `TypeError` for a subject that is
    not text and a body that is not bytes.
    """
    values: list[Any] = []
    for place, event in enumerate(events, position):
        row_id = number << 32 | event.sequence
        stamp = event.stamp
        if stamp is not None and stamp >= 2**63:
            stamp -= 2**64
        subject = _storable(event.subject)
        if not isinstance(event.body, bytes):
            raise TypeError(f"body: must be bytes, not {type(event.body).__name__}")
        word = event.kind << 32 | row_guard(row_id, event.kind, subject, stamp, event.body)
        checksum = row_checksum(
            row_id, word, stamp, subject, event.fence, event.timestamp, event.extra, event.body
        )
        values += (row_id, word, stamp, subject, place, event.fence, event.timestamp, checksum)
        values += (event.extra, event.body)
    return values


def _storable(subject: str | None) -> str | bytes | None:
    if subject is None:
        return None
    if not isinstance(subject, str):
        raise TypeError(f"subject: must be str, not {type(subject).__name__}")
    try:
        subject.encode()
    except UnicodeEncodeError:
        return subject.encode("utf-8", "surrogatepass")
    return subject


class _Pass:
    """One fold pass. It drafts a map when it first changes it, and owns its drafts until `result`."""

    def __init__(self, state: State | None) -> None:
        self.fresh = state is None
        self.state = state
        self.touched = False
        self._drafts: set[str] = set()
        if state is not None:
            for name in State.__slots__:
                setattr(self, name, getattr(state, name))

    execution_id: str
    sequence: int
    status: str
    started: bytes
    ended: bytes | None
    steps: Table
    decisions: Table
    gates: Table
    pending: Gate | None
    in_doubt: int
    emits: Trie

    def result(self) -> State:
        if not self.touched:
            if self.state is None:
                raise MalformedEventError(None, None, "events", "an empty log has no state")
            return self.state
        return State(*(getattr(self, name) for name in _STATE_FIELDS))

    def _draft(self, name: str) -> Any:
        current = getattr(self, name)
        if name in self._drafts:
            return current
        draft = current.draft()
        self._drafts.add(name)
        setattr(self, name, draft)
        return draft

    def apply(
        self,
        execution_id: str,
        sequence: int,
        kind: int,
        subject: str | None,
        stamp: int | None,
        body: bytes | None,
    ) -> None:
        if self.fresh:
            self._begin(execution_id, sequence, kind, body)
        else:
            if execution_id != self.execution_id:
                self._malformed(execution_id, sequence, "executionId", f"the log is {self.execution_id!r}'s")
            if sequence != self.sequence + 1:
                self._malformed(execution_id, sequence, "sequence", f"must be {self.sequence + 1}")
            self.sequence = sequence
            if kind == ev.DOMAIN:
                if self.pending is not None and stamp is None and subject == self.pending.on:
                    self._answer(body)
            elif kind > ev.LAST_INERT:
                self._fact(kind, subject, body)
        self.touched = True
        if stamp is not None:
            self._draft("emits").bump_in_place(stamp)

    def _begin(self, execution_id: str, sequence: int, kind: int, body: bytes | None) -> None:
        if sequence != 0:
            self._malformed(execution_id, sequence, "sequence", "the first event of a log is 0")
        if kind != ev.EXECUTION_STARTED:
            self._malformed(execution_id, sequence, "eventType", "the first event must be EXECUTION_STARTED")
        self.execution_id, self.sequence, self.status = execution_id, sequence, ev.RUNNING
        self.started = self._required(body)
        self.ended, self.pending, self.in_doubt = None, None, 0
        self.steps, self.decisions, self.gates, self.emits = Table(), Table(), Table(), Trie()
        self.fresh = False

    def _answer(self, body: bytes | None) -> None:
        gate = self.pending
        assert gate is not None
        self.pending = Gate(gate.ordinal, gate.on, self.sequence, gate.opened, self._required(body))

    def _fact(self, kind: int, subject: str | None, body: bytes | None) -> None:
        body = self._required(body)
        if self.ended is not None:
            self._refuse("eventType", f"the execution has {self.status}; no kernel fact may follow")
        if kind in ev.STEP_PHASE:
            self._step(kind, self._subject(subject, "payload.key"), body)
        elif kind == ev.DECISION_RECORDED:
            key = self._subject(subject, "payload.id")
            self._draft("decisions").set_in_place(key, Decision(self.sequence, body))
        elif kind == ev.EXECUTION_SUSPENDED:
            self._suspend(body)
        elif kind == ev.EXECUTION_RESUMED:
            self._resume(body)
        elif kind in ev.END_STATUS:
            self.status, self.ended, self.pending = ev.END_STATUS[kind], body, None
        elif kind == ev.EXECUTION_STARTED:
            self._refuse("eventType", "EXECUTION_STARTED stands at sequence 0 only")
        else:
            self._refuse("eventType", f"{kind} is no event kind this version knows")

    def _step(self, kind: int, key: str, body: bytes) -> None:
        known: Step | None = self.steps.get(key)
        if known is not None and known.phase == ev.IN_DOUBT:
            self.in_doubt -= 1
        if kind == ev.STEP_STARTED:
            step = Step(ev.OPEN, self.sequence, body, None)
        else:
            step = Step(ev.STEP_PHASE[kind], self.sequence, None if known is None else known.started, body)
            if kind == ev.EFFECT_INDOUBT:
                self.in_doubt += 1
        self._draft("steps").set_in_place(key, step)
        self.status = ev.SUSPENDED if self.in_doubt or self.pending is not None else ev.RUNNING

    def _suspend(self, body: bytes) -> None:
        ordinal, on = self._gate_fields(ev.EXECUTION_SUSPENDED, body)
        if self.pending is not None:
            self._refuse("payload.gate", f"gate {self.pending.ordinal} is still pending")
        if ordinal != len(self.gates):
            self._refuse("payload.gate", f"must be {len(self.gates)}, the number of gates passed")
        self.pending = Gate(ordinal, on, self.sequence, body, None)
        self.status = ev.SUSPENDED

    def _resume(self, body: bytes) -> None:
        ordinal, on = self._gate_fields(ev.EXECUTION_RESUMED, body)
        gate = self.pending
        if gate is None or gate.ordinal != ordinal:
            self._refuse("payload.gate", f"gate {ordinal} is not pending")
        if gate.on != on:
            self._refuse("payload.on", f"gate {ordinal} waits for {gate.on!r}")
        if gate.answer is None or gate.sequence != self.sequence - 1:
            self._refuse("payload.gate", f"no {gate.on!r} event directly precedes it")
        self._draft("gates").set_in_place(ordinal, gate)
        self.pending = None
        self.status = ev.SUSPENDED if self.in_doubt else ev.RUNNING

    def _gate_fields(self, kind: int, body: bytes) -> tuple[int, str]:
        try:
            payload = decode(body)
        except BadInputError as error:
            self._refuse("payload", str(error))
        fault = ev.payload_fault(kind, payload)
        if fault is not None:
            self._refuse(*fault)
        return payload["gate"], payload["on"]

    def _required(self, body: bytes | None) -> bytes:
        if body is None:
            self._refuse("payload", "was not fetched, and this event needs it")
        return body

    def _subject(self, subject: str | None, field: str) -> str:
        if subject is None:
            self._refuse(field, "is missing")
        return subject

    def _refuse(self, field: str, reason: str) -> NoReturn:
        self._malformed(self.execution_id, self.sequence, field, reason)

    @staticmethod
    def _malformed(execution_id: str | None, sequence: int | None, field: str, reason: str) -> NoReturn:
        raise MalformedEventError(execution_id, sequence, field, reason)


_STATE_FIELDS: Final = (
    "execution_id",
    "sequence",
    "status",
    "started",
    "ended",
    "steps",
    "decisions",
    "gates",
    "pending",
    "in_doubt",
    "emits",
)
