"""Recovering executions whose process died while it ran: one by hand, or all that were left behind.

What lives here: `Recovering`, and `Recovered`, its report. What must not: when a crash counts
(`_core/recovery.py`), answers; an execution that rests is nobody's to recover.

In this order: whose lease is it, is it set aside, fence out whoever drove it, look again, count the crash
durably, drive. Each execution is on its own: what is wrong with one is reported as its outcome.

Whoever must fence before it knows whether there is an execution at all (a dispatch) takes the token first
(`fence`) and comes back with it. Somebody else may have fenced since, and a run under an older token would be
refused only at its first write, behind its first effect. So a token that is handed over is tried before
anything runs (`_try`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal, NamedTuple

from loomfast._core import recovery
from loomfast._core.arguments import count_argument, fence_argument
from loomfast._errors import ConflictError, ExecutionSetAsideError, LeaseHeldError, StaleFenceError
from loomfast._events import RUNNING
from loomfast._kernels import State
from loomfast._runtime.driven import CANNOT_GO_ON, DrivenExecutions
from loomfast._runtime.execution import DrivenExecution
from loomfast._runtime.flows import FlowTable
from loomfast._runtime.hooks import logger
from loomfast._runtime.journal import ExecutionJournal
from loomfast._runtime.recorded import read_recorded
from loomfast.stores import Recovery

# How many executions one look at the store lists.
PAGE = 100


class Recovered(NamedTuple):
    """What became of one execution that was found running.

    `recovered`: it was driven, and rests. `skipped`: it was left as it is, for `reason`. `set-aside`: it has
    crashed too often, as `reason` says, and is not run any more. `failed`: it could not be recovered, or not
    go on; `error` is why.
    """

    execution_id: str
    outcome: Literal["recovered", "skipped", "set-aside", "failed"]
    reason: str | None = None
    error: BaseException | None = None


class Recovering:
    """Drives on what was left running."""

    def __init__(self, driven: DrivenExecutions, flows: FlowTable, max_crashes: int) -> None:
        self._driven = driven
        self._flows = flows
        self._max_crashes = max_crashes
        self._counted: set[str] = set()

    async def recover(
        self, execution_id: str, max_crashes: int | None, fence: int | None = None
    ) -> DrivenExecution | None:
        """Return what is driven now; None for an execution that rests. See `WorkflowRuntime.recover`."""
        fence_argument(fence)
        limit = self._limit(max_crashes)
        return await self._driven.in_turn(execution_id, self._recover(execution_id, limit, fence))

    def _limit(self, max_crashes: int | None) -> int:
        """Return at how many crashes in a row one is set aside: the caller's number, or the runtime's."""
        if max_crashes is None:
            return self._max_crashes
        count_argument("max_crashes", max_crashes)
        return max_crashes

    async def _recover(
        self, execution_id: str, max_crashes: int, given: int | None
    ) -> DrivenExecution | None:
        driven, recoveries = self._driven, self._driven.store.recoveries
        live = driven.live(execution_id)
        if live is not None:
            return live
        state = await driven.states.load(execution_id)
        if state.status != RUNNING:
            return None
        flow = self._flows.of(state)
        async with driven.claimed(execution_id):
            account = await self._account(execution_id)
            fence = await driven.fence(execution_id) if given is None else given
            state = await driven.states.load(execution_id)  # again: what came before the fence counts
            if state.status != RUNNING:
                return None
            if given is not None:
                await self._try(execution_id, given)
            driven.check_open()
            found = recovery.found(account, execution_id, _progress(state), max_crashes)
            if found is not None:
                await recoveries.put(found)
                if found.set_aside is not None:
                    raise ExecutionSetAsideError(execution_id, found.set_aside)
                self._counted.add(execution_id)
            elif account is not None:
                await recoveries.delete(execution_id)
            return driven.drive(flow, driven.journal(execution_id, state=state, fence=fence))

    async def _account(self, execution_id: str) -> Recovery | None:
        """Return the account of an execution. Raises `ExecutionSetAsideError`."""
        account = await self._driven.store.recoveries.get(execution_id)
        if account is not None and account.set_aside is not None:
            raise ExecutionSetAsideError(execution_id, account.set_aside)
        return account

    # --- fencing first ---------------------------------------------------------------------------

    async def fence(self, execution_id: str) -> int | DrivenExecution | None:
        """Return a token; or what is driven here; None for an execution that rests.

        See `WorkflowRuntime.fence`.
        """
        return await self._driven.in_turn(execution_id, self._fence(execution_id))

    async def _fence(self, execution_id: str) -> int | DrivenExecution | None:
        driven = self._driven
        live = driven.live(execution_id)
        if live is not None:
            return live
        # Only what this process could drive on may be fenced out. That nothing is there decides nothing yet.
        state = await driven.states.find(execution_id)
        if state is not None and state.status != RUNNING:
            return None
        if state is not None:
            self._flows.of(state)
        async with driven.claimed(execution_id, lambda: self._refuse_led(execution_id)):
            if state is not None:
                await self._account(execution_id)
            return await driven.fence(execution_id)

    async def _refuse_led(self, execution_id: str) -> None:
        """Raise `LeaseHeldError` if whoever holds the lease has written: it is no start that died."""
        if await self._driven.store.primary.last_sequence(execution_id) is not None:
            raise LeaseHeldError(execution_id)

    async def _try(self, execution_id: str, fence: int) -> None:
        """Raise `StaleFenceError` if a newer token has been acquired since.

        A store judges the token before the slot (its guarantee 4). So the repeat of sequence 0, which every
        log refuses, tells whether the token is still the newest, and writes nothing. It goes as a batch of
        its own: its refusal must reach nobody else.
        """
        repeat = self._driven.journal(execution_id, fence=fence).envelope("EXECUTION_STARTED", b"null")
        try:
            await self._driven.append(repeat)
        except StaleFenceError:
            raise
        except ConflictError:
            return

    def rested(self, live: DrivenExecution, state: State | None) -> None:
        """Forget, in the background, the crashes of an execution that has come to rest.

        One that could not go on has not crashed: its next recovery counts none.
        """
        execution_id = live.journal.execution_id
        counted = execution_id in self._counted
        self._counted.discard(execution_id)
        if state is not None:
            if counted:
                self._driven.keep(self.forget(execution_id))
        elif isinstance(live.failure, CANNOT_GO_ON) and not self._driven.closed:
            self._driven.keep(self._driven.in_turn(execution_id, self.mark_stopped(live.journal)))

    async def mark_stopped(self, journal: ExecutionJournal) -> None:
        """Keep on record that an execution which is still running has not crashed. Raises nothing."""
        execution_id = journal.execution_id
        recoveries = self._driven.store.recoveries
        try:
            progress = _progress(journal.state)
            account = await recoveries.get(execution_id)
            await recoveries.put(recovery.stopped(account, execution_id, progress))
        except Exception:
            # Without the mark the next recovery counts a crash: too strict, and harmless.
            logger.exception("execution %r could not be marked as stopped in order", execution_id)

    async def forget(self, execution_id: str) -> None:
        """Forget the crashes of an execution. Raises nothing: a stale account is outdated by its progress."""
        try:
            await self._driven.store.recoveries.delete(execution_id)
        except Exception:
            logger.exception("the crashes of execution %r could not be forgotten", execution_id)

    async def release(self, execution_id: str) -> bool:
        """See `WorkflowRuntime.release`."""
        return await self._driven.in_turn(execution_id, self._release(execution_id))

    async def _release(self, execution_id: str) -> bool:
        recoveries = self._driven.store.recoveries
        account = await recoveries.get(execution_id)
        if account is None or account.set_aside is None:
            return False
        return await recoveries.delete(execution_id)

    # --- all of them -----------------------------------------------------------------------------

    async def recover_abandoned(self, concurrency: int, max_crashes: int | None) -> list[Recovered]:
        """See `WorkflowRuntime.recover_abandoned`."""
        count_argument("concurrency", concurrency)
        limit = self._limit(max_crashes)
        free = asyncio.Semaphore(concurrency)
        found: list[asyncio.Task[Recovered]] = []
        try:
            async for execution_id in self._running():
                await free.acquire()
                if self._driven.closed:
                    break
                task = asyncio.get_running_loop().create_task(self._report(execution_id, limit))
                task.add_done_callback(lambda _: free.release())
                found.append(task)
            return list(await asyncio.gather(*found))
        except BaseException:
            for task in found:
                task.cancel()
            raise

    async def _running(self) -> AsyncIterator[str]:
        after = 0
        while True:
            page = await self._driven.store.primary.list_executions(status=RUNNING, after=after, limit=PAGE)
            for summary in page:
                yield summary.execution_id
            if len(page) < PAGE:
                return
            after = page[-1].position

    async def _report(self, execution_id: str, max_crashes: int) -> Recovered:
        if self._driven.live(execution_id) is not None:
            return Recovered(execution_id, "skipped", "it is driven here")
        try:
            live = await self.recover(execution_id, max_crashes)
            if live is None:
                return Recovered(execution_id, "skipped", "it rests by now")
            if not live.rest.done:
                await live.rest.wait()
            elif live.rest.failure is not None:  # it was over before this task had its turn
                raise live.rest.failure
            return Recovered(execution_id, "recovered")
        except LeaseHeldError as error:
            return Recovered(execution_id, "skipped", "another process holds its lease", error)
        except ExecutionSetAsideError as error:
            return Recovered(execution_id, "set-aside", error.reason, error)
        except Exception as error:
            return Recovered(execution_id, "failed", f"{type(error).__name__}: {error}", error)


def _progress(state: State) -> int:
    """Return the progress of an execution. Raises `StoreReadError` where its log is damaged: no crash."""
    return recovery.progress_of(
        state,
        lambda step: read_recorded(state.execution_id, step.sequence, lambda: bool(step.served)),
    )
