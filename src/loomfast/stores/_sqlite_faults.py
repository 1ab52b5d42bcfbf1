"""What went wrong in SQLite, or with its file, as the errors of the contract.

What lives here: telling a full disk, a file that cannot be written, damage, and a file that is gone from each
other, and `DatabaseFile`, which notices the last. What must not: retrying, and anything that writes.

SQLite goes on with a file that was deleted or replaced under it: it writes into one that nobody will ever
open again. So no answer is given before the file has been looked at once more, by its device and number. It
is never opened for that, since closing it would drop this process's locks.
"""

from __future__ import annotations

import errno
import os
from typing import Final, TypeAlias

import apsw

from loomfast._errors import (
    LoomError,
    StorageError,
    StorageWriteError,
    StoreCorruptError,
    StoreFullError,
    StoreLostError,
    StoreReadError,
    StoreReadOnlyError,
)

_Identity: TypeAlias = tuple[int, int]

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


class DatabaseFile:
    """The file at `path`, and the log beside it, as they were when the store was opened."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._known: dict[str, _Identity | None] = {}

    def remember(self) -> None:
        """Note which files these are. Called once, by the thread that has opened them."""
        self._known = {name: _identity(name) for name in (self.path, self.path + "-wal")}

    def check(self) -> None:
        """Raise `StoreLostError` unless these are still the files that were opened."""
        if self._lost():
            raise StoreLostError(self.path)

    def blamed(self, error: Exception) -> Exception:
        """Return what an error of SQLite comes from, as far as the file can tell."""
        if isinstance(error, apsw.Error) and self._lost():
            lost = StoreLostError(self.path)
            lost.__cause__ = error
            return lost
        return error

    def _lost(self) -> bool:
        return any(known is not None and known != _identity(name) for name, known in self._known.items())


def _identity(name: str) -> _Identity | None:
    try:
        seen = os.stat(name)
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def read_error(execution_id: str | None, cause: Exception) -> LoomError:
    """Return what a read that failed raises: `cause` itself if it is ours, otherwise an error that has it."""
    if isinstance(cause, LoomError) and not isinstance(cause, StoreLostError):
        return cause
    about = "the store" if execution_id is None else f"execution {execution_id!r}"
    kind = StoreCorruptError if _is_damage(cause) else StoreReadError
    error = kind(execution_id, f"{about} cannot be read: {_said(cause)}")
    error.__cause__ = cause
    return error


def write_error(
    execution_id: str | None, sequence: int | None, cause: Exception, system_errno: int
) -> LoomError:
    """As `read_error`, of a write. `system_errno` is what the system said to SQLite last."""
    if isinstance(cause, LoomError) and not isinstance(cause, StoreLostError):
        return cause
    kind = _write_kind(cause, system_errno)
    error = kind(execution_id, sequence, _said(cause))
    error.__cause__ = read_error(execution_id, cause) if _is_damage(cause) else cause
    return error


def open_error(path: str, cause: apsw.Error, system_errno: int) -> StorageError:
    """Return what opening the database raises."""
    kind = _write_kind(cause, system_errno)
    reason = f"{path}: cannot be opened: {_said(cause)}"
    if kind is not StorageWriteError:
        error: StorageError = kind(None, None, reason)
    elif _is_damage(cause):
        error = StoreCorruptError(None, reason)
    else:
        error = StorageError(None, reason)
    error.__cause__ = cause
    return error


def _write_kind(cause: Exception, system_errno: int) -> type[StorageWriteError]:
    asked_system = isinstance(cause, apsw.IOError | apsw.CantOpenError)
    if isinstance(cause, apsw.FullError) or (asked_system and system_errno in _FULL):
        return StoreFullError
    if isinstance(cause, apsw.ReadOnlyError | apsw.PermissionsError):
        return StoreReadOnlyError
    if asked_system and system_errno in _READ_ONLY:
        return StoreReadOnlyError
    return StorageWriteError


def _is_damage(cause: Exception) -> bool:
    return isinstance(cause, apsw.CorruptError | apsw.NotADBError)


def _said(cause: Exception) -> str:
    return f"{type(cause).__name__}: {cause}"
