"""Making sequence 0 durable before the body runs: ADR 0103, D1 and D2.

Theory of operation
-------------------
A caller who chooses an execution id wants a repeat of the trigger to meet the same execution. So the
bootstrap is appended, and awaited, before anything is folded or run; the store's uniqueness decides who is
first.

A conflict is confirmed, not trusted: behind a coalescing store the error may describe somebody else's write.

    append sequence 0
      ok                                        → started
      conflict or stale fence → read [0..0]
        present                                 → ExecutionAlreadyExistsError
        absent → append once more, alone, as a one-envelope batch
          ok                                    → started
          conflict or stale fence → read [0..0]
            present                             → ExecutionAlreadyExistsError
            absent, stale fence both times      → StartFencedOutError (may be tried again)
            absent, otherwise                   → StorageWriteError
      a read that fails                         → StorageWriteError
      anything else                             → StorageWriteError

Nothing has been folded, no hook has heard of an event and no effect has run when any of these is raised.
"""

from __future__ import annotations

from loomfast._errors import (
    DuplicateEnvelopeIdError,
    DuplicateSequenceError,
    ExecutionAlreadyExistsError,
    StaleFenceError,
    StartFencedOutError,
    StorageWriteError,
)
from loomfast._kernels import Envelope
from loomfast._runtime.journal import write_error
from loomfast.stores import EventStore

_CONFLICTS = (DuplicateSequenceError, DuplicateEnvelopeIdError, StaleFenceError)


async def append_bootstrap(store: EventStore, envelope: Envelope) -> None:
    """Append sequence 0 and return once it is durable; raise as the table above says.

    Cancelled while the store works, the append happens whole or not at all, and the execution may exist.
    """
    try:
        await store.append(envelope)
        return
    except Exception as error:
        first = error
    await settle_bootstrap(store, envelope, first)


async def settle_bootstrap(store: EventStore, envelope: Envelope, first: Exception) -> None:
    """As `append_bootstrap`, whose first append has failed with `first`."""
    await _confirm(store, envelope, first)
    try:
        await store.append_batch((envelope,))
        return
    except Exception as error:
        second = error
    await _confirm(store, envelope, second)
    if is_a(first, StaleFenceError) and is_a(second, StaleFenceError):
        raise StartFencedOutError(
            envelope.execution_id, 0, "a newer fence was acquired, and its holder wrote nothing"
        ) from second
    raise write_error(envelope.execution_id, 0, second)


async def _confirm(store: EventStore, envelope: Envelope, error: Exception) -> None:
    """Return only for a conflict that is not this execution's: sequence 0 is not there."""
    if not any(is_a(error, conflict) for conflict in _CONFLICTS):
        raise write_error(envelope.execution_id, 0, error)
    try:
        present = await store.read_range(envelope.execution_id, 0, 0)
    except Exception as unreadable:
        raise StorageWriteError(
            envelope.execution_id,
            0,
            f"{type(error).__name__}, and reading sequence 0 back failed: {unreadable}",
        ) from unreadable
    if present:
        raise ExecutionAlreadyExistsError(envelope.execution_id) from error


def is_a(error: BaseException, kind: type[Exception]) -> bool:
    """Match by class and by name: a second copy of loomfast must not make a conflict a storage failure."""
    return any(cls.__name__ == kind.__name__ for cls in type(error).__mro__)
