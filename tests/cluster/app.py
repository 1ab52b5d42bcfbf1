"""What the workers of the cluster run: `loomfast worker tests.cluster.app:app`.

What lives here: the app, its schedules, and what its processes say of what they did and lost. What must not:
processes, and any judgement.

The file that `TESTIMONY` names takes the testimony; it is only ever appended to.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import loomfast as lf
from tests.cluster.agreed import GRACE_S, SCHEDULES, TESTIMONY
from tests.soak.flows import errand_in
from tests.soak.outside import Outside, committed
from tests.soak.testimony import say

LONGEST_EFFECT_S = 1.0
# An errand may lose its process again and again here: being set aside is another test's.
MAX_CRASHES = 1_000_000
# So that recoveries begin at snapshots too.
SNAPSHOT_EVERY = 8

said = os.open(os.environ[TESTIMONY], os.O_WRONLY | os.O_APPEND)


class Losses(logging.Handler):
    """Says which leases this process has lost."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "the lease of execution %r was lost" and isinstance(record.args, tuple):
            say(said, "lost", record.args[0], os.getpid())


logging.getLogger("loomfast").addHandler(Losses())

errand = errand_in(Outside(said, str(os.getpid()), LONGEST_EFFECT_S))
options: dict[str, Any] = {
    "on_commit": partial(committed, said),
    "max_crashes": MAX_CRASHES,
    "snapshot_every": SNAPSHOT_EVERY,
}


@contextlib.asynccontextmanager
async def lifespan(worker: lf.Worker) -> AsyncIterator[None]:
    """Put the schedules, as every worker does whenever it starts."""
    for each in SCHEDULES:
        await worker.schedules.put(
            each.schedule_id,
            errand,
            each.plan,
            trigger=lf.Every(each.every_s),
            catch_up=each.catch_up,
            grace_s=GRACE_S,
        )
    yield


app = lf.App([errand], lifespan=lifespan, options=options)
