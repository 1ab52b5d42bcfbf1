"""The hooks a runtime's owner may set, and the one way they are called.

A hook observes. One that raises is reported to the `loomfast` logger and otherwise ignored: it can neither
corrupt a log nor end a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loomfast._errors import StorageWriteError
from loomfast._kernels import Envelope

logger = logging.getLogger("loomfast")


@dataclass(frozen=True, slots=True)
class Hooks:
    """`on_event` fires as an event is folded, BEFORE it is durable: a live tail, not a durability signal (ADR
    0103, D6); read the store to act on durable facts. `on_commit` fires once an event is durable.
    `on_storage_error` fires when a write failed.
    """

    on_event: Callable[[Envelope], object] | None = None
    on_commit: Callable[[Envelope], object] | None = None
    on_storage_error: Callable[[StorageWriteError], object] | None = None


def call(hook: Callable[[Any], object] | None, argument: Any) -> None:
    """Call a hook, if there is one, and report what it raises."""
    if hook is None:
        return
    try:
        hook(argument)
    except (KeyboardInterrupt, SystemExit):
        raise  # meant for the program, not for the run
    except BaseException:
        logger.exception("a hook raised and was ignored: %r", hook)
