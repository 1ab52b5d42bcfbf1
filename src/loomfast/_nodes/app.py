"""What a worker runs: an application's flows, and what they need while it does.

What lives here: `App`. What must not: how it is run (`worker`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from loomfast._core.definitions import FlowDefinition, FlowFunction

if TYPE_CHECKING:
    from loomfast._nodes.worker import Worker

Lifespan: TypeAlias = Callable[["Worker"], AbstractAsyncContextManager[object]]


@dataclass(frozen=True, slots=True)
class App:
    """The flows of an application, for `Worker` and `loomfast worker module:app`.

    `lifespan(worker)` is entered before the worker takes anything up, and left when it has stopped: the place
    to open what the flows use, and to put schedules (`worker.schedules`). `options` are further arguments of
    `WorkflowRuntime`.

        @asynccontextmanager
        async def lifespan(worker):
            await worker.schedules.put("nightly", report, trigger=lf.Cron("30 2 * * *", tz="Europe/Berlin"))
            yield

        app = lf.App([report, bill], lifespan=lifespan)
    """

    flows: Iterable[FlowDefinition | FlowFunction]
    lifespan: Lifespan | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
