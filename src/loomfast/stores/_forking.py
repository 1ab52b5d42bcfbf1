"""What a copied event looks like, and what a branch may be called: one rule for every store.

What lives here: `Copier`, which makes an execution's event another one's, the checks of arguments that
copying and branching share, and when a name or an execution is taken. What must not: storage, locks, asyncio.

Invariant: a copy differs from its source in its execution id (so in its own id), in its fence, which it has
none of, and in the metadata that was merged in; in nothing else. Stamps above all survive, so that a fork
serves the emits it inherits (ADR 0102, D5).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from loomfast._errors import BadInputError, BranchExistsError
from loomfast._kernels import Envelope, decode, encode
from loomfast.stores._spi_arguments import bounded, check_texts
from loomfast.stores._spi_branches import ORIGIN, Branch

# The envelope's own fields: they are not other metadata, and are not for a fork to set.
_RESERVED = ("fence", "flowEmit")


class Copier:
    """Turns events of `source_id` into the events of `target_id`; call it once per event.

    Raises `BadInputError` for `fork_metadata` that names a reserved key, `JsonFormError` if it has no JSON
    form.
    """

    def __init__(
        self, source_id: str, target_id: str, through: int, fork_metadata: Mapping[str, object] | None
    ) -> None:
        check_texts(source_id, target_id)
        if bounded("through", through) < 0:
            raise BadInputError(f"through={through}: must be 0 or more")
        for name in _RESERVED:
            if fork_metadata is not None and name in fork_metadata:
                raise BadInputError(f"fork_metadata: {name!r} is the kernel's to write")
        added = {"forkOf": {"executionId": source_id, "sequence": through}, **(fork_metadata or {})}
        self._target_id = target_id
        self._added: dict[str, object] = decode(encode(added))
        # Most events of a log have the same other metadata, mostly none: each is merged once.
        self._merged: dict[bytes | None, bytes] = {None: encode(self._added)}

    def __call__(self, event: Envelope) -> Envelope:
        extra = self._merged.get(event.extra)
        if extra is None:
            assert event.extra is not None  # None is in the table from the start
            extra = encode({**decode(event.extra), **self._added})
            if len(self._merged) < 1_000:
                self._merged[event.extra] = extra
        return Envelope(
            self._target_id,
            event.sequence,
            event.event_type,
            event.body,
            event.timestamp,
            event.subject,
            event.stamp,
            None,
            extra,
        )


def check_branch(name: str, execution_id: str, parent_id: str, cut: int) -> None:
    """Refuse a branch that no lineage can have. Raises `BadInputError`."""
    check_texts(name, execution_id, parent_id)
    if not name or name == ORIGIN:
        raise BadInputError(f"branch name {name!r}: choose one that is not empty and not {ORIGIN!r}")
    if execution_id == parent_id:
        raise BadInputError(f"execution {execution_id!r} cannot be a branch of itself")
    if bounded("cut", cut) < 0:
        raise BadInputError(f"cut={cut}: must be 0 or more")


def there_already(
    in_the_way: Iterable[Branch], name: str, execution_id: str, parent_id: str, cut: int
) -> Branch | None:
    """Return the branch if it is there word for word; None if nothing is in the way of adding it.

    `in_the_way` are the branch that the execution is, and the one that has the name in the lineage. Raises
    `BranchExistsError` if the first of them is another one.
    """
    for there in in_the_way:
        if (there.name, there.execution_id, there.parent_id, there.cut) != (
            name,
            execution_id,
            parent_id,
            cut,
        ):
            raise BranchExistsError(there.execution_id, there.name)
        return there
    return None


def check_cut(before: int) -> None:
    """Refuse a cut that no log has."""
    if bounded("before", before) < 0:
        raise BadInputError(f"before={before}: must be 0 or more")
