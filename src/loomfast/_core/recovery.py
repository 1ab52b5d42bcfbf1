"""When a crash counts, and how many are too many: the account of executions that crashed.

No I/O, no clock: functions from one account to the next. Who writes them down, and when, is the runtime's
business; the account itself is `store.recoveries`.

Theory of operation
-------------------
An execution that kills its process leaves no failure behind, only a log that ends in the middle. Recovered,
it kills the next process. So what is counted is what was found: an execution that is `running`, and that
nobody drives, has crashed once more. The count is durable before the body runs again.

*Progress* starts the count anew: an execution that gets further each time will end. Its measure is how many
things the log holds that a re-run is served (settled steps, decisions, passed gates). A STEP_STARTED is none,
or an effect that kills its process would make progress each time.

    started, crashes in step a                            log: a started
    recovered: no account → crashes 1, progress 0         crashes in a again
    recovered: progress still 0 → crashes 2               a completes, crashes in b
    recovered: progress 1 > 0 → crashes 1, progress 1     …
    found with `max_crashes` crashes → set aside: not run, listed, until it is released by hand

A run that was stopped in order (the runtime closed) has not crashed: the mark of it is used up by the next
recovery. Coming to rest, and ending, forgets the account. A bystander, which happened to run in a process
that another execution killed, is counted as well: nothing tells the two apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from loomfast._kernels import State


class Recovery(NamedTuple):
    """The account of one execution.

    `crashes`: runs, since its last progress, that ended without an outcome. `progress`: how many outcomes its
    log had when the last one was counted. `orderly`: its last run was stopped in order, so that the next
    recovery counts no crash. `set_aside`: why it is not recovered any more, None while it is.
    """

    execution_id: str
    crashes: int
    progress: int
    orderly: bool
    set_aside: str | None


def found(account: Recovery | None, execution_id: str, progress: int, max_crashes: int) -> Recovery | None:
    """Return the account of an execution that was found running with no driver; None if it has no crash.

    Set aside, it must not be run. One that was set aside before stays so.
    """
    if account is None:
        crashes = 1
    elif account.set_aside is not None:
        return account
    elif account.orderly:
        crashes = account.crashes if progress == account.progress else 0
    else:
        crashes = account.crashes + 1 if progress == account.progress else 1
    if crashes == 0:
        return None
    reason = f"{crashes} runs in a row crashed without progress" if crashes >= max_crashes else None
    return Recovery(execution_id, crashes, progress, False, reason)


def stopped(account: Recovery | None, execution_id: str, progress: int) -> Recovery:
    """Return the account of an execution whose run was stopped in order."""
    if account is None:
        return Recovery(execution_id, 0, progress, True, None)
    return account._replace(orderly=True)


def progress_of(state: State, served: Callable[[Any], bool] = lambda step: bool(step.served)) -> int:
    """Return how many things the log holds that a re-run is served.

    `served` looks at the outcome of one step.
    """
    settled = sum(served(step) for _, step in state.steps.items())
    return settled + len(state.decisions) + len(state.gates)
