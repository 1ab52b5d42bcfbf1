"""Events as rows and rows as events.

What lives here: the columns of `events` and the way back from them. What must not: connections, and the way
there, which is the kernel's (`event_rows`), since a busy event loop waits for it.

Two things have no SQLite form of their own. A stamp is an unsigned 64-bit number and SQLite's integers are
signed: it is stored as the signed number of the same bits. Text with a lone surrogate has no UTF-8 form: it
is stored as a BLOB of its surrogate-passing UTF-8 bytes. SQLite keeps a value's own type in a TEXT column and
never finds a BLOB equal to a TEXT, so this is reversible, and unique where the column is.

A row has two checksums, each a CRC-32. The *guard* covers what a fold reads and stands where a fold reads
anyway: `coded` is the event's kind, with the guard in its low 32 bits. `checksum` covers every column but
`position`. They find what a failing disk or a stray write did to a row; they do not protect against somebody
who recomputes them.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from loomfast import _events as ev
from loomfast._errors import StoreReadError
from loomfast._kernels import Envelope, row_checksum
from loomfast.stores._spi_arguments import check_texts
from loomfast.stores._unreadable import damaged

COLUMNS: Final = "id, coded, stamp, subject, position, fence, timestamp, checksum, extra, body"
WIDTH: Final = 10
READ_COLUMNS: Final = "id, coded, stamp, subject, fence, timestamp, checksum, extra, body"

Stored: TypeAlias = tuple[int, int, int | None, str | bytes | None, int | None, int, int, bytes | None, bytes]


def store_text(text: str) -> str | bytes:
    """The form of a text that SQLite can hold. Raises `BadInputError` for what is none."""
    if not isinstance(text, str):
        check_texts(text)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def load_text(value: str | bytes) -> str:
    """The text that `store_text` was given."""
    return value if isinstance(value, str) else value.decode("utf-8", "surrogatepass")


def to_event(execution_id: str, row: Stored) -> Envelope:
    """The event of a row of `READ_COLUMNS`. Raises `StoreReadError` if it is not as it was written."""
    row_id, coded, stamp, subject, fence, timestamp, checksum, extra, body = row
    sequence = row_id & 0xFFFFFFFF
    try:
        kind = coded >> 32
        intact = checksum == row_checksum(row_id, coded, stamp, subject, fence, timestamp, extra, body)
        text = None if subject is None else load_text(subject)
    except (TypeError, ValueError, AttributeError) as error:
        raise damaged(execution_id, sequence) from error
    event_type = text if kind == ev.DOMAIN else ev.KIND_NAMES.get(kind)
    if not intact:
        raise damaged(execution_id, sequence)
    if event_type is None:
        raise StoreReadError(
            execution_id,
            f"execution {execution_id!r}, sequence {sequence}: event kind {kind} is a newer loomfast's",
        )
    if stamp is not None:
        stamp &= 0xFFFFFFFFFFFFFFFF
    return Envelope(execution_id, sequence, event_type, body, timestamp, text, stamp, fence, extra)
