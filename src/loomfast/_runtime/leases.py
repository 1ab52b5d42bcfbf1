"""The leases that this process holds on the executions it drives, and their renewal.

What lives here: `LeaseKeeper`, `HeldLease`. What must not: what a lease is (stores/_spi_leases), which
executions to take (driven), what is refused once one is lost (journal).

Theory of operation
-------------------
With leases, an execution is driven only by whoever holds its lease, so that `recover_abandoned` of another
process never takes what is alive: total age is no reason, a missed renewal is. One task renews all leases in
one call, every third of their time; it shares nothing with the runs, so a long step, in a thread or not, does
not hold it up. A renewal that fails is repeated until the lease has run out.

Whether it has is judged without asking the store: `ttl_s` after the moment BEFORE the call that got it was
made, by the loop's own time and by the runtime's clock, whichever goes faster. So this process believes to
hold a lease for less long than the store does, provided that their clocks run equally fast; what the two show
does not matter.

    acquired at 0.00 (the store: until 30.02)     renewed at 10, 20, 30 …
    the process is stopped at 31 and goes on at 95, the last renewal was for 60: lost at 60
    its next append is refused here (`LeaseLostError`), before it reaches the store; its run is stopped
    another process has taken the lease at 61, and fenced: an append on its way at 60 is refused there
    so is a fence on its way at 60, whose token would be the newer one: it is asked for under the lost lease

A lease says who may begin, a fence who may write: the log is safe without leases, its effects are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from loomfast._errors import LeaseLostError
from loomfast._runtime.clock import Clock
from loomfast._runtime.hooks import logger
from loomfast.stores import Lease, LeaseStore
from loomfast.stores._spi_leases import check_ttl

# How many renewals fall into the time of a lease, and how many more tries if one fails.
RENEWALS = 3
RETRIES = 12


class HeldLease:
    """One lease, held until it is given back or lost."""

    __slots__ = ("_clock", "_until_ms", "_until_s", "lease", "lost")

    def __init__(self, lease: Lease, clock: Clock) -> None:
        self.lease = lease
        self.lost = False
        self._clock = clock
        self._until_s = 0.0
        self._until_ms = 0

    def hold(self, lease: Lease, since: tuple[float, int], ttl_s: float) -> None:
        """It was acquired, or renewed, by a call that was made at `since`."""
        self.lease = lease
        self._until_s, self._until_ms = since[0] + ttl_s, since[1] + int(ttl_s * 1000)

    def left_s(self) -> float:
        """Return for how many more seconds it is ours; 0 once it is not."""
        if self.lost:
            return 0.0
        by_loop = self._until_s - asyncio.get_running_loop().time()
        by_clock = (self._until_ms - self._clock.now_ms()) / 1000
        return max(0.0, min(by_loop, by_clock))


class LeaseKeeper:
    """Takes leases, renews them all, and gives them back.

    `lost` is called with the id of an execution whose lease was lost.
    """

    def __init__(
        self, leases: LeaseStore, clock: Clock, entropy: Callable[[int], bytes], ttl_s: float
    ) -> None:
        check_ttl(ttl_s)
        self.ttl_s = ttl_s
        self.lost: Callable[[str], object] = lambda execution_id: None
        self._leases = leases
        self._clock = clock
        self._owner = entropy(16).hex()
        self._held: dict[str, HeldLease] = {}
        self._returned: list[Lease] = []
        self._renewing: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None

    def held(self, execution_id: str) -> HeldLease | None:
        """Return the lease that is held on an execution."""
        return self._held.get(execution_id)

    def check_of(self, execution_id: str) -> Callable[[], object]:
        """Return what raises `LeaseLostError` once the lease held now is not ours; at once if none is."""
        held = self._held.get(execution_id)
        return partial(_none_held, execution_id) if held is None else partial(self.check, held)

    def check(self, held: HeldLease) -> None:
        """Raise `LeaseLostError` unless a lease is still ours: lost for all, whoever finds out first."""
        if held.left_s() == 0:
            self._drop(held)
            raise LeaseLostError(held.lease.key)

    async def take(self, execution_id: str) -> HeldLease | None:
        """Take a lease; None while another process holds it. One that is held here already is void then.

        None also if the answer took longer than the lease lasts: by now it may be another's.
        """
        since = self._now()
        lease = await self._leases.acquire(execution_id, self._owner, self.ttl_s)
        if lease is None:
            return None
        held = self._held[execution_id] = HeldLease(lease, self._clock)
        held.hold(lease, since, self.ttl_s)
        if held.left_s() == 0:
            self.give_back(held)
            return None
        if self._renewing is None:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
        return held

    def give_back(self, held: HeldLease) -> None:
        """Give a lease back, in the background: one call for all that are given back meanwhile."""
        if self._held.get(held.lease.key) is not held:
            return  # lost, or taken anew
        del self._held[held.lease.key]
        self._returned.append(held.lease)
        if self._returning is None:
            self._returning = asyncio.get_running_loop().create_task(self._return())

    def give_back_of(self, execution_id: str) -> None:
        """Give back the lease that is held on an execution, if there is one."""
        held = self._held.get(execution_id)
        if held is not None:
            self.give_back(held)

    async def close(self) -> None:
        """Give back what is still held, and renew no more."""
        for held in tuple(self._held.values()):
            self.give_back(held)
        if self._renewing is not None:
            self._renewing.cancel()
        if self._returning is not None:
            await asyncio.wait((self._returning,), timeout=self.ttl_s)

    async def _return(self) -> None:
        while self._returned:
            returned, self._returned = self._returned, []
            try:
                await self._leases.release(returned)
            except Exception:
                logger.exception(
                    "%d leases could not be given back; they run out by themselves", len(returned)
                )
        self._returning = None

    async def _renew(self) -> None:
        pause_s = self.ttl_s / RENEWALS
        while True:
            await asyncio.sleep(pause_s)
            self._drop_expired()
            if not self._held:
                self._renewing = None
                return
            pause_s = self.ttl_s / (RENEWALS if await self._renewed() else RETRIES)

    async def _renewed(self) -> bool:
        """Renew everything that is held, and return whether the store has answered in time."""
        asked = tuple(self._held.values())
        since = self._now()
        within_s = min(self.ttl_s / RENEWALS, *(held.left_s() for held in asked))
        try:
            async with asyncio.timeout(within_s):
                renewed = await self._leases.renew([held.lease for held in asked], self.ttl_s)
        except Exception as error:
            logger.warning("%d leases could not be renewed: %s: %s", len(asked), type(error).__name__, error)
            self._drop_expired()
            return False
        by_token = {lease.token: lease for lease in renewed}
        for held in asked:
            lease = by_token.get(held.lease.token)
            if lease is not None:
                held.hold(lease, since, self.ttl_s)
            else:
                self._drop(held)
        self._drop_expired()
        return True

    def _drop_expired(self) -> None:
        for held in tuple(self._held.values()):
            if held.left_s() == 0:
                self._drop(held)

    def _drop(self, held: HeldLease) -> None:
        held.lost = True
        if self._held.get(held.lease.key) is held:
            del self._held[held.lease.key]
            logger.warning("the lease of execution %r was lost", held.lease.key)
            self.lost(held.lease.key)

    def _now(self) -> tuple[float, int]:
        return asyncio.get_running_loop().time(), self._clock.now_ms()


def _none_held(execution_id: str) -> None:
    raise LeaseLostError(execution_id)
