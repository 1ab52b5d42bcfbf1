"""Whether there is room for one more: how many executions a process takes up by itself, in all, of one flow,
of one tenant.

What lives here: `Limits`, and `Slots`, which counts. What must not: what takes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from loomfast._core.arguments import count_argument


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many executions a process drives that it took up by itself: recovered, woken, or due by a schedule.

    `concurrency` in all; `per_flow` of each flow, or of those that a mapping names by id; `per_tenant` of
    each tenant. None is no limit. What users start and answer in the process is not limited.
    """

    concurrency: int | None = 100
    per_flow: int | Mapping[str, int] | None = None
    per_tenant: int | None = None

    def __post_init__(self) -> None:
        _check("concurrency", self.concurrency)
        _check("per_tenant", self.per_tenant)
        if isinstance(self.per_flow, Mapping):
            for flow_id, most in self.per_flow.items():
                _check(f"per_flow[{flow_id!r}]", most)
            object.__setattr__(self, "per_flow", MappingProxyType(dict(self.per_flow)))
        else:
            _check("per_flow", self.per_flow)

    def of_flow(self, flow_id: str) -> int | None:
        """Return how many of one flow may run."""
        if isinstance(self.per_flow, Mapping):
            return self.per_flow.get(flow_id)
        return self.per_flow


class Slots:
    """The slots that are taken. An execution has one from when it is taken up until it rests.

    `changed` is called with 1 for each that is taken, with -1 for each that is given back, and with 0 when
    none is kept any more.
    """

    def __init__(self, limits: Limits, changed: Callable[[int], object]) -> None:
        self.limits = limits
        self.taken: dict[tuple[str | None, str], str] = {}  # (tenant, execution id) -> flow id
        self.kept = False  # the next slot that is free is for what is abandoned
        self._changed = changed
        self._flows: Counter[str] = Counter()
        self._tenants: Counter[str | None] = Counter()

    @property
    def full(self) -> bool:
        """Whether there is no room for any execution that is abandoned."""
        return self.limits.concurrency is not None and len(self.taken) >= self.limits.concurrency

    @property
    def full_for_due(self) -> bool:
        """Whether there is no room for any execution that is due, since what is abandoned comes first."""
        most = self.limits.concurrency
        return most is not None and len(self.taken) + self.kept >= most

    def take(self, execution_id: str, flow_id: str, tenant: str | None, *, abandoned: bool = False) -> bool:
        """Take a slot for an execution that has none yet, and tell whether there was one."""
        of_flow = self.limits.of_flow(flow_id)
        of_tenant = self.limits.per_tenant
        if (
            (self.full if abandoned else self.full_for_due)
            or (tenant, execution_id) in self.taken
            or (of_flow is not None and self._flows[flow_id] >= of_flow)
            or (of_tenant is not None and self._tenants[tenant] >= of_tenant)
        ):
            return False
        self.taken[tenant, execution_id] = flow_id
        self._flows[flow_id] += 1
        self._tenants[tenant] += 1
        self._changed(1)
        return True

    def give_back(self, execution_id: str, tenant: str | None) -> None:
        """Give the slot of an execution back, if it has one."""
        flow_id = self.taken.pop((tenant, execution_id), None)
        if flow_id is None:
            return
        self._flows -= Counter((flow_id,))
        self._tenants -= Counter((tenant,))
        self._changed(-1)

    def keep(self, kept: bool) -> None:
        """Keep one slot, from now on or no longer, for what is abandoned."""
        was, self.kept = self.kept, kept
        if was and not kept:
            self._changed(0)

    def of(self, tenant: str | None) -> int:
        """Return how many slots a tenant has taken."""
        return self._tenants[tenant]


def _check(name: str, most: int | None) -> None:
    if most is not None:
        count_argument(name, most)
