"""Whether a batch may be appended, and where its executions stand after it: one rule for every store.

What lives here: `Head`, what a store must know of an execution to judge an append without reading its log,
`admit`, the judgement, and the checks of what is read that stores share. What must not: storage, locks,
asyncio. Whoever calls `admit` holds the store's write lock, so that a head cannot change between judgement
and write.

Invariant: `Head.status` and `Head.last_sequence` are those of the state the log folds to, as long as the
log is one that folds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loomfast import _events as ev
from loomfast._errors import (
    DuplicateSequenceError,
    MalformedEventError,
    PrefixTruncatedError,
    StaleFenceError,
    UnsupportedTypeError,
)
from loomfast._kernels import Envelope, decode
from loomfast.stores._spi_arguments import LAST

NO_EVENT = -1


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
    return min(wake_at, LAST) if type(wake_at) is int and wake_at >= 0 else None


def _field(event: Envelope, name: str) -> object:
    payload = decode(event.body) if isinstance(event.body, bytes) else event.payload
    return payload.get(name) if isinstance(payload, dict) else None


def admit(head_of: Callable[[str], Head], envelopes: Sequence[Envelope]) -> dict[str, Head]:
    """Judge a batch and return the heads of its executions as they stand after it, by execution id.

    The heads that `head_of` returns are not changed. Raises `StaleFenceError` (judged first, for the whole
    batch), `DuplicateSequenceError`, and `MalformedEventError` for an event that would leave a gap: a log
    has none, and an append that arrives after a failed one must not make one.
    """
    heads: dict[str, Head] = {}
    for event in envelopes:
        head = heads.get(event.execution_id)
        if head is None:
            head = heads[event.execution_id] = head_of(event.execution_id).copy()
        if head.fence is not None and (event.fence is None or event.fence < head.fence):
            raise StaleFenceError(event.execution_id, event.fence, head.fence)
    for event in envelopes:
        head = heads[event.execution_id]
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


def refuse_unstorable(envelopes: Sequence[Envelope]) -> None:
    """Refuse what a store of JSON text cannot keep, before anything is written.

    Raises `UnsupportedTypeError` at `$` for a payload without a JSON form.
    """
    for event in envelopes:
        if not isinstance(event.body, bytes):
            value = event.body.value if isinstance(event.body, ev.Opaque) else event.body
            raise UnsupportedTypeError(
                "$",
                type(value).__qualname__,
                f"execution {event.execution_id!r}, sequence {event.sequence}: a payload of type "
                f"{type(value).__qualname__} has no JSON form, and this store keeps JSON",
            )


def check_range(execution_id: str, first: int, last: int | None, cut: int) -> None:
    """Refuse a range that holds a sequence which was truncated, one of 1 to `cut` - 1.

    Raises `PrefixTruncatedError`.
    """
    wanted = max(first, 1)
    if wanted < cut and (last is None or wanted <= last):
        raise PrefixTruncatedError(execution_id, wanted, cut)
