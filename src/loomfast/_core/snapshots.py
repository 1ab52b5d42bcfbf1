"""Snapshots: a folded state as bytes that can be trusted or are found out.

What lives here: `Snapshot`, making one of a state and a state of one. What must not: storage, and deciding
when to take one.

Theory of operation. A snapshot is `encode(state.to_json())` with what it claims to be: execution, sequence,
and the version of the event schema whose fold made it. The checksum (XXH3, 64 bits) covers all of it:

    xxh3_64(encode([executionId, sequence, schemaVersion]) + body)

so a body cannot pass for another execution's, or for another point of its log. It finds what a failing disk
or a stray write did; it does not protect against somebody who recomputes it. Whoever gets `BadSnapshotError`
folds the log from its start, or from an older snapshot: half a snapshot is never folded.

A version is readable only if its fold makes the same state of the same log as ours, which nobody can know
of a version to come. So the readable ones are listed.

Invariant: `state_of(snapshot_of(state)) == state`, whichever kernels wrote and read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import xxhash

from loomfast._errors import BadSnapshotError, JsonTextError, TooDeepError
from loomfast._events import EVENT_SCHEMA_VERSION
from loomfast._kernels import State, decode, encode

# Add to these when EVENT_SCHEMA_VERSION rises, unless the new fold makes other states of old logs.
READABLE_VERSIONS: Final = frozenset({"1.19.0"})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of `execution_id` after `sequence`, as persisted JSON in `body`.

    `schema_version` is that of the fold that made it; `checksum` is 16 lower-case hex digits.
    """

    execution_id: str
    sequence: int
    schema_version: str
    body: bytes
    checksum: str

    def verify(self) -> None:
        """Raise `BadSnapshotError` if this version cannot be read, or the checksum is not that of the rest.

        Does not parse the body; `state_of` does.
        """
        if self.schema_version not in READABLE_VERSIONS:
            known = ", ".join(sorted(READABLE_VERSIONS))
            raise self._bad("schemaVersion", f"is {self.schema_version!r}, this loomfast reads {known}")
        checksum = _checksum(self.execution_id, self.sequence, self.schema_version, self.body)
        if self.checksum != checksum:
            raise self._bad("checksum", f"is {self.checksum!r}, the content's is {checksum!r}")

    def renamed(self, execution_id: str) -> Snapshot:
        """Return the snapshot of the same state under another execution's id.

        One that does not pass its checksum comes out damaged, too. The body is parsed and written again.
        """
        if not is_sound(self):
            return replace(self, execution_id=execution_id)
        body = encode({**decode(self.body), "executionId": execution_id})
        checksum = _checksum(execution_id, self.sequence, self.schema_version, body)
        return Snapshot(execution_id, self.sequence, self.schema_version, body, checksum)

    def _bad(self, field: str, reason: str) -> BadSnapshotError:
        return BadSnapshotError(field, reason, self.execution_id, self.sequence)


def snapshot_of(state: State) -> Snapshot:
    """Return the snapshot of a state.

    Raises `TooDeepError` for a state whose JSON form nests deeper than `MAX_DEPTH`: a payload may use up all
    levels by itself, and the state puts a few around it.
    """
    body = encode(state.to_json())
    checksum = _checksum(state.execution_id, state.sequence, EVENT_SCHEMA_VERSION, body)
    return Snapshot(state.execution_id, state.sequence, EVENT_SCHEMA_VERSION, body, checksum)


def state_of(snapshot: Snapshot) -> State:
    """Return the state that a snapshot holds.

    Raises `BadSnapshotError`, naming the execution and the sequence, for an unknown version, a wrong
    checksum, a body that no fold writes, and one that is not the state the snapshot claims to be.
    """
    snapshot.verify()
    try:
        state = State.from_json(decode(snapshot.body))
    except (JsonTextError, TooDeepError) as error:
        raise snapshot._bad("body", str(error)) from error
    except BadSnapshotError as error:
        raise snapshot._bad(error.field, error.reason) from error
    for field, claimed, held in (
        ("executionId", snapshot.execution_id, state.execution_id),
        ("sequence", snapshot.sequence, state.sequence),
    ):
        if claimed != held:
            raise snapshot._bad(field, f"is {held!r} in the body and {claimed!r} outside it")
    return state


def is_sound(snapshot: Snapshot) -> bool:
    """Whether a snapshot is of a version that can be read and passes its checksum."""
    try:
        snapshot.verify()
    except BadSnapshotError:
        return False
    return True


def _checksum(execution_id: str, sequence: int, schema_version: str, body: bytes) -> str:
    hashed = xxhash.xxh3_64(encode([execution_id, sequence, schema_version]))
    hashed.update(body)
    return hashed.hexdigest()
