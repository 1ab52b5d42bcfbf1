"""How a process dies: a store that lets so many writes become durable and then stops everything.

What lives here: `CrashingStore`, and `Crash`, the moment. What must not: which crashes are played (crash).

Theory of operation
-------------------
*The crash.* After `after` writes the store raises `ProcessKilled`. That is a `SystemExit`, which asyncio lets
through everything: the loop stops in the middle of that very callback, as after kill -9. What is left of the
program is then unwound without power: the store refuses every call and so does the world, so that no
`finally` block and no cancelled step gets anything into the log.

*The two moments.* A process may die before it hears that its write is durable, or at any time after, until
its next write. The first is the moment of the write itself; of the second only the last instant is played,
since nothing in between is seen by anyone but the world. With `batch_events=1` every event is a write of its
own, and no boundary between two events is left out.

    writes    0         1         2                 the journal's appends
              STARTED   A         STEP_STARTED
    after=2           A durable ┤├ unheard of       acknowledged=False
                                  … effect runs ┤   acknowledged=True
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, cast

from loomfast._kernels import Envelope
from loomfast.stores import EventStore, EventStoreDecorator
from loomfast.testing.time import running_loop
from loomfast.testing.world import ProcessGoneError


class ProcessKilled(SystemExit):
    """The process model stops here. It passes through everything, as SystemExit does."""


class Crash(NamedTuple):
    """When a life ends: after `after` writes, before or after the process heard of the last one."""

    after: int
    acknowledged: bool = False

    def __str__(self) -> str:
        return f"after write {self.after} {'(acknowledged)' if self.acknowledged else '(unheard of)'}"


class CrashingStore(EventStoreDecorator):
    """An event store, as a process that dies sees it.

    `crash` says after which write (`append` or `append_batch`) it dies; None: never. `observe` is told of
    each write the moment it is durable, `on_crash` of the crash; `latency_s` says how long the next write
    takes. Runs under virtual time. Closing it leaves the store inside open, for the lives that follow.
    """

    def __init__(
        self,
        inner: EventStore,
        crash: Crash | None = None,
        *,
        observe: Callable[[Sequence[Envelope]], object] = lambda envelopes: None,
        on_crash: Callable[[], object] = lambda: None,
        latency_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(inner)
        self.inner = cast(EventStore, _Reached(inner, self._reach))
        self.writes = 0
        self.crashed = False
        self._store = inner
        self._crash = crash
        self._observe = observe
        self._on_crash = on_crash
        self._latency_s = latency_s

    @property
    def primary(self) -> EventStore:
        return self

    async def append(self, envelope: Envelope) -> None:
        await self._write(self._store.append, envelope, (envelope,))

    async def append_batch(self, envelopes: Sequence[Envelope]) -> None:
        await self._write(self._store.append_batch, envelopes, envelopes)

    async def _write(
        self, append: Callable[[Any], Awaitable[None]], argument: Any, envelopes: Sequence[Envelope]
    ) -> None:
        delay_s = self._latency_s()
        if delay_s:
            await asyncio.sleep(delay_s)
        async with running_loop().outside():
            self._check()
            if self._crash is not None and self.writes == self._crash.after:
                self._die()
            await append(argument)
            self.writes += 1
            self._observe(envelopes)
            if self._crash is not None and self.writes == self._crash.after and not self._crash.acknowledged:
                self._die()

    def watch(self, execution_id: str, wake: Callable[[], None]) -> Callable[[], None]:
        return EventStore.watch(self, execution_id, wake)  # what the store tells comes on a thread of its own

    async def close(self) -> None:
        pass

    def _die(self) -> None:
        self.crashed = True
        self._on_crash()
        raise ProcessKilled

    def _check(self) -> None:
        if self.crashed:
            raise ProcessGoneError("the process that used this store has been stopped")

    async def _reach(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async with running_loop().outside():
            self._check()
            return await call()


class _Reached:
    """A store, or something beside its logs, reached outside virtual time, and not once dead."""

    def __init__(
        self, inner: object, reach: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
    ) -> None:
        self._inner = inner
        self._reach = reach

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return _Reached(found, self._reach)
        return lambda *args, **kwargs: self._reach(lambda: found(*args, **kwargs))
