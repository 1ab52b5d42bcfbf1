"""The vocabulary of the log: event kinds, what their payloads must hold, and the versions of both.

Data only. A *kind* is a small integer that stands for an event type the kernel knows; every other event
type is `DOMAIN`. Kinds are persisted in rows, so a number is never reused. Kinds up to `LAST_INERT` fold to
nothing but their stamp.

The table of payload fields follows the contract's section 2 and is what `Envelope.make` and
`Envelope.from_json` check. Unknown extra fields are kept: a newer kernel may have written them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

EVENT_SCHEMA_VERSION: Final = "1.19.0"
KERNEL_ABI_VERSION: Final = "1.1.0"

DOMAIN: Final = 0
SURFACE_PATCH: Final = 1
STREAM_CHUNK: Final = 2
LAST_INERT: Final = 2
EXECUTION_STARTED: Final = 10
EXECUTION_SUSPENDED: Final = 11
EXECUTION_RESUMED: Final = 12
EXECUTION_COMPLETED: Final = 13
EXECUTION_FAILED: Final = 14
EXECUTION_CANCELLED: Final = 15
STEP_STARTED: Final = 20
STEP_COMPLETED: Final = 21
STEP_FAILED: Final = 22
STEP_CANCELLED: Final = 23
EFFECT_INDOUBT: Final = 24
DECISION_RECORDED: Final = 30

KIND_NAMES: Final[Mapping[int, str]] = {
    SURFACE_PATCH: "SURFACE_PATCH",
    STREAM_CHUNK: "STREAM_CHUNK",
    EXECUTION_STARTED: "EXECUTION_STARTED",
    EXECUTION_SUSPENDED: "EXECUTION_SUSPENDED",
    EXECUTION_RESUMED: "EXECUTION_RESUMED",
    EXECUTION_COMPLETED: "EXECUTION_COMPLETED",
    EXECUTION_FAILED: "EXECUTION_FAILED",
    EXECUTION_CANCELLED: "EXECUTION_CANCELLED",
    STEP_STARTED: "STEP_STARTED",
    STEP_COMPLETED: "STEP_COMPLETED",
    STEP_FAILED: "STEP_FAILED",
    STEP_CANCELLED: "STEP_CANCELLED",
    EFFECT_INDOUBT: "EFFECT_INDOUBT",
    DECISION_RECORDED: "DECISION_RECORDED",
}
KIND_OF: Final[Mapping[str, int]] = {name: kind for kind, name in KIND_NAMES.items()}

# What only the kernel writes: every kind that folds into more than its stamp.
RESERVED: Final[frozenset[str]] = frozenset(name for kind, name in KIND_NAMES.items() if kind > LAST_INERT)

# The payload field by which the fold looks an event up: its *subject*. A domain event's subject is its type.
SUBJECT_FIELD: Final[Mapping[int, str]] = {
    STEP_STARTED: "key",
    STEP_COMPLETED: "key",
    STEP_FAILED: "key",
    STEP_CANCELLED: "key",
    EFFECT_INDOUBT: "key",
    DECISION_RECORDED: "id",
}

# The surface that `ctx.ui` patches when the flow names none.
DEFAULT_SURFACE: Final = "main"
# How many parts the path of a patch may have: a surface is JSON, and is kept and copied as such.
MAX_PATH: Final = 100

# Statuses of an execution, and phases of a step.
RUNNING: Final = "running"
SUSPENDED: Final = "suspended"
OPEN: Final = "open"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
IN_DOUBT: Final = "in-doubt"
STATUSES: Final = (RUNNING, SUSPENDED, COMPLETED, FAILED, CANCELLED)

END_STATUS: Final[Mapping[int, str]] = {
    EXECUTION_COMPLETED: COMPLETED,
    EXECUTION_FAILED: FAILED,
    EXECUTION_CANCELLED: CANCELLED,
}
END_KIND: Final[Mapping[str, int]] = {status: kind for kind, status in END_STATUS.items()}
STEP_PHASE: Final[Mapping[int, str]] = {
    STEP_STARTED: OPEN,
    STEP_COMPLETED: COMPLETED,
    STEP_FAILED: FAILED,
    STEP_CANCELLED: CANCELLED,
    EFFECT_INDOUBT: IN_DOUBT,
}
# What decides how later calls go: no effect begins before these are durable.
OUTCOMES: Final[frozenset[int]] = frozenset(
    (STEP_COMPLETED, STEP_FAILED, STEP_CANCELLED, DECISION_RECORDED, EXECUTION_RESUMED)
)
PHASE_KIND: Final[Mapping[str, int]] = {phase: kind for kind, phase in STEP_PHASE.items()}


class Opaque:
    """Holds a payload that has no JSON form. Only a store that keeps Python objects accepts it."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def _text(value: object) -> str | None:
    return None if isinstance(value, str) else "must be text"


def _whole(value: object) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return None
    return "must be a whole number, 0 or more"


def _positive(value: object) -> str | None:
    return "must be 1 or more" if value == 0 else _whole(value)


def _flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _digest_text(value: object) -> str | None:
    if isinstance(value, str) and len(value) == 16 and not set(value) - set("0123456789abcdef"):
        return None
    return "must be 16 lower-case hex digits"


def _failure(value: object) -> str | None:
    if not isinstance(value, dict):
        return "must be an object"
    if not isinstance(value.get("type"), str) or not isinstance(value.get("message"), str):
        return "must hold the texts type and message"
    return None


def _object(value: object) -> str | None:
    return None if isinstance(value, dict) else "must be an object"


def _list(value: object) -> str | None:
    return None if isinstance(value, list) else "must be a list"


def _anything(value: object) -> str | None:
    return None


FieldCheck = Callable[[object], str | None]

# kind -> field -> (required, check). A check returns what is wrong, or None.
PAYLOAD_FIELDS: Final[Mapping[int, Mapping[str, tuple[bool, FieldCheck]]]] = {
    EXECUTION_STARTED: {"flowId": (True, _text), "flowVersion": (True, _text), "input": (True, _anything)},
    EXECUTION_SUSPENDED: {
        "gate": (True, _whole),
        "on": (True, _text),
        "correlationKey": (False, _text),
        "wakeAt": (False, _whole),
    },
    EXECUTION_RESUMED: {"gate": (True, _whole), "on": (True, _text)},
    EXECUTION_COMPLETED: {"output": (True, _anything)},
    EXECUTION_FAILED: {"error": (True, _failure)},
    EXECUTION_CANCELLED: {"reason": (True, _anything)},
    STEP_STARTED: {
        "key": (True, _text),
        "stepId": (True, _text),
        "attempt": (True, _positive),
        "inputDigest": (True, _digest_text),
    },
    STEP_COMPLETED: {"key": (True, _text), "output": (True, _anything)},
    STEP_FAILED: {"key": (True, _text), "typed": (True, _flag), "error": (True, _failure)},
    STEP_CANCELLED: {"key": (True, _text), "reason": (True, _anything)},
    EFFECT_INDOUBT: {"key": (True, _text)},
    DECISION_RECORDED: {
        "id": (True, _text),
        "choice": (True, _anything),
        "context": (False, _anything),
        "alternatives": (False, _list),
        "policy": (False, _object),
    },
    SURFACE_PATCH: {
        "surface": (True, _text),
        "op": (True, _text),
        "path": (True, _text),
        "value": (False, _anything),
    },
    STREAM_CHUNK: {"channel": (True, _text), "chunk": (True, _anything)},
}


def payload_fault(kind: int, payload: object) -> tuple[str, str] | None:
    """Return the first `(field, what is wrong)` of a payload of this kind, or None if it is well-formed."""
    fields = PAYLOAD_FIELDS.get(kind)
    if fields is None:
        return None
    if not isinstance(payload, dict):
        return "payload", "must be an object"
    for name, (required, check) in fields.items():
        if name in payload:
            reason = check(payload[name])
            if reason is not None:
                return f"payload.{name}", reason
        elif required:
            return f"payload.{name}", "is missing"
    return None
