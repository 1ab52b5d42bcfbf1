"""What a flow really did emit, run by run, as seen between the flow and its context.

What lives here: `RecordingContext`, handed to the flow in place of its context, and `Run`, its record. What
must not: any knowledge of what the context makes of an emit; that is what the record is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from loomfast._errors import JsonFormError
from loomfast._events import Opaque
from loomfast._kernels import Envelope, encode_digest
from loomfast._runtime.context import WorkflowContext
from loomfast._runtime.journal import Room
from loomfast._runtime.ui import SurfacePatches

# An event's type and its payload's text.
Content: TypeAlias = tuple[str, object]


class Made(NamedTuple):
    """One emit: its identity (None without a JSON form) and its content."""

    digest: int | None
    content: Content


@dataclass
class Run:
    """The flow-level emits of one run, in order; complete if the run rested, else as far as it came."""

    made: list[Made] = field(default_factory=list)


def content_of(event: Envelope) -> Content:
    """Return what makes two events alike, whoever emitted them."""
    body = event.body
    return event.event_type, (repr(body.value) if isinstance(body, Opaque) else body)


class RecordingContext:
    """A context that notes what is emitted through it, and counts the gates passed, by itself."""

    def __init__(self, ctx: WorkflowContext, run: Run) -> None:
        self._ctx = ctx
        self._run = run
        self._passed = 0
        self.ui = SurfacePatches(self.emit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def emit(self, event_type: str, payload: object = None) -> Room:
        room = self._ctx.emit(event_type, payload)
        try:
            body, digest = encode_digest(self._passed, event_type, payload)
            self._run.made.append(Made(digest, (event_type, body)))
        except JsonFormError:
            self._run.made.append(Made(None, (event_type, repr(payload))))
        return room

    def stream(self, channel: str, chunk: object) -> Room:
        return self.emit("STREAM_CHUNK", {"channel": channel, "chunk": chunk})

    async def suspend(self, on: str, **gate: Any) -> Any:
        answer = await self._ctx.suspend(on, **gate)
        self._passed += 1
        return answer

    async def sleep(self, seconds: float) -> None:
        await self._ctx.sleep(seconds)
        self._passed += 1
