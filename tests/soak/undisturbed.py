"""The same errand, undisturbed: what its log would be if nobody had killed anything.

What lives here: `undisturbed`, which plays a plan in memory with the choices, answers and outputs that a log
recorded, and `differences`, which holds that log against it. What must not: what processes said (judge).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import loomfast as lf
from loomfast.testing.recording import Made, RecordingContext, Run, content_of
from tests.soak.flows import ANSWER, Plan, errand_in, is_exact

# What an attempt that was repeated leaves beside what counts.
ATTEMPTS = frozenset(("STEP_CANCELLED", "EFFECT_INDOUBT"))


class Clean(NamedTuple):
    """An undisturbed log, and the emits that its last run, which goes through all of the flow, made."""

    log: list[lf.Envelope]
    made: list[Made]


def answer_to(gate: int) -> dict[str, int]:
    """Return what every gate of this ordinal is answered with."""
    return {"to": gate}


class Recorded:
    """A world in which effects do what a log says they did."""

    def __init__(self, log: Sequence[lf.Envelope]) -> None:
        payloads = [(event.event_type, event.payload) for event in log]
        self._outputs = {said["key"]: said["output"] for kind, said in payloads if kind == "STEP_COMPLETED"}
        self._choices = iter([said["choice"] for kind, said in payloads if kind == "DECISION_RECORDED"])
        self.answers = {
            payloads[place + 1][1]["gate"]: said
            for place, (kind, said) in enumerate(payloads)
            if kind == ANSWER
        }

    def begin(self, fx: lf.EffectContext) -> float:
        return 0.0

    def end(self, fx: lf.EffectContext, output: str) -> str:
        recorded: str = self._outputs.get(fx.key, output)
        return recorded

    def choose(self) -> int:
        return next(self._choices, -1)


class Leaping:
    """A clock on which everything is due at the next look."""

    def __init__(self) -> None:
        self._now_ms = 0

    def now_ms(self) -> int:
        self._now_ms += 3_600_000
        return self._now_ms

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


async def undisturbed(plan: Plan, log: Sequence[lf.Envelope]) -> Clean:
    """Play `plan` to its end, with what `log` recorded."""
    recorded = Recorded(log)
    errand = errand_in(recorded)
    runs: list[Run] = []

    @lf.flow(id=errand.id)
    async def recording(ctx: lf.WorkflowContext, plan: Plan) -> Any:
        runs.append(Run())
        return await errand.function(RecordingContext(ctx, runs[-1]), plan)

    async with (
        lf.MemoryEventStore() as store,
        lf.WorkflowRuntime(store, flows=[recording], clock=Leaping()) as runtime,
    ):
        handle = await runtime.start(recording, plan, execution_id="undisturbed")
        while (state := await handle.rest()).ended is None:
            gate = state.pending
            assert gate is not None
            if gate.wake_at is None:
                handle = await runtime.resume("undisturbed", ANSWER, recorded.answers.get(gate.ordinal))
            else:
                handle = await runtime.fire("undisturbed")
        return Clean(await store.read("undisturbed"), runs[-1].made)


def differences(plan: Plan, log: Sequence[lf.Envelope], clean: Clean) -> Iterator[str]:
    """Yield in what an ended log differs from the undisturbed one, where it must not."""
    if is_exact(plan):
        ours, theirs = _skeleton(log), _skeleton(clean.log)
        if ours != theirs:
            place = next(
                (n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
                min(len(ours), len(theirs)),
            )
            yield f"has {ours[place : place + 2]}, and undisturbed {theirs[place : place + 2]}"
        return
    made = Counter(emit.digest for emit in clean.made)
    stamps = Counter(event.stamp for event in log if event.stamp is not None)
    for event in log:
        if event.stamp is not None and stamps[event.stamp] > made[event.stamp]:
            yield f"{content_of(event)} at {event.sequence} is stamped more often than a run makes it"
    contents = Counter(content_of(event) for event in log)
    for content, count in Counter(
        content_of(event) for event in clean.log if event.stamp is not None
    ).items():
        if contents[content] < count:
            yield f"{content} is lost: {contents[content]} of {count}"


def _skeleton(log: Sequence[lf.Envelope]) -> list[tuple[Any, ...]]:
    """What of a log does not depend on how often its process died."""
    bones: list[tuple[Any, ...]] = []
    begun: set[str] = set()
    for event in log:
        kind, payload = event.event_type, event.payload
        if kind in ATTEMPTS or (kind == "STEP_FAILED" and not payload["typed"]):
            continue
        if kind == "STEP_STARTED":
            if payload["key"] not in begun:
                bones.append((kind, payload["key"], payload["inputDigest"]))
            begun.add(payload["key"])
        elif kind == "EXECUTION_SUSPENDED":
            bones.append((kind, payload["gate"], payload["on"]))
        else:
            bones.append((kind, event.body, event.stamp))
    return bones
