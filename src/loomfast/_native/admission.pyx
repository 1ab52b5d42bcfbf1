"""Admission, compiled: same names, parameters, heads and errors as `_pure/admission.py`, which specifies it.

Heads are not known to the garbage collector, which would go through thousands of them: none can be part of a
cycle.
"""

cimport cython
from cpython.bytes cimport PyBytes_Check
from cpython.long cimport PyLong_CheckExact

from loomfast._native.fold cimport Envelope as _Envelope

from loomfast import _events as ev
from loomfast._errors import DuplicateSequenceError, MalformedEventError, StaleFenceError
from loomfast._native.digest import decode

__all__ = ["NO_EVENT", "REVISION", "Head", "admit"]

REVISION = 3
NO_EVENT = -1

cdef enum:  # as in `_events`; a test compares them
    LAST_INERT = 2
    EXECUTION_STARTED = 10
    EXECUTION_SUSPENDED = 11
    EXECUTION_RESUMED = 12
    STEP_STARTED = 20
    EFFECT_INDOUBT = 24

cdef object _RUNNING = ev.RUNNING
cdef object _SUSPENDED = ev.SUSPENDED
cdef frozenset _ENDED = frozenset(ev.END_KIND)
cdef dict _END_STATUS = dict(ev.END_STATUS)
cdef object _NONE_IN_DOUBT = frozenset()


@cython.final
@cython.no_gc
@cython.freelist(16)
@cython.auto_pickle(False)
cdef class Head:
    """Where one execution stands; see the twin for its attributes."""

    cdef public object number
    cdef public object flow_id
    cdef public object status
    cdef readonly long long last_sequence
    cdef public object fence
    cdef public bint pending
    cdef public object in_doubt
    cdef public object wake_at

    def __init__(
        self,
        number=0,
        flow_id="",
        status="",
        last_sequence=-1,
        fence=None,
        bint pending=False,
        in_doubt=_NONE_IN_DOUBT,
        wake_at=None,
    ):
        self.number = number
        self.flow_id = flow_id
        self.status = status
        if not PyLong_CheckExact(last_sequence):
            raise TypeError(f"last_sequence: must be an int, not {type(last_sequence).__name__}")
        self.last_sequence = last_sequence
        self.fence = fence
        self.pending = pending
        self.in_doubt = in_doubt
        self.wake_at = wake_at

    def copy(self):
        """Return another one that stands there."""
        return _copy(self)

    def advance(self, _Envelope event not None):
        """Take in the next event, which must be the one after `last_sequence`."""
        _advance(self, event)


cdef Head _copy(Head head):
    cdef Head copy = Head.__new__(Head)
    copy.number = head.number
    copy.flow_id = head.flow_id
    copy.status = head.status
    copy.last_sequence = head.last_sequence
    copy.fence = head.fence
    copy.pending = head.pending
    copy.in_doubt = head.in_doubt
    copy.wake_at = head.wake_at
    return copy


cdef int _advance(Head head, _Envelope event) except -1:
    cdef int kind = event.kind
    if head.last_sequence == -1:
        head.status = _RUNNING
    head.last_sequence = event.sequence
    if kind <= LAST_INERT or head.status in _ENDED:
        return 0
    if STEP_STARTED <= kind <= EFFECT_INDOUBT:
        if not head.in_doubt and kind != EFFECT_INDOUBT:
            return 0
        key = {event.subject or ""}
        head.in_doubt = head.in_doubt | key if kind == EFFECT_INDOUBT else head.in_doubt - key
    elif kind == EXECUTION_SUSPENDED:
        head.pending, head.wake_at = True, _wake_at(event)
    elif kind == EXECUTION_RESUMED:
        head.pending, head.wake_at = False, None
    elif kind in _END_STATUS:
        head.status, head.pending, head.wake_at = _END_STATUS[kind], False, None
        return 0
    elif kind == EXECUTION_STARTED:
        head.flow_id = _flow_id(event)
        return 0
    head.status = _SUSPENDED if head.pending or head.in_doubt else _RUNNING
    return 0


cdef object _flow_id(_Envelope event):
    flow_id = _field(event, "flowId")
    return flow_id if isinstance(flow_id, str) else ""


cdef object _wake_at(_Envelope event):
    wake_at = _field(event, "wakeAt")
    # What a 64-bit column cannot hold comes after everything that does.
    return min(wake_at, 2**63 - 1) if type(wake_at) is int and wake_at >= 0 else None


cdef object _field(_Envelope event, str name):
    payload = decode(event.body) if PyBytes_Check(event.body) else event.payload
    return payload.get(name) if isinstance(payload, dict) else None


def admit(head_of, envelopes):
    """Judge a batch and return the heads of its executions as they stand after it; see the twin."""
    cdef dict heads = {}
    cdef Head head = None
    cdef _Envelope event
    known = None
    cdef tuple batch = tuple(envelopes)  # nobody changes it meanwhile
    for item in batch:
        if type(item) is not _Envelope:
            raise TypeError(f"envelopes: must be envelopes of this kernel, not {type(item).__name__}")
        event = <_Envelope>item
        if head is None or event.execution_id != known:
            known = event.execution_id
            found = heads.get(known)
            if found is None:
                found = head_of(known)
                if type(found) is not Head:
                    raise TypeError(f"head_of: must give heads of this kernel, not {type(found).__name__}")
                head = _copy(<Head>found)
                heads[known] = head
            else:
                head = <Head>found
        if head.fence is not None and (event.fence is None or event.fence < head.fence):
            raise StaleFenceError(known, event.fence, head.fence)
    for item in batch:
        event = <_Envelope>item
        if event.execution_id != known:
            known = event.execution_id
            head = <Head>heads[known]
        if event.sequence != head.last_sequence + 1:
            if event.sequence <= head.last_sequence:
                raise DuplicateSequenceError(event.execution_id, event.sequence)
            raise MalformedEventError(
                event.execution_id,
                event.sequence,
                "sequence",
                f"must be {head.last_sequence + 1}, the next of its log",
            )
        _advance(head, event)
    return heads
