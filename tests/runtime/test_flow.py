"""One flow on one store: what is logged, what is served, and what a re-run may not do."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

import loomfast as lf
from tests.conftest import OpenStore
from tests.runtime.harness import StillClock, kinds, runtime


async def test_a_flow_runs_and_its_log_says_what_it_did(open_store: OpenStore) -> None:
    @lf.step
    async def double(n: int) -> int:
        return 2 * n

    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        ctx.emit("note", input)
        return await ctx.run(double, input)

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow, 21)
        assert await handle.result() == 42
        events = await store.read(handle.execution_id)
        assert kinds(events) == [
            "EXECUTION_STARTED",
            "note*",
            "STEP_STARTED",
            "STEP_COMPLETED",
            "EXECUTION_COMPLETED",
        ]
        assert [event.sequence for event in events] == [0, 1, 2, 3, 4]
        assert events[0].payload == {"flowId": "flow", "flowVersion": "1", "input": 21}
        assert events[2].payload == {
            "key": "double",
            "stepId": "double",
            "attempt": 1,
            "inputDigest": lf.format_digest(lf.fnv1a64(b"21")),
        }
        assert events[3].payload == {"key": "double", "output": 42}


async def test_output_before_a_gate_is_logged_once_after_any_number_of_resumes(open_store: OpenStore) -> None:
    """F01, and the defect that ADR 0102 records: `ui.append` before a gate."""
    calls: list[str] = []

    @lf.step
    async def effect(_: None) -> str:
        calls.append("effect")
        return "done"

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        ctx.emit("A")
        ctx.ui.append("timeline", "x")
        await ctx.run(effect)
        first = await ctx.suspend("go")
        ctx.stream("answer", "B")
        second = await ctx.suspend("go")
        ctx.emit("C")
        return [first, second]

    async with open_store() as store, runtime(store, flow) as rt:
        handle = await rt.start(flow)
        await handle.rest()
        before = await store.read(handle.execution_id)
        await rt.resume(handle.execution_id, "go", 1)
        await handle.rest()
        await rt.resume(handle.execution_id, "go", 2)
        assert await handle.result() == [1, 2]
        events = await store.read(handle.execution_id)
        assert events[: len(before)] == before
        assert kinds(events) == [
            *("EXECUTION_STARTED", "A*", "SURFACE_PATCH*", "STEP_STARTED", "STEP_COMPLETED"),
            *("EXECUTION_SUSPENDED", "go", "EXECUTION_RESUMED", "STREAM_CHUNK*"),
            *("EXECUTION_SUSPENDED", "go", "EXECUTION_RESUMED", "C*", "EXECUTION_COMPLETED"),
        ]
        assert calls == ["effect"]


async def test_the_first_run_sees_the_json_form_like_every_re_run(open_store: OpenStore) -> None:
    """F04."""
    seen: list[str] = []

    @lf.step
    async def shapes(_: None) -> Any:
        return {"z": (1, 2), "a": 1.0, 3: float("nan")}

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        output = await ctx.run(shapes)
        chosen = await ctx.decide("pick", lambda: ("x",))
        seen.append(repr([input, output, chosen]))
        output["z"].append("spoilt by this run")
        input["spoilt"] = True
        return await ctx.suspend("go")

    async with open_store() as store, runtime(store, flow) as rt:
        given = {"t": (1,)}
        handle = await rt.start(flow, given)
        given["spoilt"] = True
        await handle.rest()
        await rt.resume(handle.execution_id, "go")
        await handle.result()
    assert seen == ["[{'t': [1]}, {'z': [1, 2], 'a': 1.0, '3': None}, ['x']]"] * 2


async def test_repeated_calls_of_a_step_are_told_apart_by_call_order(open_store: OpenStore) -> None:
    calls: list[int] = []

    @lf.step
    def number(n: int) -> int:
        calls.append(n)
        return n * 10

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        serial = [await ctx.run(number, n) for n in (1, 2)]
        together = await asyncio.gather(ctx.run(number, 3), ctx.run(number, 4, key="mine"))
        await ctx.suspend("go")
        return [*serial, *together]

    async with open_store() as store, runtime(store, flow) as rt:
        handle = await rt.start(flow)
        state = await handle.rest()
        assert {key for key, _ in state.steps.items()} == {"number", "number#1", "number#2", "mine"}
        await rt.resume(handle.execution_id, "go")
        assert await handle.result() == [10, 20, 30, 40]
    assert sorted(calls) == [1, 2, 3, 4]


async def test_a_decision_is_made_once_and_recorded_with_its_grounds(open_store: OpenStore) -> None:
    made: list[Any] = []

    def choose(context: Any) -> str:
        made.append(context)
        return "rail"

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        way = await ctx.decide(
            "route",
            choose,
            context={"kg": 900},
            alternatives=["rail", "road"],
            policy={"id": "p", "version": "2", "propensity": 0.25},
        )
        await ctx.suspend("go")
        return way

    async with open_store() as store, runtime(store, flow) as rt:
        handle = await rt.start(flow)
        await handle.rest()
        await rt.resume(handle.execution_id, "go")
        assert await handle.result() == "rail"
        recorded = [e for e in await store.read(handle.execution_id) if e.event_type == "DECISION_RECORDED"]
        assert [event.payload for event in recorded] == [
            {
                "id": "route",
                "choice": "rail",
                "context": {"kg": 900},
                "alternatives": ["rail", "road"],
                "policy": {"id": "p", "version": "2", "propensity": 0.25},
            }
        ]
    assert made == [{"kg": 900}]


class Declined(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


async def test_a_declared_failure_is_the_same_exception_on_every_run(open_store: OpenStore) -> None:
    """F33."""
    seen: list[tuple[str, int, str]] = []
    calls: list[int] = []

    @lf.step(failures=(Declined,))
    async def charge(_: None) -> None:
        calls.append(1)
        raise Declined(7, "x")

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        try:
            await ctx.run(charge)
        except Declined as error:
            seen.append((type(error).__name__, error.code, str(error)))
        await ctx.suspend("go")

    async with open_store() as store, runtime(store, flow) as rt:
        handle = await rt.start(flow)
        await handle.rest()
        await rt.resume(handle.execution_id, "go")
        await handle.result()
    assert seen == [("Declined", 7, "7: x")] * 2
    assert calls == [1]


async def test_an_undeclared_failure_is_recorded_and_the_step_runs_again(open_store: OpenStore) -> None:
    calls: list[int] = []

    @lf.step
    async def flaky(_: None) -> str:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("once")
        return "fine"

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        try:
            outcome = await ctx.run(flaky)
        except OSError:
            outcome = "caught"
        ctx.ui.increment("tries")
        await ctx.suspend("go")
        return outcome

    async with open_store() as store, runtime(store, flow) as rt:
        handle = await rt.start(flow)
        await handle.rest()
        await rt.resume(handle.execution_id, "go")
        assert await handle.result() == "fine"
        events = await store.read(handle.execution_id)
        assert [e.payload["attempt"] for e in events if e.event_type == "STEP_STARTED"] == [1, 2]
        # The first increment followed an outcome that a re-run does not serve: it must not absorb the second.
        assert [kind for kind in kinds(events) if kind.startswith("SURFACE")] == [
            "SURFACE_PATCH",
            "SURFACE_PATCH*",
        ]


async def test_a_flow_that_raises_ends_failed_with_the_error_as_data(open_store: OpenStore) -> None:
    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        raise ValueError("no good")

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        with pytest.raises(lf.ExecutionFailedError, match="ValueError: no good"):
            await handle.result()
        state = await rt.load_state(handle.execution_id)
        assert state is not None
        assert state.error == {"type": "ValueError", "message": "no good", "data": {"args": ["no good"]}}


async def test_emits_inside_an_effect_are_logged_for_each_attempt_and_never_served(
    open_store: OpenStore,
) -> None:
    """F03."""

    @lf.step
    def noisy(fx: lf.EffectContext, input: Any) -> int:
        fx.emit("inside", {"attempt": fx.attempt})
        return threading.get_ident()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        thread = await ctx.run(noisy, 1)
        await ctx.suspend("go")
        ctx.emit("inside", {"attempt": 1})
        return thread

    async with open_store() as store, runtime(store, flow) as rt:
        handle = await rt.start(flow)
        await handle.rest()
        await rt.resume(handle.execution_id, "go")
        assert await handle.result() != threading.get_ident()
        events = await store.read(handle.execution_id)
        assert [kind for kind in kinds(events) if kind.startswith("inside")] == ["inside", "inside*"]


async def test_an_emit_of_the_flow_from_inside_an_effect_is_unstamped(open_store: OpenStore) -> None:
    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        def effect() -> None:
            ctx.emit("note", 1)

        async def decider() -> str:
            ctx.emit("note", 2)
            return "x"

        await ctx.run(effect)
        await ctx.decide("d", decider)
        ctx.emit("note", 3)

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(flow)
        await handle.result()
        events = await store.read(handle.execution_id)
        assert [kind for kind in kinds(events) if kind.startswith("note")] == ["note", "note", "note*"]


async def test_a_step_sees_the_context_variables_of_its_flow(open_store: OpenStore) -> None:
    """F36."""
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")

    @lf.step
    async def in_task(_: None) -> str:
        seen = who.get()
        who.set("changed by a step")
        return seen

    @lf.step
    def in_thread(_: None) -> str:
        return who.get()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        who.set(input)
        await asyncio.sleep(0)
        return [await ctx.run(in_task), await ctx.run(in_thread), who.get()]

    async with open_store() as store, runtime(store) as rt:
        handles = [await rt.start(flow, f"flow-{n}") for n in range(50)]
        for n, handle in enumerate(handles):
            assert await handle.result() == [f"flow-{n}"] * 3


async def test_an_exception_handler_of_the_flow_cannot_eat_a_suspension(open_store: OpenStore) -> None:
    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        try:
            return await ctx.suspend("go")
        except Exception:
            return "eaten"

    @lf.flow
    async def greedy(ctx: lf.WorkflowContext, input: Any) -> Any:
        try:
            return await ctx.suspend("go")
        except BaseException:
            return "eaten"

    async with open_store() as store, runtime(store, flow, greedy) as rt:
        for definition in (flow, greedy):
            handle = await rt.start(definition)
            assert (await handle.rest()).status == "suspended"
            await rt.resume(handle.execution_id, "go", "answer")
            assert await handle.result() == "answer"


async def test_a_gate_in_a_task_group_parks_the_whole_flow_and_keeps_the_other_branchs_step(
    open_store: OpenStore,
) -> None:
    calls: list[str] = []

    @lf.step
    async def slow(_: None) -> str:
        calls.append("slow")
        await asyncio.sleep(0.01)
        return "slow"

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> Any:
        async with asyncio.TaskGroup() as group:
            step = group.create_task(ctx.run(slow))
            gate = group.create_task(ctx.suspend("go"))
        return [step.result(), gate.result()]

    async with open_store() as store, runtime(store, flow) as rt:
        handle = await rt.start(flow)
        assert (await handle.rest()).status == "suspended"
        await rt.resume(handle.execution_id, "go", "answer")
        assert await handle.result() == ["slow", "answer"]
    assert calls == ["slow"]


async def test_what_a_flow_may_not_emit_or_wait_for_is_refused_at_the_call(open_store: OpenStore) -> None:
    refusals: list[str] = []

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        for attempt in (
            lambda: ctx.emit("EXECUTION_COMPLETED", {"output": 1}),
            lambda: ctx.emit("note", {1: "a", "1": "b"}),
        ):
            try:
                attempt()
            except lf.BadInputError as error:
                refusals.append(error.code)
        try:
            await ctx.suspend("EXECUTION_RESUMED")
        except lf.BadInputError as error:
            refusals.append(error.code)

    async with open_store() as store, runtime(store) as rt:
        await (await rt.start(flow)).result()
    expected = ["bad-input", "key-collision", "bad-input"]
    assert refusals == (expected if store.persists_json else ["bad-input", "bad-input"])


async def test_a_payload_without_json_form_is_kept_unstamped_by_the_memory_store() -> None:
    store = lf.MemoryEventStore()
    marker = object()

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        ctx.emit("note", marker)

    async with runtime(store) as rt:
        handle = await rt.start(flow)
        await handle.result()
        event = (await store.read(handle.execution_id))[1]
        assert event.payload is marker
        assert event.stamp is None


async def test_a_context_cannot_be_used_after_its_run(open_store: OpenStore) -> None:
    kept: list[lf.WorkflowContext] = []

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        kept.append(ctx)

    async with open_store() as store, runtime(store) as rt:
        await (await rt.start(flow)).result()
        with pytest.raises(lf.RunOverError):
            kept[0].emit("late")


async def test_hooks_that_raise_change_nothing(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: lf.Envelope) -> None:
        raise RuntimeError("hook")

    @lf.flow
    async def flow(ctx: lf.WorkflowContext, input: Any) -> str:
        ctx.emit("note")
        return "done"

    async with (
        open_store() as store,
        runtime(store, on_event=broken, on_commit=broken, clock=StillClock()) as rt,
    ):
        assert await (await rt.start(flow)).result() == "done"
    assert "a hook raised and was ignored" in caplog.text
