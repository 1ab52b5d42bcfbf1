"""Events as rows of PostgreSQL and rows as events.

What lives here: the columns of `events`, the mapping both ways, texts and keys, and the row's checksums. What
must not: connections.

PostgreSQL's text holds neither NUL nor lone surrogates. Every text of a caller's is stored as `bytea`, the
surrogate-passing UTF-8 of it: reversible, and in the order of code points. A stamp is an unsigned 64-bit
number and `bigint` is signed: it is stored as the signed number of the same bits.

An index entry must fit a third of a page. So what is looked up by a text is looked up by its *key*: the
text's bytes, or for a long one 0xFF (which is in no UTF-8) and their SHA-256, with the text in a column
beside it.

Two CRC-32 make one `checksum`. The low half covers what a fold reads of the row, so that a fold need not
fetch the bodies of stamped emits to be sure of what it does fetch; the high half goes on from there over the
rest. Both begin with the execution's id: a row that has strayed into another log is found out. They find what
a failing disk or a stray write did; they do not protect against somebody who recomputes them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, TypeAlias

from loomfast import _events as ev
from loomfast._errors import StoreReadError
from loomfast._kernels import Envelope
from loomfast.stores._spi_arguments import check_texts
from loomfast.stores._unreadable import damaged

# The columns of an event in the order of `to_row`; its execution's number and its position are the server's.
READ_COLUMNS: Final = "sequence, kind, stamp, subject, fence, timestamp, checksum, extra, body"

Row: TypeAlias = tuple[int, int, int | None, bytes | None, int | None, int, int, bytes | None, bytes]

_LONGEST_KEY: Final = 512
_FOLDED: Final = struct.Struct(">qhqi")
_REST: Final = struct.Struct(">qqi")
_ABSENT: Final = -1


def store_text(text: str) -> bytes:
    """The form of a text that PostgreSQL can hold. Raises `BadInputError` for what is none."""
    if not isinstance(text, str):
        check_texts(text)
    return text.encode("utf-8", "surrogatepass")


def load_text(value: bytes) -> str:
    """The text that `store_text` was given."""
    return value.decode("utf-8", "surrogatepass")


def key_of(text: str) -> bytes:
    """What a text is looked up by."""
    return _key(store_text(text))


def key_and_long(text: str) -> tuple[bytes, bytes | None]:
    """The key of a text, and its bytes where the key is not them: `coalesce(long, key)` is the text."""
    stored = store_text(text)
    return _key(stored), stored if len(stored) > _LONGEST_KEY else None


def _key(stored: bytes) -> bytes:
    return stored if len(stored) <= _LONGEST_KEY else b"\xff" + sha256(stored).digest()


def place_of(execution_id: str) -> int:
    """Where the checksums of an execution's rows begin."""
    return zlib.crc32(store_text(execution_id))


def to_row(place: int, event: Envelope) -> Row:
    """The row of an event. Raises `struct.error` for a number that no 64 bits hold."""
    sequence, kind, stamp, body = event.sequence, event.kind, event.stamp, event.body
    assert isinstance(body, bytes)  # what has no JSON form was refused before
    if stamp is not None and stamp >= 2**63:
        stamp -= 2**64
    subject = None if event.subject is None else event.subject.encode("utf-8", "surrogatepass")
    folded = folded_checksum(place, sequence, kind, stamp, subject, body)
    checksum = _whole_checksum(folded, kind, stamp, subject, event.fence, event.timestamp, event.extra, body)
    return sequence, kind, stamp, subject, event.fence, event.timestamp, checksum, event.extra, body


def to_event(execution_id: str, place: int, row: Sequence[Any]) -> Envelope:
    """The event of a row of `READ_COLUMNS`. Raises `StoreReadError` if it is not as it was written."""
    sequence, kind, stamp, subject, fence, timestamp, checksum, extra, body = row
    folded = folded_checksum(place, sequence, kind, stamp, subject, body)
    if checksum != _whole_checksum(folded, kind, stamp, subject, fence, timestamp, extra, body):
        raise damaged(execution_id, sequence)
    text = None if subject is None else load_text(subject)
    event_type = text if kind == ev.DOMAIN else ev.KIND_NAMES.get(kind)
    if event_type is None:
        raise StoreReadError(
            execution_id,
            f"execution {execution_id!r}, sequence {sequence}: event kind {kind} is a newer loomfast's",
        )
    if stamp is not None:
        stamp &= 0xFFFFFFFFFFFFFFFF
    return Envelope(execution_id, sequence, event_type, body, timestamp, text, stamp, fence, extra)


def steers(kind: int, stamp: int | None) -> bool:
    """Whether a fold reads more of an event than its stamp: a kernel fact, or what may answer a gate."""
    return kind > ev.LAST_INERT or (kind == ev.DOMAIN and stamp is None)


def folded_checksum(
    place: int, sequence: int, kind: int, stamp: int | None, subject: bytes | None, body: bytes | None
) -> int:
    """The checksum of what a fold reads: 32 bits. `subject` and `body` count where the event steers only."""
    if not steers(kind, stamp):
        return zlib.crc32(_FOLDED.pack(sequence, kind, 0 if stamp is None else stamp, stamp is None), place)
    # A steering event has no body only in a row that is damaged.
    size = _ABSENT if subject is None else len(subject)
    crc = zlib.crc32(_FOLDED.pack(sequence, kind, 0 if stamp is None else stamp, size), place)
    return zlib.crc32(body or b"", crc if subject is None else zlib.crc32(subject, crc))


def _whole_checksum(
    folded: int,
    kind: int,
    stamp: int | None,
    subject: bytes | None,
    fence: int | None,
    timestamp: int,
    extra: bytes | None,
    body: bytes,
) -> int:
    size = _ABSENT if subject is None else len(subject)
    crc = zlib.crc32(_REST.pack(_ABSENT if fence is None else fence, timestamp, size), folded)
    if not steers(kind, stamp):
        crc = zlib.crc32(body, crc if subject is None else zlib.crc32(subject, crc))
    if extra is not None:
        crc = zlib.crc32(extra, zlib.crc32(b"+", crc))
    both = crc << 32 | folded
    return both - 2**64 if both >= 2**63 else both
