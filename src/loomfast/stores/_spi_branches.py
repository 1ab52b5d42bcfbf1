"""The contract of the branch registry that every event store has: names of forks, and where each comes from.

What lives here: `BranchRegistry` and the values its methods return. What must not: any store.

An execution that is no fork is an *origin*. Its forks, their forks and so on are its *lineage*; each is a
*branch* with a name that is unique in the lineage, and knows its parent and the sequence it was cut at. The
origin itself goes by the name `origin`. One branch of a lineage is the main one: the origin, until another is
promoted. What "main" means is the application's: nothing in the store or the runtime behaves differently.

    s ─────────────► origin, main            refs("s")        origin, try-a, try-b, try-c
    │ cut 4                                   children("s")    try-a (4), try-b (9)
    ├──► a ────────► try-a                    children("a")    try-c (6)
    │    │ cut 6                              branch_of("c")   try-c, of parent a, cut 6
    │    └──► c ───► try-c
    └──► b ────────► try-b (cut 9)

The guarantees go on from those of `_spi_snapshots.py`:

16. What `add`, `promote` and `copy_prefix(branch_name=…)` returned is durable as an append is.
17. A name stands for one execution in its lineage, and an execution has one name, for ever; of two that want
    the same, one gets `BranchExistsError`. Repeating an `add` word for word is no conflict.
18. A lineage has exactly one main branch at any time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final, NamedTuple

ORIGIN: Final = "origin"


class Branch(NamedTuple):
    """One branch. `parent_id` and `cut` (the last sequence copied) are None for the origin itself."""

    origin_id: str
    name: str
    execution_id: str
    parent_id: str | None
    cut: int | None
    main: bool


class Tip(NamedTuple):
    """Where a branch stands now."""

    name: str
    execution_id: str
    last_sequence: int
    status: str


class BranchRegistry(ABC):
    """Branches by lineage and name. A reading method gives nothing for an execution without branches."""

    @abstractmethod
    async def add(self, name: str, execution_id: str, *, parent_id: str, cut: int) -> Branch:
        """Register an execution as the branch `name` of its parent's lineage.

        `EventStore.copy_prefix(branch_name=…)` does so in the transaction that copies, and is to be
        preferred. Raises, with nothing written: `BranchExistsError`, `UnknownExecutionError` for one of the
        two, `BeyondLogError` for a cut that the parent has not reached, `BadInputError` for a name that is
        empty or `origin`, a negative cut, and an execution that is its own parent.
        """

    @abstractmethod
    async def get(self, origin_id: str, name: str) -> Branch | None:
        """Return what the name stands for in the lineage of `origin_id`, or None."""

    @abstractmethod
    async def refs(self, origin_id: str) -> list[Branch]:
        """Return all branches of the lineage of `origin_id`, the origin first, then as they were added."""

    @abstractmethod
    async def tips(self, origin_id: str) -> list[Tip]:
        """Return where each branch of the lineage stands, in the order of `refs`."""

    @abstractmethod
    async def children(self, execution_id: str) -> list[Branch]:
        """Return the branches cut directly from this execution, as they were added."""

    @abstractmethod
    async def branch_of(self, execution_id: str) -> Branch | None:
        """Return the branch that this execution is: its origin, name, parent and cut. None for no branch."""

    @abstractmethod
    async def promote(self, origin_id: str, name: str) -> Branch:
        """Make this the main branch of the lineage of `origin_id`; `origin` takes it back.

        Raises `UnknownBranchError`.
        """
