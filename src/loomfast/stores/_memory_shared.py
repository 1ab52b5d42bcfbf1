"""What the parts of a memory store know in common: its logs, and everything it keeps beside them.

What lives here: `Shared`: the lock, the clock, where each execution stands, and whether the store is closed.
What must not: logs. Invariant: its methods are called with `lock` held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from loomfast._errors import StoreClosedError
from loomfast._kernels import Head
from loomfast.stores._spi_arguments import check_texts


class Shared:
    """`heads` by execution id; `cuts`: the first sequence available beyond 0, of truncated executions."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.now_ms = now_ms
        self.lock = threading.Lock()
        self.closed = False
        self.heads: dict[str, Head] = {}
        self.cuts: dict[str, int] = {}

    def check_open(self, *texts: str) -> None:
        """Refuse a call after the store's `close`, and one whose ids or names are no texts.

        Raises `StoreClosedError` for the first of them, and `BadInputError`.
        """
        check_texts(*texts)
        if self.closed:
            raise StoreClosedError(texts[0] if texts else None, "the memory store has been closed")

    def head(self, execution_id: str) -> Head:
        """Where an execution stands."""
        return self.heads.get(execution_id) or Head()

    def cut(self, execution_id: str) -> int:
        """The first sequence beyond 0 that was not truncated; 1 where nothing was."""
        return self.cuts.get(execution_id, 1)
