"""The crash matrix: play a flow, stop its process after every single write, and see it through to the end.

What lives here: `Scenario`, a flow with the answers it gets; `play_case`, one life after another;
`crash_matrix`, all of them. What must not: how a process dies (crashing), what has to hold (invariants).

Theory of operation
-------------------
A *case* is one execution and the crashes it suffers. Each of its *lives* is a process: a fresh event loop
under virtual time, a store opened anew, a fresh runtime. A life starts the execution, or recovers it, answers
its gates, and ends when the execution has ended or its store (`CrashingStore`) stops the process. It is
stopped after every write twice: before it hears of it, and at the last instant before its next write.

*The second crash* falls into the recovery, after a number of its writes drawn from the seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from loomfast._core.definitions import FlowDefinition, FlowFunction
from loomfast._core.definitions import flow as define_flow
from loomfast._errors import BadInputError, ExecutionEndedError, LoomError
from loomfast._events import IN_DOUBT
from loomfast._kernels import Envelope, State
from loomfast._runtime.context import WorkflowContext
from loomfast._runtime.handle import ExecutionHandle
from loomfast._runtime.hooks import logger
from loomfast._runtime.runtime import WorkflowRuntime
from loomfast.stores import EventStore
from loomfast.testing.crashing import Crash, CrashingStore, ProcessKilled
from loomfast.testing.recording import RecordingContext, Run
from loomfast.testing.time import START_MS, VirtualClock, run_virtual, running_loop, seeded_entropy
from loomfast.testing.world import World

OpenStore: TypeAlias = Callable[[], AbstractAsyncContextManager[EventStore]]


# How long, in virtual seconds, a write may take under a seed other than 0.
LATENCIES_S = (0.0, 0.0, 0.0, 0.001, 0.02, 0.5)
# How long, in virtual time, a process stays away.
DOWNTIME_MS = 1_000
# A life of a scenario that is driven this often does not get anywhere.
TURNS = 1_000


def look_at_the_world(key: str, world: World) -> dict[str, Any]:
    """Resolve a step in doubt by what really happened: `facts[key]` is its output, else it may run again."""
    return {"output": world.facts[key]} if key in world.facts else {"release": True}


@dataclass(frozen=True)
class Scenario:
    """A flow and everything it meets.

    `build` makes the flow fresh, for a new process; its effects report to the world it is given. `answers`
    are payloads for gates, by event type or by `(event type, ordinal)`; a gate without an answer whose
    `wakeAt` is set is fired when due. `in_doubt` gives the arguments of `resolve_in_doubt` for a key.
    `cancel_on` cancels the execution once an event of that type is durable. `chosen_id` starts it with an id
    of the caller's (durable at once) instead of one of the runtime's.

    What the flow's contract leaves open is declared, everything else is checked: emits of the types in
    `optional` may be missing, because they lie on a path that an unsettled outcome decides; those in
    `unstamped` are never stamped, for a cause that no log shows (made inside a decider or effect, or after a
    decider has raised; a payload without JSON form); `same` compares terminal payloads.
    """

    name: str
    build: Callable[[World], FlowDefinition | FlowFunction]
    input: Any = None
    answers: Mapping[str | tuple[str, int], Any] = field(default_factory=dict)
    in_doubt: Callable[[str, World], dict[str, Any]] = look_at_the_world
    cancel_on: str | None = None
    chosen_id: bool = False
    optional: Collection[str] = ()
    unstamped: Collection[str] = ()
    same: Callable[[Any, Any], bool] = lambda ours, clean: bool(ours == clean)


@dataclass
class Played:
    """What became of one case: its log, where each life's part of it begins, and the world it left."""

    scenario: Scenario
    seed: int
    crashes: tuple[Crash, ...]
    batch_events: int
    world: World
    log: list[Envelope] = field(default_factory=list)
    lives: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    now_ms: int = START_MS

    def hears(self, record: logging.LogRecord) -> bool:
        """Filter what is logged: a process that has been killed says nothing more."""
        return self.world.alive

    def __str__(self) -> str:
        """Say how to play this case again."""
        crashes = ", ".join(repr(crash) for crash in self.crashes)
        return (
            f"play_case({self.scenario.name!r}, seed={self.seed}, batch_events={self.batch_events}, "
            f"crashes=[{crashes}])"
        )


def play_case(
    scenario: Scenario,
    open_store: OpenStore,
    *,
    crashes: Sequence[Crash] = (),
    seed: int = 0,
    batch_events: int = 1,
) -> Played:
    """Play one execution through its crashes to its end.

    `open_store` opens the store as a process does at its start: empty first, the same logs ever after. What
    the runtime raises, or a `VirtualTimeError` when the flow waits for something it will not get, is among
    the world's `violations`. Raises `BadInputError` for a scenario that cannot be played.
    """
    played = Played(scenario, seed, tuple(crashes), batch_events, World())
    execution_id = f"{scenario.name}-{seed}-{batch_events}-" + "-".join(
        f"{crash.after}{'a' if crash.acknowledged else 'u'}" for crash in crashes
    )
    logger.addFilter(played.hears)
    try:
        _play_lives(played, open_store, execution_id)
    finally:
        logger.removeFilter(played.hears)
    return played


def _play_lives(played: Played, open_store: OpenStore, execution_id: str) -> None:
    for number, crash in enumerate((*played.crashes, None)):
        life = _Life(played, execution_id, crash, played.seed * 1_000 + number if played.seed else 0)
        played.lives.append(played.world.durable_sequence + 1)
        played.world.alive = True
        try:
            run_virtual(life.main(open_store), seed=life.seed, start_ms=played.now_ms)
        except ProcessKilled:
            pass  # as planned
        except LoomError as error:
            if type(error) is BadInputError:  # not one of its kinds, which a runtime may raise
                raise
            played.world.violations.append(f"{type(error).__name__}: {error}")
        if life.store is not None:
            played.writes.append(life.store.writes)
            if not life.store.crashed:
                break


class _Life:
    """One process of a case."""

    def __init__(self, played: Played, execution_id: str, crash: Crash | None, seed: int) -> None:
        self.seed = seed
        self.store: CrashingStore | None = None
        self._played = played
        self._world = played.world
        self._scenario = played.scenario
        self._execution_id = execution_id
        self._crash = crash
        self._to_cancel = asyncio.Event()
        self._draw = random.Random(seed)

    async def main(self, open_store: OpenStore) -> None:
        loop = running_loop()
        opened = open_store()
        async with loop.outside():
            inner = await opened.__aenter__()
        self.store = CrashingStore(
            inner, self._crash, observe=self._observe, on_crash=self._world.stop, latency_s=self._latency_s
        )
        try:
            await self._live(self.store)
        finally:
            if not self.store.crashed:
                async with loop.outside():
                    self._played.log = await inner.read(self._execution_id)
            self._played.now_ms = loop.now_ms() + DOWNTIME_MS
            loop.set_exception_handler(lambda loop, context: None)
            async with loop.outside():
                await opened.__aexit__(None, None, None)

    def _latency_s(self) -> float:
        return self._draw.choice(LATENCIES_S) if self.seed else 0.0

    def _observe(self, envelopes: Sequence[Envelope]) -> None:
        self._world.became_durable(envelopes)
        if self._scenario.cancel_on in self._world.durable_types:
            self._to_cancel.set()

    async def _live(self, store: EventStore) -> None:
        scenario, execution_id = self._scenario, self._execution_id
        runtime = WorkflowRuntime(
            store,
            clock=VirtualClock(),
            id_factory=lambda: execution_id,
            entropy=seeded_entropy(self._played.seed),
            executor=running_loop().executor(),
            batch_events=self._played.batch_events,
        )
        flow = runtime.register(self._recorded(scenario.build(self._world)))
        self._observe(())
        state = await runtime.load_state(execution_id)
        if state is not None and len(self._played.lives) == 1:
            raise BadInputError(f"the store already holds {execution_id!r}; a matrix wants an empty one")
        if state is None:
            chosen = execution_id if scenario.chosen_id else None
            handle = await runtime.start(flow, scenario.input, execution_id=chosen)
            if scenario.chosen_id:
                self._world.acknowledged(0, "a start")
        else:
            if self._to_cancel.is_set():  # whoever asked was not answered, and asks again
                await self._cancel(runtime)
            handle = await runtime.recover(execution_id)
        cancelling = asyncio.create_task(self._cancel(runtime))
        try:
            await self._drive(runtime, handle, cancelling)
        finally:
            cancelling.cancel()
        await runtime.close()  # and not after a crash: nobody closes what has been killed

    def _recorded(self, flow: FlowDefinition | FlowFunction) -> FlowDefinition:
        definition = flow if isinstance(flow, FlowDefinition) else define_flow(flow)

        async def function(ctx: WorkflowContext, input: Any) -> Any:
            run = Run()
            if self._world.alive:
                self._world.runs.append(run)
            return await definition.function(RecordingContext(ctx, run), input)

        return replace(definition, function=function)

    async def _drive(
        self, runtime: WorkflowRuntime, handle: ExecutionHandle, cancelling: asyncio.Task[None]
    ) -> None:
        for _ in range(TURNS):
            state = await handle.rest()
            self._world.acknowledged(state.sequence, f"status {state.status!r}")
            if state.ended is not None:
                return
            if self._to_cancel.is_set():
                await cancelling
                continue
            handle = await self._answer(runtime, state)
            self._world.acknowledged(state.sequence + 1, "an answer")
        raise AssertionError(f"{self._played}: not at its end after {TURNS} answers")

    async def _answer(self, runtime: WorkflowRuntime, state: State) -> ExecutionHandle:
        scenario = self._scenario
        for key, step in state.steps.items():
            if step.phase == IN_DOUBT:
                resolution = scenario.in_doubt(str(key), self._world)
                return await runtime.resolve_in_doubt(state.execution_id, str(key), **resolution)
        gate = state.pending
        if gate is None:
            raise AssertionError(f"{self._played}: suspended without a gate or a step in doubt")
        for name in ((gate.on, gate.ordinal), gate.on):
            if name in scenario.answers:
                return await runtime.resume(
                    state.execution_id,
                    gate.on,
                    scenario.answers[name],
                    correlation_key=gate.correlation_key,
                    gate=gate.ordinal,
                )
        if gate.wake_at is None:
            raise AssertionError(f"{self._played}: no answer for gate {gate.ordinal} on {gate.on!r}")
        await asyncio.sleep(max(0, gate.wake_at - running_loop().now_ms()) / 1000)
        return await runtime.fire(state.execution_id)

    async def _cancel(self, runtime: WorkflowRuntime) -> None:
        await self._to_cancel.wait()
        with contextlib.suppress(ExecutionEndedError):
            await runtime.cancel(self._execution_id, "asked for")


class MatrixReport(NamedTuple):
    """What a matrix covered: `writes` of the clean run, `cases` played, `lives` (processes) in them."""

    scenario: str
    writes: int
    cases: int
    lives: int


def crash_matrix(
    scenario: Scenario,
    open_store: OpenStore,
    *,
    seed: int = 0,
    batch_events: int = 1,
    second_crashes: int = 1,
) -> MatrixReport:
    """Crash a scenario after each of its writes, recover it, and check every invariant every time.

    Plays it cleanly once; then, for each write, once dying before and once after hearing of it, and
    `second_crashes` times with another crash in the recovery. Raises `InvariantError`, which says how to
    replay what failed.
    """
    from loomfast.testing.invariants import check_invariants

    draw = random.Random(f"{scenario.name} {seed}")
    clean = play_case(scenario, open_store, seed=seed, batch_events=batch_events)
    check_invariants(clean, clean)
    (writes,) = clean.writes
    report = MatrixReport(scenario.name, writes, 1, 1)

    def play(*crashes: Crash) -> Played:
        nonlocal report
        played = play_case(scenario, open_store, crashes=crashes, seed=seed, batch_events=batch_events)
        check_invariants(played, clean)
        report = report._replace(cases=report.cases + 1, lives=report.lives + len(played.lives))
        return played

    for after in range(writes + 1):
        for acknowledged in (False, True):
            if (acknowledged and after == writes) or (not acknowledged and after == 0):
                continue  # there is no such moment
            first = Crash(after, acknowledged)
            recovered = play(first)
            if len(recovered.writes) < 2:
                continue
            for _ in range(second_crashes):
                play(first, Crash(draw.randint(0, recovered.writes[1]), draw.random() < 0.5))
    return report
