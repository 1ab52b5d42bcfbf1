"""Projections: what a log looks like from one side, such as the surface its `ctx.ui` patches build.

What lives here: folding patches into a surface, and keeping projections of many executions up to date. What
must not: anything a flow can see, since a projection is made from the log and never read by a run.

A projection is a pure function `(state, event) -> state`, total over every event: one that it does not know,
or that does not fit, must not raise. `ProjectionRuntime` folds the durable log through it, incrementally, and
keeps a bounded number of results; any of them can be dropped and made again, by any process, while the log
is whole. What has been truncated is gone for projections too (`PrefixTruncatedError`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from loomfast._errors import BadInputError, UnknownExecutionError
from loomfast._events import DEFAULT_SURFACE, MAX_PATH, SURFACE_PATCH, payload_fault
from loomfast._kernels import Envelope
from loomfast.stores import EventStore


class Projection(Protocol):
    """How one side of a log is folded."""

    def initial(self) -> Any:
        """Return the state before the first event."""
        ...

    def apply(self, state: Any, event: Envelope) -> Any:
        """Return the state after one more event; it may change the state it is given and return it."""
        ...


class UiProjection:
    """Folds SURFACE_PATCH events into surfaces: `{surface: {member: value}}`.

    A dotted path walks through objects, and through lists by index. What is missing on the way is made; what
    is in the way of a patch (text where a list is to be appended to) is replaced by it.
    """

    def initial(self) -> dict[str, Any]:
        return {}

    def apply(self, state: dict[str, Any], event: Envelope) -> dict[str, Any]:
        if event.kind != SURFACE_PATCH:
            return state
        patch = event.payload
        if payload_fault(SURFACE_PATCH, patch) is None:
            surface = state.setdefault(patch["surface"], {})
            _patch(surface, patch["op"], patch["path"], patch.get("value"))
        return state


def _patch(surface: dict[str, Any], op: str, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    if len(parents) >= MAX_PATH:  # refused by `ctx.ui`, passed over in a foreign log
        return
    holder: Any = surface
    for name in parents:
        inner = _get(holder, name)
        if not isinstance(inner, dict | list):
            if op == "remove":
                return
            inner = {}
            _put(holder, name, inner)
        holder = inner
    held = _get(holder, last)
    if op == "set":
        _put(holder, last, value)
    elif op == "merge":
        _put(holder, last, {**held, **value} if isinstance(held, dict) and isinstance(value, dict) else value)
    elif op == "append":
        _put(holder, last, [*held, value] if isinstance(held, list) else [value])
    elif op == "increment":
        _put(holder, last, _sum(held, value))
    elif op == "remove":
        _remove(holder, last)


def _sum(held: Any, value: Any) -> Any:
    try:
        return held + value if _is_number(held) and _is_number(value) else value
    except OverflowError:  # an integer beyond every float, and a float
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _index(holder: list[Any], name: str) -> int | None:
    return int(name) if name.isdecimal() and len(name) < 10 and int(name) < len(holder) else None


def _get(holder: Any, name: str) -> Any:
    if isinstance(holder, dict):
        return holder.get(name)
    place = _index(holder, name)
    return None if place is None else holder[place]


def _put(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
        return
    place = _index(holder, name)
    if place is None:
        holder.append(value)
    else:
        holder[place] = value


def _remove(holder: Any, name: str) -> None:
    if isinstance(holder, dict):
        holder.pop(name, None)
    elif (place := _index(holder, name)) is not None:
        del holder[place]


@dataclass(slots=True)
class _Folded:
    state: Any
    sequence: int


class ProjectionRuntime:
    """Answers what executions look like now, from the durable log.

    `projections` are by name, beside the built-in `ui`. At most `keep` folded states are held in memory.
    """

    def __init__(
        self, store: EventStore, projections: Mapping[str, Projection] | None = None, *, keep: int = 1024
    ) -> None:
        if keep < 1:
            raise BadInputError(f"keep={keep}: must be 1 or more")
        self._store = store
        self._projections: dict[str, Projection] = {"ui": UiProjection(), **(projections or {})}
        self._keep = keep
        self._folded: OrderedDict[tuple[str, str], _Folded] = OrderedDict()

    async def get_state(self, name: str, execution_id: str, *, surface: str = DEFAULT_SURFACE) -> Any:
        """Return the state of one projection of one execution, up to its latest durable event.

        For `ui`, that is the object its patches built on `surface`, empty before the first. What is returned
        is the caller's own copy. Raises `BadInputError` for an unknown name, `UnknownExecutionError`, and
        what the store's reads raise. Cancelling it loses nothing.
        """
        projection = self._projections.get(name)
        if projection is None:
            raise BadInputError(f"no projection {name!r}; there are {', '.join(sorted(self._projections))}")
        folded = self._folded.get((name, execution_id)) or _Folded(projection.initial(), -1)
        events = await self._store.read_from(execution_id, folded.sequence + 1)
        if not events and folded.sequence < 0:
            raise UnknownExecutionError(execution_id)
        for event in events:
            if event.sequence == folded.sequence + 1:  # another call may have folded it while this one read
                folded.state = projection.apply(folded.state, event)
                folded.sequence = event.sequence
        self._folded[name, execution_id] = folded
        self._folded.move_to_end((name, execution_id))
        while len(self._folded) > self._keep:
            self._folded.popitem(last=False)
        state = folded.state.get(surface, {}) if isinstance(projection, UiProjection) else folded.state
        return copy.deepcopy(state)
