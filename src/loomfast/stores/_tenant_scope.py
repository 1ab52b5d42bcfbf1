"""Whose id is whose: the form in which a store that several tenants share keeps a tenant's ids.

What lives here: `Scope`, the mapping of ids, envelopes and states both ways; `names`, for the ids in errors;
and `own_page`, which fills a page of a tenant's own from pages of everybody's. What must not: storage.

The form. An id of a tenant is stored as the tenant's length in code points, a colon, the tenant, a colon, the
id:

    tenant "a",   id "b:c"   → "1:a:b:c"
    tenant "a:b", id "c"     → "3:a:b:c"
    tenant "",    id "x"     → "0::x"

The length says where the tenant ends, so no tenant's prefix begins another's, whatever texts are chosen, and
empty ones are texts like others. Who also uses the store unscoped must keep to ids that do not begin in this
way.

Invariant: `bare(own(x)) == x`, and nothing that is not this tenant's has a bare form.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from loomfast._errors import StoreClosedError
from loomfast._kernels import Envelope, State, decode, encode
from loomfast.stores._spi_arguments import check_texts

Item = TypeVar("Item")
Mark = TypeVar("Mark")

# How many rows of everybody's are asked for at once.
SCAN_ROWS = 500


class Scope:
    """One tenant's view of ids. `closed` after the store's close: then every id is refused."""

    def __init__(self, tenant: str) -> None:
        self.prefix = f"{len(tenant)}:{tenant}:"
        self.closed = False

    def check_open(self, execution_id: str | None = None) -> None:
        """Raise `StoreClosedError` once the view is closed."""
        if self.closed:
            raise StoreClosedError(execution_id, "the tenant's view of the store has been closed")

    def own(self, bare_id: str) -> str:
        """Return the stored form of an id. Raises `StoreClosedError` and `BadInputError`."""
        check_texts(bare_id)
        own_id = self.prefix + bare_id
        self.check_open(own_id)
        return own_id

    def bare(self, stored_id: str) -> str | None:
        """Return the tenant's own form of a stored id; None for an id that is not this tenant's."""
        return stored_id.removeprefix(self.prefix) if stored_id.startswith(self.prefix) else None

    def inward(self, event: Envelope) -> Envelope:
        """Return an event of the tenant's as it is stored."""
        return _renamed(event, self.own(event.execution_id), _with_fork_of(event.extra, self.own))

    def outward(self, event: Envelope) -> Envelope | None:
        """Return a stored event as the tenant's own; None if it is not."""
        execution_id = self.bare(event.execution_id)
        if execution_id is None:
            return None
        return _renamed(event, execution_id, _with_fork_of(event.extra, self.bare))


def tenant_of(stored_id: str) -> tuple[str, str] | None:
    """Return the tenant and the bare id of a stored id; None for one that no tenant's view has made."""
    length, colon, rest = stored_id.partition(":")
    if not colon or not (length.isascii() and length.isdigit() and len(length) < 10):
        return None
    if str(int(length)) != length:
        return None
    size = int(length)
    return (rest[:size], rest[size + 1 :]) if rest[size : size + 1] == ":" else None


def names(stored_id: str, bare_id: str) -> bool:
    """Whether an id, as an error reports it, is this one: as it is, or as it is stored for a tenant."""
    while stored_id != bare_id:
        found = tenant_of(stored_id)
        if found is None:
            return False
        stored_id = found[1]
    return True


def state_as(state: State, execution_id: str) -> State:
    """Return the same state under another id. Its maps are shared, which is free."""
    return State(
        execution_id,
        state.sequence,
        state.status,
        state.started,
        state.ended,
        state.steps,
        state.decisions,
        state.gates,
        state.pending,
        state.in_doubt,
        state.emits,
    )


def _renamed(event: Envelope, execution_id: str, extra: bytes | None) -> Envelope:
    return Envelope(
        execution_id,
        event.sequence,
        event.event_type,
        event.body,
        event.timestamp,
        event.subject,
        event.stamp,
        event.fence,
        extra,
    )


def _with_fork_of(extra: bytes | None, renamed: Callable[[str], str | None]) -> bytes | None:
    """Rename the execution that the metadata says the event was forked from.

    Where there is no name for it, it is somebody else's, and the metadata is silent about it.
    """
    if extra is None or b'"forkOf"' not in extra:
        return extra
    metadata = fork_renamed(decode(extra), renamed)
    return encode(metadata) if metadata else None


def fork_renamed(metadata: dict[str, object], renamed: Callable[[str], str | None]) -> dict[str, object]:
    """Return metadata whose `forkOf` names the same execution in another form."""
    fork_of = metadata.get("forkOf")
    if not isinstance(fork_of, dict) or not isinstance(fork_of.get("executionId"), str):
        return metadata
    execution_id = renamed(fork_of["executionId"])
    if execution_id is None:
        return {name: value for name, value in metadata.items() if name != "forkOf"}
    return {**metadata, "forkOf": {**fork_of, "executionId": execution_id}}


async def own_page(
    fetch: Callable[[Mark, int], Awaitable[list[Item]]],
    after: Mark,
    mark_of: Callable[[Item], Mark],
    outward: Callable[[Item], Item | None],
    limit: int,
) -> list[Item]:
    """Return at most `limit` of the tenant's own items behind `after`.

    `fetch(mark, rows)` returns items of everybody's behind a mark. Pages are read one at a time, so memory
    is bounded however many are somebody else's; time is not.
    """
    page: list[Item] = []
    while True:
        everybody = await fetch(after, SCAN_ROWS)
        for item in everybody:
            own = outward(item)
            if own is not None:
                page.append(own)
                if len(page) == limit:
                    return page
        if len(everybody) < SCAN_ROWS:
            return page
        after = mark_of(everybody[-1])
