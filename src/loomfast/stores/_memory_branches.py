"""The branches of a memory store.

What lives here: `MemoryBranchRegistry`. What must not: logs. Invariant: everything happens under the lock
that it shares with the event store; a branch, once kept, is never changed; what is main is kept beside it.
"""

from __future__ import annotations

from loomfast._errors import BeyondLogError, UnknownBranchError, UnknownExecutionError
from loomfast._kernels import NO_EVENT
from loomfast.stores._forking import check_branch, there_already
from loomfast.stores._memory_shared import Shared
from loomfast.stores._spi_branches import ORIGIN, Branch, BranchRegistry, Tip


class MemoryBranchRegistry(BranchRegistry):
    """Keeps branches until the process ends. Every call completes without waiting."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._lineages: dict[str, dict[str, Branch]] = {}  # origin -> name -> branch, as they were added
        self._by_execution: dict[str, Branch] = {}
        self._children: dict[str, list[Branch]] = {}
        self._main: dict[str, str] = {}  # origin -> the name of its main branch

    async def add(self, name: str, execution_id: str, *, parent_id: str, cut: int) -> Branch:
        check_branch(name, execution_id, parent_id, cut)
        with self._shared.lock:
            self._shared.check_open(execution_id)
            known = self.judge(name, execution_id, parent_id, cut)
            for wanted in (parent_id, execution_id):
                if self._shared.head(wanted).last_sequence == NO_EVENT:
                    raise UnknownExecutionError(wanted)
            last = self._shared.head(parent_id).last_sequence
            if cut > last:
                raise BeyondLogError(parent_id, cut, last)
            if known is None:
                self.keep(name, execution_id, parent_id, cut)
            return self._shown(self._by_execution[execution_id])

    async def get(self, origin_id: str, name: str) -> Branch | None:
        with self._shared.lock:
            self._shared.check_open(origin_id, name)
            branch = self._lineages.get(origin_id, {}).get(name)
            return None if branch is None else self._shown(branch)

    async def refs(self, origin_id: str) -> list[Branch]:
        with self._shared.lock:
            self._shared.check_open(origin_id)
            return [self._shown(branch) for branch in self._lineages.get(origin_id, {}).values()]

    async def tips(self, origin_id: str) -> list[Tip]:
        with self._shared.lock:
            self._shared.check_open(origin_id)
            tips = []
            for branch in self._lineages.get(origin_id, {}).values():
                head = self._shared.head(branch.execution_id)
                tips.append(Tip(branch.name, branch.execution_id, head.last_sequence, head.status))
            return tips

    async def children(self, execution_id: str) -> list[Branch]:
        with self._shared.lock:
            self._shared.check_open(execution_id)
            return [self._shown(branch) for branch in self._children.get(execution_id, [])]

    async def branch_of(self, execution_id: str) -> Branch | None:
        with self._shared.lock:
            self._shared.check_open(execution_id)
            branch = self._by_execution.get(execution_id)
            return None if branch is None else self._shown(branch)

    async def promote(self, origin_id: str, name: str) -> Branch:
        with self._shared.lock:
            self._shared.check_open(origin_id, name)
            branch = self._lineages.get(origin_id, {}).get(name)
            if branch is None:
                raise UnknownBranchError(origin_id, name)
            self._main[origin_id] = name
            return self._shown(branch)

    def judge(self, name: str, execution_id: str, parent_id: str, cut: int) -> Branch | None:
        """Return the branch if it is there word for word. Lock held.

        Raises `BranchExistsError` if it may not be added.
        """
        parent = self._by_execution.get(parent_id)
        origin_id = parent_id if parent is None else parent.origin_id
        found = self._by_execution.get(execution_id), self._lineages.get(origin_id, {}).get(name)
        in_the_way = [branch for branch in found if branch is not None]
        return there_already(in_the_way, name, execution_id, parent_id, cut)

    def keep(self, name: str, execution_id: str, parent_id: str, cut: int) -> None:
        """Add a branch that `judge` had nothing against. Lock held."""
        parent = self._by_execution.get(parent_id)
        if parent is None:
            parent = Branch(parent_id, ORIGIN, parent_id, None, None, False)
            self._by_execution[parent_id] = parent
            self._lineages[parent_id] = {ORIGIN: parent}
            self._main[parent_id] = ORIGIN
        branch = Branch(parent.origin_id, name, execution_id, parent_id, cut, False)
        self._by_execution[execution_id] = branch
        self._lineages[parent.origin_id][name] = branch
        self._children.setdefault(parent_id, []).append(branch)

    def _shown(self, branch: Branch) -> Branch:
        return branch._replace(main=self._main[branch.origin_id] == branch.name)
