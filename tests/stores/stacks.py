"""The decorators, alone and stacked, over any store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from loomfast.stores import CoalescingEventStore, EventStore, ReplicaReadEventStore, TenantScopedEventStore

STACKS: Final[dict[str, Callable[[EventStore], EventStore]]] = {
    "plain": lambda inner: inner,
    "coalescing": CoalescingEventStore,
    "coalescing, rejecting all": lambda inner: CoalescingEventStore(inner, isolate=False),
    "lingering": lambda inner: CoalescingEventStore(inner, max_linger_ms=1),
    "tenant": lambda inner: TenantScopedEventStore(inner, "a"),
    "replica": lambda inner: ReplicaReadEventStore(inner, inner),
    "coalescing over tenant": lambda inner: CoalescingEventStore(TenantScopedEventStore(inner, "a")),
    "tenant over coalescing": lambda inner: TenantScopedEventStore(CoalescingEventStore(inner), "a"),
    "tenant over coalescing, rejecting all, over replica": lambda inner: TenantScopedEventStore(
        CoalescingEventStore(ReplicaReadEventStore(inner, inner), isolate=False), "a"
    ),
    "coalescing over coalescing": lambda inner: CoalescingEventStore(CoalescingEventStore(inner)),
}
