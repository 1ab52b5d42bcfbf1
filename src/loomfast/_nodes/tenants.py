"""Whose execution is it, and which runtime drives it?

What lives here: `Runtimes`, the runtimes of a worker: one over the whole store, and one over each tenant's
view of it. What must not: what they are asked to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from loomfast._kernels import State
from loomfast._nodes.limits import Slots
from loomfast._runtime.runtime import WorkflowRuntime
from loomfast.stores import EventStore, TenantScopedEventStore
from loomfast.stores._tenant_scope import tenant_of

# How many tenants' runtimes are kept though they drive nothing.
IDLE = 256


class Owner(NamedTuple):
    """Whose a stored id is: the tenant (None for nobody's), its own id of it, and the runtime."""

    tenant: str | None
    own_id: str
    runtime: WorkflowRuntime


class Runtimes:
    """Runtimes by tenant, made when they are first needed.

    With `tenants`, an id of the form that `TenantScopedEventStore` gives is that tenant's; any other, and
    every id without it, is nobody's, and belongs to `base`. `rested` is called with the tenant, its id, and
    the state of what comes to rest in any of them.
    """

    def __init__(
        self,
        store: EventStore,
        make: Callable[[EventStore], WorkflowRuntime],
        slots: Slots,
        *,
        tenants: bool,
        rested: Callable[[str | None, str, State | None], object],
    ) -> None:
        self._store = store
        self._make = make
        self._slots = slots
        self._tenants = tenants
        self._rested = rested
        self._closing: set[asyncio.Task[None]] = set()
        self._all: dict[str | None, WorkflowRuntime] = {}
        self.base = self._made(None, store)

    def owner(self, stored_id: str) -> Owner:
        """Return whose an execution, or a schedule, is."""
        found = tenant_of(stored_id) if self._tenants else None
        if found is None:
            return Owner(None, stored_id, self.base)
        tenant, own_id = found
        runtime = self._all.get(tenant)
        if runtime is None:
            self._forget_idle()
            runtime = self._made(tenant, TenantScopedEventStore(self._store, tenant))
        return Owner(tenant, own_id, runtime)

    def __len__(self) -> int:
        """How many there are by now."""
        return len(self._all)

    async def close(self, grace_s: float) -> None:
        """Close all of them, at the same time."""
        closing = [runtime.close(grace_s=grace_s) for runtime in self._all.values()]
        await asyncio.gather(*closing, *self._closing)

    def _made(self, tenant: str | None, store: EventStore) -> WorkflowRuntime:
        runtime = self._all[tenant] = self._make(store)
        runtime.on_rest(partial(self._rested, tenant))
        return runtime

    def _forget_idle(self) -> None:
        """Close runtimes that drive nothing, if there are many. Whoever is about to use one tries again."""
        if len(self._all) <= IDLE:
            return
        for tenant in [tenant for tenant in self._all if tenant is not None and not self._slots.of(tenant)]:
            task = asyncio.get_running_loop().create_task(self._all.pop(tenant).close(grace_s=0))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
