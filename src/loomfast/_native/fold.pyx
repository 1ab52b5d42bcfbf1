"""The fold, compiled: same names, parameters, states and errors as `_pure/fold.py`, which specifies it.

How it differs from its twin: a pass is no object. The new state is made at once as a copy of the old one, and
each event changes that copy; nobody else sees it before it is returned. The first change to a map asks the old
map for a successor, which the copy then owns (`owned`, one bit per map), and later changes are made in place.
Numbers and stamps are C values. Stamps are collected and bumped when the pass is over, since nothing in it
reads them: sorted, many of them cost a fraction of what each would alone. Of an event that counts for nothing
but its stamp, neither subject nor body is touched.

A step that an earlier event of the same pass made, and that nobody else holds, is changed in place as well.

A replay of a long list waits for memory more than it computes. So each event is fetched well before its turn;
half way, what it refers to; and at last the leaf of the map that it will change.

Envelopes, states and records are not known to the garbage collector. None of them can be part of a cycle, save
an envelope whose payload has no JSON form and itself leads back to that envelope.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.list cimport PyList_CheckExact, PyList_GET_SIZE
from cpython.long cimport PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject, PyObject_Hash, PyTypeObject
from cpython.tuple cimport PyTuple_CheckExact, PyTuple_GET_SIZE
from cpython.unicode cimport PyUnicode_CheckExact
from libc.string cimport memcpy

from loomfast._native.lineage cimport prefetch_leaf
from loomfast._native.nodes cimport loom_as_u64, loom_prefetch, mix, u64
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
    "event_rows",
    "fold_events",
    "fold_guarded",
    "fold_rows",
    "parse_digest",
    "row_checksum",
    "row_guard",
]
_KERNEL = sys.modules[__name__]

REVISION = 3

cdef extern from "Python.h":
    u64 PyLong_AsUnsignedLongLongMask(object value) except? 0xFFFFFFFFFFFFFFFFULL
    PyObject* PyList_GET_ITEM(object value, Py_ssize_t index) noexcept  # the caller checked the index
    PyObject* PyTuple_GET_ITEM(object value, Py_ssize_t index) noexcept  # the caller checked the index
    PyTypeObject* Py_TYPE(PyObject* value) noexcept  # reads a field
    long long PyLong_AsLongLongAndOverflow(object value, int* overflow) except? -1

    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef extern from "fold_guard.h":
    void loom_guard_prepare() noexcept  # fills a table: cannot raise
    unsigned int loom_guard_words(u64 row_id, u64 kind_and_shape, u64 stamp) noexcept  # computes: cannot raise
    unsigned int loom_crc_bytes(unsigned int crc, const unsigned char* data, size_t size) noexcept  # computes
    char* loom_decimal(char* at, long long value) noexcept  # writes at most 20 bytes: cannot raise

loom_guard_prepare()

cdef enum:
    LOOKAHEAD = 12  # how many events before it an event's step is looked for; what leads there, up to thrice

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

cdef enum:
    FEW = 32  # stamps that a pass keeps without asking for memory
    WORTH_SORTING = 2048  # stamps, more than FEW
    MANY = 1048576  # stamps at which it bumps them before it goes on: FEW times a power of 8


cdef struct Pass:  # what one call of a fold keeps beside the new state
    int owned  # maps that nobody else sees
    bint touched  # whether there was an event
    u64* stamps  # of events folded so far, not yet bumped
    size_t size
    size_t room
    u64[32] few


cdef dict _KIND_OF = dict(ev.KIND_OF)
cdef tuple _PHASES = tuple(ev.STEP_PHASE[kind] for kind in range(STEP_STARTED, EFFECT_INDOUBT + 1))
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
    """What the log knows of one step key: its latest start, and its outcome.

    - `phase` (str): `open`, `completed`, `failed`, `cancelled` or `in-doubt`
    - `sequence` (int): that of its latest event
    - `attempt` (int): the number of its latest attempt, from 1; 0 for an outcome without a start
    - `input_digest` (str | None): the digest of what the latest attempt was asked
    - `served` (bool): whether a re-run is answered from the log
    - `output` (Any), `error` (dict): of a completed step, of a failed one; `BadInputError` for any other
    - `started`, `outcome` (bytes | None): bodies of its latest STEP_STARTED and of its outcome
    """

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

    def __repr__(self):
        return f"<Step {self.phase} at {self.sequence}>"


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


cdef Decision _decision(long long sequence, object body):
    cdef Decision decision = Decision.__new__(Decision)
    decision.sequence = sequence
    decision.body = body
    return decision


@cython.final
@cython.no_gc
@cython.freelist(16)
@cython.auto_pickle(False)
cdef class Gate:
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

    def __repr__(self):
        standing = "open" if self.answer is None else "answered"
        return f"<Gate {self.ordinal} on {self.on}, {standing} at {self.sequence}>"


@cython.final
@cython.no_gc
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class State:
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
    cdef Pass fold
    cdef State folded
    cdef Envelope envelope
    cdef Py_ssize_t ahead = LOOKAHEAD
    cdef bint listed = PyList_CheckExact(events)
    if type(state) is State:
        if PyTuple_CheckExact(events) and PyTuple_GET_SIZE(events):
            _look_ahead(<State>state, PyTuple_GET_ITEM(events, 0))
        elif listed and PyList_GET_SIZE(events):
            _look_ahead(<State>state, PyList_GET_ITEM(events, 0))
    folded = _begun(state)
    _open_pass(&fold)
    try:
        for event in events:
            if type(event) is not Envelope:
                event = Envelope.from_json(event)
            envelope = <Envelope>event
            if listed:
                if ahead + 2 * LOOKAHEAD < PyList_GET_SIZE(events):
                    _fetch(PyList_GET_ITEM(events, ahead + 2 * LOOKAHEAD))
                    _fetch_parts(PyList_GET_ITEM(events, ahead + LOOKAHEAD))
                if ahead < PyList_GET_SIZE(events):
                    _look_ahead(folded, PyList_GET_ITEM(events, ahead))
                ahead += 1
            if not _is_inert(
                folded, <PyObject*>envelope.execution_id, envelope.sequence, envelope.kind, envelope.stamped
            ):
                _apply(
                    folded,
                    &fold,
                    envelope.execution_id,
                    envelope.sequence,
                    envelope.kind,
                    envelope.subject,
                    envelope.stamped,
                    envelope.body if PyBytes_CheckExact(envelope.body) else None,
                )
            if envelope.stamped:
                _keep_stamp(folded, &fold, envelope.digest)
            fold.touched = True
        return _result(state, folded, &fold)
    finally:
        _close_pass(&fold)


def fold_rows(state, execution_id, rows):
    """Fold `(sequence, kind, subject, stamp, body)` rows, as a store keeps them, onto a state.

    A row of an inert kind (see `loomfast._events`) or with a stamp needs neither subject nor body. A stamp may
    be given as the signed 64-bit integer that databases keep. Otherwise as `fold_events`.
    """
    cdef Pass fold
    cdef State folded = _begun(state)
    cdef bint stamped
    cdef long long number
    cdef long long code
    _open_pass(&fold)
    try:
        for sequence, kind, subject, stamp, body in rows:
            number = _whole(sequence, "sequence")
            code = _whole(kind, "kind")
            stamped = stamp is not None
            if not _is_inert(folded, <PyObject*>execution_id, number, code, stamped):
                _apply(folded, &fold, execution_id, number, code, subject, stamped, body)
            if stamped:
                _keep_stamp(folded, &fold, PyLong_AsUnsignedLongLongMask(stamp))
            fold.touched = True
        return _result(state, folded, &fold)
    finally:
        _close_pass(&fold)


def fold_guarded(state, execution_id, rows):
    """Fold `(row_id, word, subject, stamp, body)` rows onto a state, each of which must pass its guard.

    See the twin. A row that is not as it was written is a `MalformedEventError` whose field is `guard`.
    """
    cdef Pass fold
    cdef State folded = _begun(state)
    cdef bint stamped
    cdef u64 key
    cdef u64 coded
    cdef u64 digest
    cdef long long number
    cdef long long kind
    _open_pass(&fold)
    try:
        for row_id, word, subject, stamp, body in rows:
            key = PyLong_AsUnsignedLongLongMask(row_id)
            number = <long long>(key & 0xFFFFFFFFULL)
            stamped = stamp is not None
            if not PyLong_CheckExact(word) or (stamped and not PyLong_CheckExact(stamp)):
                _refuse_row(execution_id, number)
            coded = PyLong_AsUnsignedLongLongMask(word)
            if coded >> 63:
                _refuse_row(execution_id, number)
            digest = PyLong_AsUnsignedLongLongMask(stamp) if stamped else 0
            kind = <long long>(coded >> 32)
            if _steers(kind, stamped):
                if not PyBytes_CheckExact(body):
                    _refuse_row(execution_id, number)
                if subject is not None and not PyUnicode_CheckExact(subject):
                    if not PyBytes_CheckExact(subject):
                        _refuse_row(execution_id, number)
                    if <u64>_steering_guard(key, kind, stamped, digest, subject, body) != coded & 0xFFFFFFFFULL:
                        _refuse_row(execution_id, number)
                    subject = (<bytes>subject).decode("utf-8", "surrogatepass")
                elif <u64>_steering_guard(key, kind, stamped, digest, subject, body) != coded & 0xFFFFFFFFULL:
                    _refuse_row(execution_id, number)
            elif (
                ~loom_guard_words(key, <u64>kind | <u64>stamped << 32, digest) & 0xFFFFFFFFULL
                != coded & 0xFFFFFFFFULL
            ):
                _refuse_row(execution_id, number)
            if not _is_inert(folded, <PyObject*>execution_id, number, kind, stamped):
                _apply(folded, &fold, execution_id, number, kind, subject, stamped, body)
            if stamped:
                _keep_stamp(folded, &fold, digest)
            fold.touched = True
        return _result(state, folded, &fold)
    finally:
        _close_pass(&fold)


def row_guard(row_id, kind, subject, stamp, body):
    """Return the CRC-32 over what `fold_guarded` reads of a row; see the twin."""
    cdef bint stamped = stamp is not None
    cdef u64 digest = PyLong_AsUnsignedLongLongMask(stamp) if stamped else 0
    cdef u64 key = PyLong_AsUnsignedLongLongMask(row_id)
    cdef long long code = kind
    if _steers(code, stamped):
        if not PyBytes_CheckExact(body):
            raise TypeError(f"body: must be bytes, not {type(body).__name__}")
        return _steering_guard(key, code, stamped, digest, subject, body)
    return <unsigned int>~loom_guard_words(key, <u64>code | <u64>stamped << 32, digest)


cdef inline bint _steers(long long kind, bint stamped) noexcept:  # compares: cannot raise
    """Whether the fold reads the subject and the body of such an event."""
    return kind > LAST_INERT or (kind == DOMAIN and not stamped)


cdef unsigned int _steering_guard(
    u64 key, long long kind, bint stamped, u64 digest, object subject, object body
) except? 0:
    """The guard of a row that steers the fold."""
    cdef Py_ssize_t size = 0
    cdef const char* text = NULL
    cdef u64 shape = <u64>stamped
    cdef unsigned int crc
    if subject is not None:
        if PyUnicode_CheckExact(subject):
            try:
                text = PyUnicode_AsUTF8AndSize(subject, &size)
            except UnicodeEncodeError:
                subject = subject.encode("utf-8", "surrogatepass")
        if text == NULL:
            if not PyBytes_CheckExact(subject):
                raise TypeError(f"subject: must be str or bytes, not {type(subject).__name__}")
            text = PyBytes_AS_STRING(subject)
            size = PyBytes_GET_SIZE(subject)
        shape |= <u64>(size + 1) << 1
    crc = loom_guard_words(key, <u64>kind | shape << 32, digest)
    if size:
        crc = loom_crc_bytes(crc, <const unsigned char*>text, <size_t>size)
    crc = loom_crc_bytes(crc, <const unsigned char*>PyBytes_AS_STRING(body), <size_t>PyBytes_GET_SIZE(body))
    return ~crc


def row_checksum(row_id, word, stamp, subject, fence, timestamp, extra, body):
    """Return the CRC-32 over a whole row; see the twin."""
    cdef Py_ssize_t size = 0
    cdef const char* text = NULL
    if subject is not None:
        if PyUnicode_CheckExact(subject):
            text = PyUnicode_AsUTF8AndSize(subject, &size)
        else:
            text = PyBytes_AS_STRING(_bytes(subject, "subject"))
            size = PyBytes_GET_SIZE(subject)
    return _checksum(row_id, word, stamp, text, size, fence, timestamp, extra, body)


def event_rows(number, position, events):
    """Return the values of the rows of these events, one row after another; see the twin."""
    cdef Envelope event
    cdef list values = []
    cdef Py_ssize_t size
    cdef const char* text
    cdef u64 key
    cdef object row_id, word, stamp, subject
    cdef object place = position
    cdef unsigned int guard
    for item in events:
        if type(item) is not Envelope:
            raise TypeError(f"events: must be envelopes of this kernel, not {type(item).__name__}")
        event = <Envelope>item
        row_id = number << 32 | event.sequence
        stamp = <long long>event.digest if event.stamped else None
        _bytes(event.body, "body")
        subject = event.subject
        size = 0
        text = NULL
        if subject is not None:
            if not isinstance(subject, str):
                raise TypeError(f"subject: must be str, not {type(subject).__name__}")
            try:
                text = PyUnicode_AsUTF8AndSize(subject, &size)
            except UnicodeEncodeError:
                subject = subject.encode("utf-8", "surrogatepass")
                text = PyBytes_AS_STRING(subject)
                size = PyBytes_GET_SIZE(subject)
        key = PyLong_AsUnsignedLongLongMask(row_id)
        if _steers(event.kind, event.stamped):
            guard = _steering_guard(key, event.kind, event.stamped, event.digest, subject, event.body)
        else:
            guard = ~loom_guard_words(key, <u64>event.kind | <u64>event.stamped << 32, event.digest)
        word = <long long>event.kind << 32 | <long long>guard
        values += (
            row_id,
            word,
            stamp,
            subject,
            place,
            event.fence,
            event.timestamp,
            _checksum(row_id, word, stamp, text, size, event.fence, event.timestamp, event.extra, event.body),
            event.extra,
            event.body,
        )
        place += 1
    return values


cdef object _checksum(
    object row_id,
    object word,
    object stamp,
    const char* text,
    Py_ssize_t size,
    object fence,
    object timestamp,
    object extra,
    object body,
):
    """The checksum of a row whose subject is `text`, NULL for none."""
    cdef char[160] head  # five numbers and a size of at most 20 bytes, and their commas
    cdef char* at = head
    cdef unsigned int crc = 0xFFFFFFFFU
    at = _written(at, row_id)
    at = _written(at, word)
    at = _written(at, stamp)
    at = _written(at, fence)
    at = _written(at, timestamp)
    if at == NULL:  # a value of another type, or beyond 64 bits: what its own text is
        whole = f"{row_id},{word},{stamp},{fence},{timestamp},{None if text == NULL else size},".encode()
        crc = loom_crc_bytes(crc, <const unsigned char*>PyBytes_AS_STRING(whole), <size_t>PyBytes_GET_SIZE(whole))
    else:
        at = _written(at, None) if text == NULL else _ended(loom_decimal(at, size))
        crc = loom_crc_bytes(crc, <const unsigned char*>head, <size_t>(at - head))
    if size:
        crc = loom_crc_bytes(crc, <const unsigned char*>text, <size_t>size)
    if not PyBytes_Check(body):
        _bytes(body, "body")
    crc = loom_crc_bytes(crc, <const unsigned char*>PyBytes_AS_STRING(body), <size_t>PyBytes_GET_SIZE(body))
    if extra is not None:
        _bytes(extra, "extra")
        crc = loom_crc_bytes(crc, <const unsigned char*>b"+", 1)
        crc = loom_crc_bytes(crc, <const unsigned char*>PyBytes_AS_STRING(extra), <size_t>PyBytes_GET_SIZE(extra))
    return <unsigned int>~crc


cdef inline char* _written(char* at, object value) except? NULL:
    """Write a number, or None, and a comma. NULL, without an error, where it has another form; then for ever."""
    cdef int overflow = 0
    cdef long long number
    if at == NULL:
        return NULL
    if value is None:
        memcpy(at, b"None,", 5)
        return at + 5
    if not PyLong_CheckExact(value):
        return NULL
    number = PyLong_AsLongLongAndOverflow(value, &overflow)
    return NULL if overflow else _ended(loom_decimal(at, number))


cdef inline char* _ended(char* at) noexcept:  # stores: cannot raise
    at[0] = 44  # a comma
    return at + 1


cdef inline object _bytes(object value, str field):
    if not PyBytes_Check(value):
        raise TypeError(f"{field}: must be bytes, not {type(value).__name__}")
    return value


cdef int _refuse_row(object execution_id, long long sequence) except -1:
    raise MalformedEventError(execution_id, sequence, "guard", "the row is not as it was written")


cdef int _open_pass(Pass* fold) noexcept:  # stores: cannot raise
    fold.owned = 0
    fold.touched = False
    fold.stamps = fold.few
    fold.size = 0
    fold.room = FEW
    return 0


cdef int _close_pass(Pass* fold) noexcept:  # frees: cannot raise
    if fold.stamps != fold.few:
        PyMem_Free(fold.stamps)
    return 0


cdef int _keep_stamp(State state, Pass* fold, u64 stamp) except -1:
    """Note a stamp for `_bump_stamps`."""
    cdef u64* more
    if fold.size == fold.room:
        if fold.room >= MANY:
            _bump_stamps(state, fold)
        else:
            # Twice what is needed: the upper half is scratch space for sorting.
            more = <u64*>PyMem_Malloc(8 * fold.room * 2 * sizeof(u64))
            if more == NULL:
                raise MemoryError()
            memcpy(more, fold.stamps, fold.size * sizeof(u64))
            _close_pass(fold)
            fold.stamps = more
            fold.room *= 8
    fold.stamps[fold.size] = stamp
    fold.size += 1
    return 0


cdef int _bump_stamps(State state, Pass* fold) except -1:
    cdef size_t at
    if fold.size == 1 and not fold.owned & EMITS:
        state.emits = state.emits.bumped(fold.stamps[0])
    elif fold.size:
        if not fold.owned & EMITS:
            state.emits = state.emits.drafted()
        if fold.size >= WORTH_SORTING:
            state.emits.bump_all(fold.stamps, fold.size, fold.stamps + fold.room)
        else:
            for at in range(fold.size):
                state.emits.bump_drafted(fold.stamps[at])
    if fold.size:
        fold.owned |= EMITS
        fold.size = 0
    return 0


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


cdef object _result(object state, State folded, Pass* fold):
    if fold.touched:
        _bump_stamps(folded, fold)
        return folded
    if state is None:
        raise MalformedEventError(None, None, "events", "an empty log has no state")
    return state


cdef inline void _fetch(PyObject* event) noexcept:  # a hint: cannot raise
    """Have an envelope fetched: what a fold reads of it may lie in two cache lines."""
    loom_prefetch(event)
    loom_prefetch(<char*>event + 63)


cdef inline void _fetch_parts(PyObject* event) noexcept:  # follows pointers: cannot raise
    """Have fetched what an envelope refers to, if a fold will need it."""
    if Py_TYPE(event) == <PyTypeObject*>Envelope and (<Envelope>event).kind >= STEP_STARTED:
        loom_prefetch(<PyObject*>(<Envelope>event).subject)
        loom_prefetch(<PyObject*>(<Envelope>event).body)


cdef inline void _look_ahead(State state, PyObject* event) noexcept:  # follows pointers: cannot raise
    """Have memory fetched that a later event of a step or a decision will need."""
    cdef Envelope envelope
    if Py_TYPE(event) != <PyTypeObject*>Envelope or state.execution_id is None:
        return
    envelope = <Envelope>event
    if envelope.kind >= STEP_STARTED and PyUnicode_CheckExact(envelope.subject):
        if envelope.kind == DECISION_RECORDED:
            prefetch_leaf(&state.decisions.at, mix(<u64>PyObject_Hash(envelope.subject)))
        else:
            prefetch_leaf(&state.steps.at, mix(<u64>PyObject_Hash(envelope.subject)))


cdef inline bint _is_inert(
    State state, PyObject* execution_id, long long sequence, long long kind, bint stamped
) noexcept:  # compares and stores: cannot raise
    """Whether an event is in order and nothing but its stamp can count; if so, it is folded save that stamp."""
    if (
        execution_id != <PyObject*>state.execution_id
        or sequence != state.sequence + 1
        or kind < DOMAIN
        or kind > LAST_INERT
        or (kind == DOMAIN and not stamped and state.pending is not None)
    ):
        return False
    state.sequence = sequence
    return True


cdef int _apply(
    State state,
    Pass* fold,
    object execution_id,
    long long sequence,
    long long kind,
    object subject,
    bint stamped,
    object body,
) except -1:
    """Fold one event, save its stamp."""
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
            _fact(state, fold, kind, subject, _required(state, body))
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


cdef int _fact(State state, Pass* fold, long long kind, object subject, object body) except -1:
    if state.ended is not None:
        _refuse(state, "eventType", f"the execution has {state.status}; no kernel fact may follow")
    if STEP_STARTED <= kind <= EFFECT_INDOUBT:
        if subject is None:
            _refuse(state, "payload.key", "is missing")
        _step_event(state, fold, kind, subject, body)
    elif kind == DECISION_RECORDED:
        if subject is None:
            _refuse(state, "payload.id", "is missing")
        if not fold.owned & DECISIONS:
            state.decisions = state.decisions.drafted()
            fold.owned |= DECISIONS
        state.decisions.exchange(subject, _decision(state.sequence, body))
    elif kind == EXECUTION_SUSPENDED:
        _suspend(state, body)
    elif kind == EXECUTION_RESUMED:
        _resume(state, fold, body)
    elif EXECUTION_COMPLETED <= kind <= EXECUTION_CANCELLED:
        state.status = _END_STATUS[kind]
        state.ended = body
        state.pending = None
    elif kind == EXECUTION_STARTED:
        _refuse(state, "eventType", "EXECUTION_STARTED stands at sequence 0 only")
    else:
        _refuse(state, "eventType", f"{kind} is no event kind this version knows")
    return 0


cdef int _step_event(State state, Pass* fold, long long kind, object key, object body) except -1:
    cdef Step known
    cdef Step step
    cdef PyObject* own
    if not fold.owned & STEPS:
        state.steps = state.steps.drafted()
        fold.owned |= STEPS
    elif kind != STEP_STARTED:
        own = state.steps.sole(key)
        if own != NULL:
            step = <Step>own
            _step_left(state, step)
            step.phase = <object>PyTuple_GET_ITEM(_PHASES, kind - STEP_STARTED)
            step.sequence = state.sequence
            step.outcome = body
            return _step_settled(state, kind)
    step = Step.__new__(Step)
    step.sequence = state.sequence
    step.phase = <object>PyTuple_GET_ITEM(_PHASES, kind - STEP_STARTED)
    if kind == STEP_STARTED:
        step.started = body
    else:
        step.outcome = body
    known = state.steps.exchange(key, step)
    if known is not None:
        _step_left(state, known)
        if kind != STEP_STARTED:
            step.started = known.started
    return _step_settled(state, kind)


cdef inline int _step_left(State state, Step known) except -1:
    """Note that what was known of a step is known no longer."""
    if known.phase is not _OPEN and known.phase == _IN_DOUBT:
        state.in_doubt -= 1
    return 0


cdef inline int _step_settled(State state, long long kind) except -1:
    if kind == EFFECT_INDOUBT:
        state.in_doubt += 1
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


cdef int _resume(State state, Pass* fold, object body) except -1:
    ordinal, on = _gate_fields(state, EXECUTION_RESUMED, body)
    cdef Gate gate = state.pending
    if gate is None or gate.ordinal != ordinal:
        _refuse(state, "payload.gate", f"gate {ordinal} is not pending")
    if gate.on != on:
        _refuse(state, "payload.on", f"gate {ordinal} waits for {gate.on!r}")
    if gate.answer is None or gate.sequence != state.sequence - 1:
        _refuse(state, "payload.gate", f"no {gate.on!r} event directly precedes it")
    if not fold.owned & GATES:
        state.gates = state.gates.drafted()
        fold.owned |= GATES
    state.gates.exchange(ordinal, gate)
    state.pending = None
    state.status = _SUSPENDED if state.in_doubt else _RUNNING
    return 0


cdef tuple _gate_fields(State state, int kind, object body):
    try:
        payload = decode(body)
    except BadInputError as error:
        _refuse(state, "payload", str(error))
    if (
        type(payload) is dict
        and len(payload) == 2
        and type(payload.get("gate")) is int
        and payload["gate"] >= 0
        and type(payload.get("on")) is str
    ):
        return payload["gate"], payload["on"]  # what most gates say, and well-formed
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
