"""The fold, compiled: same names, parameters, states and errors as `_pure/fold.py`, which specifies it.

How it differs from its twin: a pass is no object. The new state is made at once as a copy of the old one, and
each event changes that copy; nobody else sees it before it is returned. The first change to a map asks the old
map for a successor, which the copy then owns (`owned`, one bit per map), and later changes are made in place.
Numbers and stamps are C values, so that an event with a stamp costs no more than its bump. Bumps are deferred
by the trie itself (see `lineage.pxd`), so a long pass finds each leaf already in the cache.

Envelopes, states and records are not known to the garbage collector. None of them can be part of a cycle, save
an envelope whose payload has no JSON form and itself leads back to that envelope.
"""

cimport cython
from cpython.bytes cimport PyBytes_CheckExact
from cpython.long cimport PyLong_CheckExact

from loomfast._native.nodes cimport loom_as_u64, u64
from loomfast._native.trie cimport Table as _Table
from loomfast._native.trie cimport Trie as _Trie

import sys

from loomfast import _events as ev
from loomfast import _wire
from loomfast._errors import BadInputError, MalformedEventError
from loomfast._native.digest import decode, encode, format_digest, parse_digest
from loomfast._native.trie import Table, Trie

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
    "fold_events",
    "fold_rows",
    "parse_digest",
]
_KERNEL = sys.modules[__name__]

REVISION = 1

cdef extern from "Python.h":
    u64 PyLong_AsUnsignedLongLongMask(object value) except? 0xFFFFFFFFFFFFFFFFULL
    long long PyLong_AsLongLongAndOverflow(object value, int* overflow) except? -1

cdef enum:  # as in `_events`; a test compares them
    DOMAIN = 0
    LAST_INERT = 2
    EXECUTION_STARTED = 10
    EXECUTION_SUSPENDED = 11
    EXECUTION_RESUMED = 12
    EXECUTION_COMPLETED = 13
    EXECUTION_CANCELLED = 15
    STEP_STARTED = 20
    EFFECT_INDOUBT = 24
    DECISION_RECORDED = 30

cdef enum:  # which maps of the new state the pass owns
    STEPS = 1
    DECISIONS = 2
    GATES = 4
    EMITS = 8

cdef dict _KIND_OF = dict(ev.KIND_OF)
cdef dict _STEP_PHASE = dict(ev.STEP_PHASE)
cdef dict _END_STATUS = dict(ev.END_STATUS)
cdef object _RUNNING = ev.RUNNING
cdef object _SUSPENDED = ev.SUSPENDED
cdef object _OPEN = ev.OPEN
cdef object _COMPLETED = ev.COMPLETED
cdef object _FAILED = ev.FAILED
cdef object _CANCELLED = ev.CANCELLED
cdef object _IN_DOUBT = ev.IN_DOUBT
cdef object _Opaque = ev.Opaque


cdef long long _whole(object value, str name) except? -1:
    if not PyLong_CheckExact(value):
        raise BadInputError(f"{name}: must be an int, not {type(value).__name__}")
    return value


cdef bint _same(object one, object other, tuple names) except -1:
    for name in names:
        if getattr(one, name) != getattr(other, name):
            return False
    return True


# --- records --------------------------------------------------------------------------------------


@cython.final
@cython.no_gc
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class Envelope:
    """One event of a log; see the twin for its attributes. The constructor trusts its arguments."""

    cdef readonly object execution_id
    cdef readonly long long sequence
    cdef readonly int kind
    cdef readonly object event_type
    cdef readonly object body
    cdef readonly object timestamp
    cdef readonly object subject
    cdef readonly object fence
    cdef readonly object extra
    cdef u64 digest
    cdef bint stamped

    def __init__(
        self,
        execution_id,
        sequence,
        event_type,
        body,
        timestamp,
        subject=None,
        stamp=None,
        fence=None,
        extra=None,
    ):
        self.execution_id = execution_id
        self.sequence = _whole(sequence, "sequence")
        self.kind = _KIND_OF.get(event_type, DOMAIN)
        self.event_type = event_type
        self.body = body
        self.timestamp = timestamp
        self.subject = event_type if self.kind == DOMAIN else subject
        self.stamped = stamp is not None
        self.digest = _checked_stamp(stamp) if self.stamped else 0
        self.fence = fence
        self.extra = extra

    @classmethod
    def make(cls, execution_id, sequence, event_type, payload, timestamp, metadata=None):
        """Check, encode and wrap one event; see `loomfast._wire.make_event`."""
        return _wire.make_event(_KERNEL, execution_id, sequence, event_type, payload, timestamp, metadata)

    @classmethod
    def from_json(cls, value):
        """Read the language-neutral form, checking every field; see `loomfast._wire.read_event`."""
        return _wire.read_event(_KERNEL, value)

    @property
    def stamp(self):
        """The flow-emit digest, or None."""
        return self.digest if self.stamped else None

    @property
    def id(self):
        """`<executionId>-<sequence>`."""
        return f"{self.execution_id}-{self.sequence}"

    @property
    def payload(self):
        """The payload as plain Python values, fresh at each access."""
        if isinstance(self.body, bytes):
            return decode(self.body)
        if isinstance(self.body, _Opaque):
            return self.body.value
        raise MalformedEventError(self.execution_id, self.sequence, "payload", "was not fetched")

    @property
    def metadata(self):
        """All metadata, `fence` and `flowEmit` included; empty when there is none."""
        rest = {} if self.extra is None else decode(self.extra)
        if self.fence is not None:
            rest["fence"] = self.fence
        if self.stamped:
            rest["flowEmit"] = format_digest(self.digest)
        return rest

    def to_json(self):
        """The language-neutral form; `metadata` is absent when empty."""
        return _wire.write_event(self)

    def __eq__(self, other):
        if not isinstance(other, Envelope):
            return NotImplemented
        return _same(self, other, _ENVELOPE_FIELDS)

    def __repr__(self):
        return f"<Envelope {self.id} {self.event_type}>"


cdef u64 _checked_stamp(object stamp) except? 0:
    if not PyLong_CheckExact(stamp):
        raise BadInputError(f"digest: must be an int, not {type(stamp).__name__}")
    try:
        return loom_as_u64(stamp)
    except OverflowError:
        raise BadInputError("digest: must be in 0 <= digest < 2**64") from None


@cython.final
@cython.no_gc
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class Step:
    """What the log knows of one step key: its latest start, and its outcome."""

    cdef readonly object phase
    cdef readonly long long sequence
    cdef readonly object started
    cdef readonly object outcome

    def __init__(self, phase, sequence, started, outcome):
        self.phase = phase
        self.sequence = _whole(sequence, "sequence")
        self.started = started
        self.outcome = outcome

    @property
    def attempt(self):
        """The number of the latest attempt, from 1; 0 when the log holds an outcome without a start."""
        return 0 if self.started is None else decode(self.started)["attempt"]

    @property
    def input_digest(self):
        """The digest of what the latest attempt was asked; None when the log holds no start."""
        return None if self.started is None else decode(self.started)["inputDigest"]

    @property
    def served(self):
        """Whether a re-run is answered from the log: completed, or failed through a declared type."""
        if self.phase == _FAILED and self.outcome is not None:
            return bool(decode(self.outcome)["typed"])
        return self.phase == _COMPLETED

    @property
    def output(self):
        """The output of a completed step, fresh at each access."""
        return self._field(_COMPLETED, "output")

    @property
    def error(self):
        """The `{type, message, data?}` of a failed step."""
        return self._field(_FAILED, "error")

    cdef object _field(self, phase, name):
        if self.phase != phase or self.outcome is None:
            raise BadInputError(f"a step that is {self.phase} has no {name}")
        return decode(self.outcome)[name]

    def __eq__(self, other):
        if not isinstance(other, Step):
            return NotImplemented
        return _same(self, other, ("outcome", "phase", "sequence", "started"))


cdef Step _step(object phase, long long sequence, object started, object outcome):
    cdef Step step = Step.__new__(Step)
    step.phase = phase
    step.sequence = sequence
    step.started = started
    step.outcome = outcome
    return step


@cython.final
@cython.no_gc
@cython.freelist(16)
@cython.auto_pickle(False)
cdef class Decision:
    """A recorded decision; `body` is the payload of its DECISION_RECORDED."""

    cdef readonly long long sequence
    cdef readonly object body

    def __init__(self, sequence, body):
        self.sequence = _whole(sequence, "sequence")
        self.body = body

    @property
    def choice(self):
        """What was chosen, fresh at each access."""
        return decode(self.body)["choice"]

    def __eq__(self, other):
        if not isinstance(other, Decision):
            return NotImplemented
        return _same(self, other, ("sequence", "body"))


@cython.final
@cython.no_gc
@cython.freelist(16)
@cython.auto_pickle(False)
cdef class Gate:
    """One gate, pending or passed; see the twin for its attributes."""

    cdef readonly object ordinal
    cdef readonly object on
    cdef readonly long long sequence
    cdef readonly object opened
    cdef readonly object answer

    def __init__(self, ordinal, on, sequence, opened, answer):
        self.ordinal = ordinal
        self.on = on
        self.sequence = _whole(sequence, "sequence")
        self.opened = opened
        self.answer = answer

    @property
    def correlation_key(self):
        """What an answer must name to fit this gate, if the flow gave it a key."""
        return decode(self.opened).get("correlationKey")

    @property
    def wake_at(self):
        """When a timer passes this gate, in ms, if it waits for one."""
        return decode(self.opened).get("wakeAt")

    @property
    def payload(self):
        """The answer, fresh at each access."""
        if self.answer is None:
            raise BadInputError(f"gate {self.ordinal} has no answer yet")
        return decode(self.answer)

    def __eq__(self, other):
        if not isinstance(other, Gate):
            return NotImplemented
        return _same(self, other, ("answer", "on", "opened", "ordinal", "sequence"))


@cython.final
@cython.no_gc
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class State:
    """What a log amounts to; see the twin for its attributes. A value once `fold_events` has returned it."""

    cdef readonly object execution_id
    cdef readonly long long sequence
    cdef readonly object status
    cdef readonly object started
    cdef readonly object ended
    cdef readonly _Table steps
    cdef readonly _Table decisions
    cdef readonly _Table gates
    cdef readonly Gate pending
    cdef readonly long long in_doubt
    cdef readonly _Trie emits

    def __init__(
        self,
        execution_id,
        sequence,
        status,
        started,
        ended,
        _Table steps not None,
        _Table decisions not None,
        _Table gates not None,
        Gate pending,
        in_doubt,
        _Trie emits not None,
    ):
        self.execution_id = execution_id
        self.sequence = _whole(sequence, "sequence")
        self.status = status
        self.started = started
        self.ended = ended
        self.steps = steps
        self.decisions = decisions
        self.gates = gates
        self.pending = pending
        self.in_doubt = _whole(in_doubt, "in_doubt")
        self.emits = emits

    @property
    def flow_id(self):
        """The id of the flow that was started."""
        return decode(self.started)["flowId"]

    @property
    def flow_version(self):
        """The version of the flow that was started."""
        return decode(self.started)["flowVersion"]

    @property
    def input(self):
        """The input the execution was started with, fresh at each access."""
        return decode(self.started)["input"]

    @property
    def output(self):
        """The output of a completed execution, fresh at each access."""
        return self._ending(_COMPLETED, "output")

    @property
    def error(self):
        """The `{type, message, data?}` of a failed execution."""
        return self._ending(_FAILED, "error")

    @property
    def reason(self):
        """Why a cancelled execution was cancelled."""
        return self._ending(_CANCELLED, "reason")

    cdef object _ending(self, status, name):
        if self.status != status or self.ended is None:
            raise BadInputError(f"an execution that is {self.status} has no {name}")
        return decode(self.ended)[name]

    def to_json(self):
        """The language-neutral form; see `loomfast._wire.write_state`."""
        return _wire.write_state(_KERNEL, self)

    @classmethod
    def from_json(cls, value):
        """Read what `to_json` wrote, checking every part; see `loomfast._wire.read_state`."""
        return _wire.read_state(_KERNEL, value)

    def __eq__(self, other):
        if not isinstance(other, State):
            return NotImplemented
        return _same(self, other, _STATE_FIELDS)

    def __repr__(self):
        return f"<State {self.execution_id} {self.status} at {self.sequence}>"


# --- the fold -------------------------------------------------------------------------------------


def fold_events(state, events):
    """Fold events onto a state (None before the first) and return the state after them.

    An event may also be given in its language-neutral form. Raises `MalformedEventError` naming the
    execution, the sequence and the field; the state given in is never changed. Contract, section 5.
    """
    cdef State folded = _begun(state)
    cdef Envelope envelope
    cdef int owned = 0
    cdef bint touched = False
    for event in events:
        if type(event) is not Envelope:
            event = Envelope.from_json(event)
        envelope = <Envelope>event
        _apply(
            folded,
            &owned,
            envelope.execution_id,
            envelope.sequence,
            envelope.kind,
            envelope.subject,
            envelope.stamped,
            envelope.digest,
            envelope.body if PyBytes_CheckExact(envelope.body) else None,
        )
        touched = True
    return _result(state, folded, touched)


def fold_rows(state, execution_id, rows):
    """Fold `(sequence, kind, subject, stamp, body)` rows, as a store keeps them, onto a state.

    A row of an inert kind (see `loomfast._events`) or with a stamp needs neither subject nor body. A stamp may
    be given as the signed 64-bit integer that databases keep. Otherwise as `fold_events`.
    """
    cdef State folded = _begun(state)
    cdef int owned = 0
    cdef bint touched = False
    cdef bint stamped
    for sequence, kind, subject, stamp, body in rows:
        stamped = stamp is not None
        _apply(
            folded,
            &owned,
            execution_id,
            _whole(sequence, "sequence"),
            _whole(kind, "kind"),
            subject,
            stamped,
            PyLong_AsUnsignedLongLongMask(stamp) if stamped else 0,
            body,
        )
        touched = True
    return _result(state, folded, touched)


cdef State _begun(object state):
    """Return a copy of `state` to be folded into; one of None has no id yet."""
    cdef State folded = State.__new__(State)
    cdef State known
    if state is None:
        return folded
    if type(state) is not State:
        raise BadInputError(f"state: must be a State of this kernel or None, not {type(state).__name__}")
    known = <State>state
    folded.execution_id = known.execution_id
    folded.sequence = known.sequence
    folded.status = known.status
    folded.started = known.started
    folded.ended = known.ended
    folded.steps = known.steps
    folded.decisions = known.decisions
    folded.gates = known.gates
    folded.pending = known.pending
    folded.in_doubt = known.in_doubt
    folded.emits = known.emits
    return folded


cdef object _result(object state, State folded, bint touched):
    if touched:
        return folded
    if state is None:
        raise MalformedEventError(None, None, "events", "an empty log has no state")
    return state


cdef int _apply(
    State state,
    int* owned,
    object execution_id,
    long long sequence,
    long long kind,
    object subject,
    bint stamped,
    u64 stamp,
    object body,
) except -1:
    cdef Gate gate
    if state.execution_id is None:
        _begin(state, execution_id, sequence, kind, body)
    else:
        if execution_id is not state.execution_id and execution_id != state.execution_id:
            raise MalformedEventError(
                execution_id, sequence, "executionId", f"the log is {state.execution_id!r}'s"
            )
        if sequence != state.sequence + 1:
            raise MalformedEventError(execution_id, sequence, "sequence", f"must be {state.sequence + 1}")
        state.sequence = sequence
        if kind == DOMAIN:
            gate = state.pending
            if gate is not None and not stamped and subject == gate.on:
                state.pending = Gate(gate.ordinal, gate.on, sequence, gate.opened, _required(state, body))
        elif kind > LAST_INERT:
            _fact(state, owned, kind, subject, _required(state, body))
    if stamped:
        if owned[0] & EMITS:
            state.emits.bump_drafted(stamp)
        else:
            state.emits = state.emits.bumped(stamp)
            owned[0] |= EMITS
    return 0


cdef int _begin(State state, object execution_id, long long sequence, long long kind, object body) except -1:
    if sequence != 0:
        raise MalformedEventError(execution_id, sequence, "sequence", "the first event of a log is 0")
    if kind != EXECUTION_STARTED:
        raise MalformedEventError(
            execution_id, sequence, "eventType", "the first event must be EXECUTION_STARTED"
        )
    state.execution_id = execution_id
    state.status = _RUNNING
    state.started = _required(state, body)
    state.steps = _Table.__new__(_Table)
    state.decisions = _Table.__new__(_Table)
    state.gates = _Table.__new__(_Table)
    state.emits = _Trie.__new__(_Trie)
    return 0


cdef int _fact(State state, int* owned, long long kind, object subject, object body) except -1:
    if state.ended is not None:
        _refuse(state, "eventType", f"the execution has {state.status}; no kernel fact may follow")
    if STEP_STARTED <= kind <= EFFECT_INDOUBT:
        if subject is None:
            _refuse(state, "payload.key", "is missing")
        _step_event(state, owned, kind, subject, body)
    elif kind == DECISION_RECORDED:
        if subject is None:
            _refuse(state, "payload.id", "is missing")
        if owned[0] & DECISIONS:
            state.decisions.change_drafted(subject, Decision(state.sequence, body))
        else:
            state.decisions = state.decisions.changed(subject, Decision(state.sequence, body))
            owned[0] |= DECISIONS
    elif kind == EXECUTION_SUSPENDED:
        _suspend(state, body)
    elif kind == EXECUTION_RESUMED:
        _resume(state, owned, body)
    elif EXECUTION_COMPLETED <= kind <= EXECUTION_CANCELLED:
        state.status = _END_STATUS[kind]
        state.ended = body
        state.pending = None
    elif kind == EXECUTION_STARTED:
        _refuse(state, "eventType", "EXECUTION_STARTED stands at sequence 0 only")
    else:
        _refuse(state, "eventType", f"{kind} is no event kind this version knows")
    return 0


cdef int _step_event(State state, int* owned, long long kind, object key, object body) except -1:
    cdef Step known = state.steps.found(key)
    cdef Step step
    if known is not None and known.phase == _IN_DOUBT:
        state.in_doubt -= 1
    if kind == STEP_STARTED:
        step = _step(_OPEN, state.sequence, body, None)
    else:
        step = _step(_STEP_PHASE[kind], state.sequence, None if known is None else known.started, body)
        if kind == EFFECT_INDOUBT:
            state.in_doubt += 1
    if owned[0] & STEPS:
        state.steps.change_drafted(key, step)
    else:
        state.steps = state.steps.changed(key, step)
        owned[0] |= STEPS
    state.status = _SUSPENDED if state.in_doubt or state.pending is not None else _RUNNING
    return 0


cdef int _suspend(State state, object body) except -1:
    ordinal, on = _gate_fields(state, EXECUTION_SUSPENDED, body)
    if state.pending is not None:
        _refuse(state, "payload.gate", f"gate {state.pending.ordinal} is still pending")
    if ordinal != len(state.gates):
        _refuse(state, "payload.gate", f"must be {len(state.gates)}, the number of gates passed")
    state.pending = Gate(ordinal, on, state.sequence, body, None)
    state.status = _SUSPENDED
    return 0


cdef int _resume(State state, int* owned, object body) except -1:
    ordinal, on = _gate_fields(state, EXECUTION_RESUMED, body)
    cdef Gate gate = state.pending
    if gate is None or gate.ordinal != ordinal:
        _refuse(state, "payload.gate", f"gate {ordinal} is not pending")
    if gate.on != on:
        _refuse(state, "payload.on", f"gate {ordinal} waits for {gate.on!r}")
    if gate.answer is None or gate.sequence != state.sequence - 1:
        _refuse(state, "payload.gate", f"no {gate.on!r} event directly precedes it")
    if owned[0] & GATES:
        state.gates.change_drafted(ordinal, gate)
    else:
        state.gates = state.gates.changed(ordinal, gate)
        owned[0] |= GATES
    state.pending = None
    state.status = _SUSPENDED if state.in_doubt else _RUNNING
    return 0


cdef tuple _gate_fields(State state, int kind, object body):
    payload = decode(body)
    fault = ev.payload_fault(kind, payload)
    if fault is not None:
        _refuse(state, fault[0], fault[1])
    return payload["gate"], payload["on"]


cdef object _required(State state, object body):
    if body is None:
        _refuse(state, "payload", "was not fetched, and this event needs it")
    return body


cdef object _refuse(State state, object field, object reason):
    raise MalformedEventError(state.execution_id, state.sequence, field, reason)


_ENVELOPE_FIELDS = (
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
_STATE_FIELDS = (
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
