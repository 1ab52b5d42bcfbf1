"""How the driving of an execution ended, for whoever waits for it.

What lives here: `Rest`. What must not: executions. It keeps no state: a parked execution costs no memory,
even while somebody keeps a handle to it.
"""

from __future__ import annotations

import asyncio

from loomfast._kernels import State

# How many may wait before it is asked which of them still do.
_CROWD = 16


class Rest:
    """Not a future, since it is made for every execution, and few are waited for by more than one.

    `failure` is what kept the execution from resting, if something did.
    """

    __slots__ = ("_crowd", "_waiters", "done", "failure")

    def __init__(self) -> None:
        self.done = False
        self.failure: BaseException | None = None
        self._waiters: list[asyncio.Future[State]] = []
        self._crowd = _CROWD

    def wait(self) -> asyncio.Future[State]:
        """Return a future of the state at rest, or of the failure. Only while it is not done."""
        assert not self.done  # its state is for the store to say
        waiter: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        if len(self._waiters) > self._crowd:  # most of them have given up, or there are very many
            self._waiters = [other for other in self._waiters if not other.done()]
            self._crowd = max(_CROWD, 2 * len(self._waiters))
        self._waiters.append(waiter)
        return waiter

    def settle(self, state: State | None, failure: BaseException | None) -> None:
        """Tell the waiters the state at rest, or raise the failure to them."""
        self.done, self.failure = True, failure
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue  # it was cancelled
            if failure is not None:
                waiter.set_exception(failure)
            else:
                assert state is not None
                waiter.set_result(state)
