"""Types of the compiled admission kernel: what `loomfast._pure.admission` has."""

from collections.abc import Callable, Sequence
from typing import Final, final

from loomfast._native.fold import Envelope

__all__ = ["NO_EVENT", "REVISION", "Head", "admit"]

REVISION: Final[int]
NO_EVENT: Final[int]

@final
class Head:
    number: int
    flow_id: str
    status: str
    last_sequence: int
    fence: int | None
    pending: bool
    in_doubt: frozenset[str]
    wake_at: int | None
    def __init__(
        self,
        number: int = 0,
        flow_id: str = "",
        status: str = "",
        last_sequence: int = -1,
        fence: int | None = None,
        pending: bool = False,
        in_doubt: frozenset[str] = ...,
        wake_at: int | None = None,
    ) -> None: ...
    def copy(self) -> Head: ...
    def advance(self, event: Envelope) -> None: ...

def admit(head_of: Callable[[str], Head], envelopes: Sequence[Envelope]) -> dict[str, Head]: ...
