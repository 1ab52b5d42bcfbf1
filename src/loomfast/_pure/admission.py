"""Admission: may a batch be appended, and where do its executions stand after it? One rule for every store.

What lives here: `Head`, what a store must know of an execution to judge an append without reading its log,
and `admit`, the judgement. What must not: storage, locks. Whoever calls `admit` holds the store's write lock,
so that a head cannot change between judgement and write. This file specifies it; `_native/admission.pyx` is
its fast copy, since a busy event loop waits while a writer thread judges what many have appended.

Invariant: `Head.status` and `Head.last_sequence` are those of the state the log folds to, as long as the log
is one that folds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from loomfast import _events as ev
from loomfast._errors import DuplicateSequenceError, MalformedEventError, StaleFenceError
from loomfast._pure.digest import decode
from loomfast._pure.fold import Envelope

__all__ = ["NO_EVENT", "REVISION", "Head", "admit"]

REVISION: Final = 3

NO_EVENT: Final = -1


class Head:
    """Where one execution stands.

    `number` is the store's own key and place in listings, `last_sequence` the highest ever written
    (`NO_EVENT` before the first), `fence` the newest token or None, `pending` whether a gate is open,
    `in_doubt` the keys of the steps parked in doubt, `wake_at` (ms) when a timer answers the open gate, None
    if none does. `status` is empty before the first event.
    """

    __slots__ = ("fence", "flow_id", "in_doubt", "last_sequence", "number", "pending", "status", "wake_at")

    def __init__(
        self,
        number: int = 0,
        flow_id: str = "",
        status: str = "",
        last_sequence: int = NO_EVENT,
        fence: int | None = None,
        pending: bool = False,
        in_doubt: frozenset[str] = frozenset(),
        wake_at: int | None = None,
    ) -> None:
        self.number = number
        self.flow_id = flow_id
        self.status = status
        self.last_sequence = last_sequence
        self.fence = fence
        self.pending = pending
        self.in_doubt = in_doubt
        self.wake_at = wake_at

    def copy(self) -> Head:
        return Head(
            self.number,
            self.flow_id,
            self.status,
            self.last_sequence,
            self.fence,
            self.pending,
            self.in_doubt,
            self.wake_at,
        )

    def advance(self, event: Envelope) -> None:
        """Take in the next event, which must be the one after `last_sequence`."""
        if self.last_sequence == NO_EVENT:
            self.status = ev.RUNNING
        self.last_sequence = event.sequence
        kind = event.kind
        if kind <= ev.LAST_INERT or self.status in ev.END_KIND:
            return
        if kind in ev.STEP_PHASE:
            if not self.in_doubt and kind != ev.EFFECT_INDOUBT:
                return
            key = {event.subject or ""}
            self.in_doubt = self.in_doubt | key if kind == ev.EFFECT_INDOUBT else self.in_doubt - key
        elif kind == ev.EXECUTION_SUSPENDED:
            self.pending, self.wake_at = True, _wake_at(event)
        elif kind == ev.EXECUTION_RESUMED:
            self.pending, self.wake_at = False, None
        elif kind in ev.END_STATUS:
            self.status, self.pending, self.wake_at = ev.END_STATUS[kind], False, None
            return
        elif kind == ev.EXECUTION_STARTED:
            self.flow_id = _flow_id(event)
            return
        self.status = ev.SUSPENDED if self.pending or self.in_doubt else ev.RUNNING


def _flow_id(event: Envelope) -> str:
    flow_id = _field(event, "flowId")
    return flow_id if isinstance(flow_id, str) else ""


def _wake_at(event: Envelope) -> int | None:
    wake_at = _field(event, "wakeAt")
    # What a 64-bit column cannot hold comes after everything that does.
    return min(wake_at, 2**63 - 1) if type(wake_at) is int and wake_at >= 0 else None


def _field(event: Envelope, name: str) -> object:
    payload = decode(event.body) if isinstance(event.body, bytes) else event.payload
    return payload.get(name) if isinstance(payload, dict) else None


def admit(head_of: Callable[[str], Head], envelopes: Sequence[Envelope]) -> dict[str, Head]:
    """Judge a batch and return the heads of its executions as they stand after it, by execution id.

    The heads that `head_of` returns are not changed. Raises `StaleFenceError` (judged first, for the whole
    batch), `DuplicateSequenceError`, and `MalformedEventError` for an event that would leave a gap: a log
    has none, and an append that arrives after a failed one must not make one. Raises `TypeError` for what is
    no envelope of this kernel.
    """
    heads: dict[str, Head] = {}
    head, known = None, ""  # most batches are of one execution
    for event in envelopes:
        if type(event) is not Envelope:
            raise TypeError(f"envelopes: must be envelopes of this kernel, not {type(event).__name__}")
        if head is None or event.execution_id != known:
            known = event.execution_id
            head = heads.get(known)
            if head is None:
                head = heads[known] = head_of(known).copy()
        if head.fence is not None and (event.fence is None or event.fence < head.fence):
            raise StaleFenceError(known, event.fence, head.fence)
    for event in envelopes:
        if event.execution_id != known:
            known = event.execution_id
            head = heads[known]
        assert head is not None
        if event.sequence != head.last_sequence + 1:
            if event.sequence <= head.last_sequence:
                raise DuplicateSequenceError(event.execution_id, event.sequence)
            raise MalformedEventError(
                event.execution_id,
                event.sequence,
                "sequence",
                f"must be {head.last_sequence + 1}, the next of its log",
            )
        head.advance(event)
    return heads
