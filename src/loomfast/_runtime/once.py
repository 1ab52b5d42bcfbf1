"""A start under a chosen id, on its way to being durable and driven (ADR 0103, D1 and D2).

What lives here: `StartOnce`. What must not: what becomes of an append that fails (bootstrap), leases.

It becomes whole whether or not its caller still waits. No task is made for that unless the append fails: the
store's answer calls back, since a start is what most callers do most.
"""

from __future__ import annotations

import asyncio

from loomfast._core.answers import Draft
from loomfast._core.definitions import FlowDefinition
from loomfast._errors import StorageWriteError
from loomfast._runtime.bootstrap import settle_bootstrap
from loomfast._runtime.driven import DrivenExecutions
from loomfast._runtime.execution import DrivenExecution
from loomfast._runtime.hooks import call
from loomfast._runtime.journal import ExecutionJournal


class StartOnce:
    """Appends sequence 0, drives the execution once that is durable, and gives back the execution's turn."""

    def __init__(
        self,
        driven: DrivenExecutions,
        flow: FlowDefinition,
        journal: ExecutionJournal,
        bootstrap: Draft,
        turn: asyncio.Lock,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._driven = driven
        self._flow = flow
        self._journal = journal
        self._envelope = journal.envelope(bootstrap.event_type, bootstrap.body, extra=bootstrap.extra)
        self._turn = turn
        self._live: asyncio.Future[DrivenExecution] = loop.create_future()
        self._whole: asyncio.Future[None] = loop.create_future()

    def begin(self) -> asyncio.Future[DrivenExecution]:
        """Begin, with the turn taken; return a future of what is driven. Cancelling it stops nothing."""
        live = self._live
        self._driven.calls.add(self._whole)
        try:
            writing = self._driven.store.write((self._envelope,))
        except Exception as error:
            self._failed(error)
        else:
            if writing is None:
                self._durable()
            else:
                writing.add_done_callback(self._answered)
        return live

    def _answered(self, writing: asyncio.Future[Exception | None]) -> None:
        if writing.cancelled():
            self._cancelled()
            return
        error = writing.exception() or writing.result()
        if error is None:
            self._durable()
        elif isinstance(error, Exception):
            self._failed(error)
        else:
            self._over(error)

    def _failed(self, error: Exception) -> None:
        settling = self._driven.keep(settle_bootstrap(self._driven.store, self._envelope, error))
        settling.add_done_callback(self._settled)

    def _settled(self, settling: asyncio.Task[None]) -> None:
        if settling.cancelled():
            self._cancelled()
            return
        error = settling.exception()
        if error is None:
            self._durable()
            return
        self._over(error)
        if isinstance(error, StorageWriteError):
            call(self._driven.hooks.on_storage_error, error)

    def _durable(self) -> None:
        try:
            self._journal.adopt(self._envelope)
            live = self._driven.drive(self._flow, self._journal, inherit=True)
        except BaseException as error:
            self._over(error)
            if not isinstance(error, Exception):
                raise
        else:
            told = self._end()
            if not told.done():
                told.set_result(live)

    def _over(self, error: BaseException) -> None:
        told = self._end()
        if not told.done():
            told.set_exception(error)

    def _cancelled(self) -> None:
        """The event loop ends."""
        self._end().cancel()

    def _end(self) -> asyncio.Future[DrivenExecution]:
        """Give back the turn, and return the future of whoever waits."""
        self._turn.release()
        self._driven.calls.discard(self._whole)
        self._whole.set_result(None)
        live = self._live
        del self._live  # an error's traceback may lead here; this must not lead back to the error
        return live
