"""The emit rule on whole flows and logs: every case that ADR 0102 names, on each store.

A flow is deployed as a row of functions: the n-th is the code of the n-th run. `kinds` marks a stamped event
with `*`. The tests up to the line below are the guard tests of D4; `test_emit_mutations.py` shows that each
fails without its guard.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import loomfast as lf
from loomfast._runtime import context as context_module
from tests.conftest import OpenStore
from tests.runtime.harness import deployed, of, parking, run_through, runtime, turns


@lf.step
async def noop() -> None:
    pass


# --- the guards of D4 ----------------------------------------------------------------------------


async def test_live_guard_a_deploy_inserts_a_live_step_before_identical_content(
    open_store: OpenStore,
) -> None:
    async def before(ctx: lf.WorkflowContext) -> None:
        ctx.emit("note", 1)

    async def after(ctx: lf.WorkflowContext) -> None:
        await ctx.run(noop)
        ctx.emit("note", 1)

    async with open_store() as store:
        logs = await run_through(store, before, after, after)
    assert [of(log, "note") for log in logs] == [["note*"], ["note*", "note"], ["note*", "note"]]


async def test_unsettled_flag_a_transient_failures_increment_swallows_no_later_one(
    open_store: OpenStore,
) -> None:
    """P2: the failure sends the flow down another path, and what it says there is no replay of this one."""
    outcomes = iter([OSError("down"), OSError("down"), None])
    paths: list[str] = []

    @lf.step
    async def flaky() -> None:
        if error := next(outcomes):
            raise error

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(flaky)
            failed = False
        except OSError:
            failed = True
        await ctx.suspend("go")
        paths.append("failed" if failed else "went well")
        ctx.ui.increment("count")  # on another path in the third run: another statement of equal content

    async with open_store() as store:
        logs = await run_through(store, flow, flow, flow)
    assert paths == ["failed", "went well"]
    assert [of(log, "SURFACE_PATCH") for log in logs] == [
        [],
        ["SURFACE_PATCH"],
        ["SURFACE_PATCH", "SURFACE_PATCH*"],
    ]


async def test_unsettled_flag_a_timed_out_zombies_path_swallows_no_later_emit(open_store: OpenStore) -> None:
    """The zombie has ended when the flow speaks, so only the flag knows of the timeout."""
    calls: list[int] = []
    paths: list[str] = []

    @lf.step(timeout_s=1)
    async def slow() -> str:
        calls.append(1)
        if len(calls) < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)  # works on after its time is up
            zombies.pop().set()
        return "in time"

    zombies: list[asyncio.Event] = []

    async def flow(ctx: lf.WorkflowContext) -> None:
        zombie = asyncio.Event()
        zombies.append(zombie)
        try:
            await ctx.run(slow)
            path = "in time"
        except lf.StepTimeoutError:
            path = "late"
            await zombie.wait()
            await turns(5)
        await ctx.suspend("go")
        paths.append(path)
        ctx.emit("note", "one")

    async with open_store() as store:
        logs = await run_through(store, flow, flow, flow)
    assert paths == ["late", "in time"]
    assert [of(log, "note") for log in logs] == [[], ["note"], ["note", "note*"]]


async def test_segment_scope_a_deploy_removes_an_emit_and_makes_it_in_a_later_segment(
    open_store: OpenStore,
) -> None:
    async def before(ctx: lf.WorkflowContext) -> None:
        ctx.emit("note", 1)

    async def after(ctx: lf.WorkflowContext) -> None:
        await ctx.suspend("go")
        ctx.emit("note", 1)

    async with open_store() as store:
        logs = await run_through(store, before, after, after)
    assert [of(log, "note") for log in logs] == [["note*"], ["note*", "note*"], ["note*", "note*"]]


async def test_in_flight_window_an_emit_from_inside_an_effect_serves_none_of_the_flow(
    open_store: OpenStore,
) -> None:
    async def before(ctx: lf.WorkflowContext) -> None:
        @lf.step(id="noop")
        async def chatty() -> None:
            ctx.stream("answer", "delta")

        await ctx.run(chatty)

    async def after(ctx: lf.WorkflowContext) -> None:
        await ctx.run(noop)
        ctx.stream("answer", "delta")

    async with open_store() as store:
        logs = await run_through(store, before, after, after)
    assert [of(log, "STREAM_CHUNK") for log in logs] == [
        ["STREAM_CHUNK"],
        ["STREAM_CHUNK", "STREAM_CHUNK*"],
        ["STREAM_CHUNK", "STREAM_CHUNK*"],
    ]


async def test_in_flight_window_an_emit_from_inside_a_decider_serves_none_of_the_flow(
    open_store: OpenStore,
) -> None:
    async def before(ctx: lf.WorkflowContext) -> None:
        async def chatty() -> str:
            ctx.emit("note", 1)
            return "x"

        await ctx.decide("pick", chatty)

    async def after(ctx: lf.WorkflowContext) -> None:
        await ctx.decide("pick", lambda: "not asked again")
        ctx.emit("note", 1)

    async with open_store() as store:
        logs = await run_through(store, before, after, after)
    assert [of(log, "note") for log in logs] == [["note"], ["note", "note*"], ["note", "note*"]]


# -------------------------------------------------------------------------------------------------


async def test_the_reviewers_ordinal_counterexample_an_overlapping_step_re_executes(
    open_store: OpenStore,
) -> None:
    """D7: matching by ordinal skipped `C` for ever here, and repeated `A` on every resume."""
    calls: list[int] = []

    @lf.step
    async def overlapping() -> None:
        calls.append(1)
        await turns(20)
        if len(calls) == 1:
            raise OSError("once")

    async def flow(ctx: lf.WorkflowContext) -> None:
        branch = asyncio.create_task(ctx.run(overlapping))
        await turns(10)
        ctx.emit("A")
        await asyncio.gather(branch, return_exceptions=True)
        ctx.emit("B")
        await ctx.suspend("go")
        ctx.emit("C")

    async with open_store() as store:
        logs = await run_through(store, *[flow] * 5)
    assert [of(log, "A", "B", "C") for log in logs] == [
        ["A", "B"],  # A in the window, B after an unsettled failure
        ["A", "B", "A", "B*", "C*"],  # the step re-executes, and settles
        ["A", "B", "A", "B*", "C*", "A*"],  # it is served: A is outside the window for the first time
        ["A", "B", "A", "B*", "C*", "A*"],
        ["A", "B", "A", "B*", "C*", "A*"],
    ]
    assert len(calls) == 2


@pytest.mark.parametrize("ending", ["raises", "is cancelled by the flow", "swallows its cancellation"])
async def test_whatever_a_re_run_does_not_serve_leaves_later_emits_unstamped(
    open_store: OpenStore, ending: str
) -> None:
    """What the flow saw counts: a step that swallows its cancellation is served as completed next time."""

    async def work() -> str:
        if ending == "raises":
            raise OSError("down")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if ending == "is cancelled by the flow":
                raise
        return "done after all"

    async def late(ctx: lf.WorkflowContext) -> None:
        try:
            async with asyncio.timeout(0.01):
                await ctx.run(lf.step(id="noop")(work))
        except (TimeoutError, OSError):
            ctx.emit("note", "gave up")

    async def in_time(ctx: lf.WorkflowContext) -> None:
        await ctx.run(noop)
        ctx.emit("note", "gave up")  # new, and equal by chance

    async with open_store() as store:
        logs = await run_through(store, late, in_time, in_time)
    assert [of(log, "note") for log in logs] == [["note"], ["note", "note*"], ["note", "note*"]]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_a_decider_that_raises_leaves_later_emits_unstamped(
    open_store: OpenStore, asynchronous: bool
) -> None:
    def no() -> str:
        raise OSError("no")

    async def later_no() -> str:
        raise OSError("no")

    async def undecided(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.decide("pick", later_no if asynchronous else no)
        except OSError:
            ctx.emit("note", 1)

    async def decided(ctx: lf.WorkflowContext) -> None:
        await ctx.decide("pick", lambda: "x")
        ctx.emit("note", 1)

    async with open_store() as store:
        logs = await run_through(store, undecided, decided, decided)
    assert [of(log, "note") for log in logs] == [["note"], ["note", "note*"], ["note", "note*"]]


async def test_a_decision_the_flow_was_cancelled_out_of_leaves_later_emits_unstamped(
    open_store: OpenStore,
) -> None:
    async def endless() -> None:
        await asyncio.Event().wait()

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            async with asyncio.timeout(0.01):
                await ctx.decide("pick", endless)
        except TimeoutError:
            ctx.emit("note", 1)

    async with open_store() as store:
        [log] = await run_through(store, flow)
    assert of(log, "note") == ["note"]


@pytest.mark.parametrize("kind", ["task", "thread"])
async def test_while_a_zombie_lives_emits_are_unstamped_although_its_step_has_settled(
    open_store: OpenStore, kind: str
) -> None:
    """F35: the effect counts as in flight until it itself ends, not until its deadline."""
    release, released, calls = threading.Event(), asyncio.Event(), list[int]()

    async def task(fx: lf.EffectContext) -> str:
        if fx.attempt == 1:
            while not released.is_set():
                try:
                    await released.wait()
                except asyncio.CancelledError:
                    continue
        return "done"

    def thread(fx: lf.EffectContext) -> str:
        if fx.attempt == 1:
            release.wait(10)
        return "done"

    again = lf.RetryPolicy(max_attempts=2, initial_s=0)
    work = lf.step(id="work", timeout_s=0.02, retry=again)(task if kind == "task" else thread)

    async def flow(ctx: lf.WorkflowContext) -> None:
        calls.append(1)
        await ctx.run(work)
        ctx.emit("beside", 1)
        if len(calls) == 1:
            release.set()
            released.set()
            while ctx._rule.in_flight:
                await asyncio.sleep(0.001)
        ctx.emit("beyond", 1)

    class Impatient(lf.SystemClock):
        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(min(seconds, 0.02))

    async with open_store() as store:
        logs = await run_through(store, flow, flow, flow, clock=Impatient())
    assert of(logs[0], "STEP_STARTED", "STEP_FAILED", "STEP_COMPLETED") == [
        *("STEP_STARTED", "STEP_FAILED", "STEP_STARTED", "STEP_COMPLETED")
    ]
    assert [of(log, "beside", "beyond") for log in logs] == [
        ["beside", "beyond*"],
        ["beside", "beyond*", "beside*"],
        ["beside", "beyond*", "beside*"],
    ]


async def test_emits_of_concurrent_branches_are_served_whatever_their_interleaving(
    open_store: OpenStore,
) -> None:
    order: list[list[int]] = [[0, 1, 2], [2, 0, 1], [1, 2, 0]]

    async def flow(ctx: lf.WorkflowContext) -> None:
        delays = order.pop()

        async def branch(n: int) -> None:
            await turns(delays[n])
            ctx.emit("same")
            ctx.emit("own", n)

        await asyncio.gather(*(branch(n) for n in range(3)))

    async with open_store() as store:
        logs = await run_through(store, flow, flow, flow)
    assert [(of(log, "same"), of(log, "own")) for log in logs] == [(["same*"] * 3, ["own*"] * 3)] * 3


# --- what can be lost: D2 (a) and (c) ------------------------------------------------------------


async def test_residual_loss_a_an_emit_moved_behind_served_steps_counts_as_the_old_one(
    open_store: OpenStore,
) -> None:
    """Pinned, not wished for: the segment's log holds that content as often as the new code says it."""

    async def before(ctx: lf.WorkflowContext) -> None:
        ctx.emit("note", "about the start")
        await ctx.run(noop)

    async def after(ctx: lf.WorkflowContext) -> None:
        await ctx.run(noop)
        ctx.emit("note", "about the start")  # meant as a new statement, about the step

    async def once_more(ctx: lf.WorkflowContext) -> None:
        await ctx.run(noop)
        ctx.emit("note", "about the start")
        ctx.emit("note", "about the start")

    async with open_store() as store:
        logs = await run_through(store, before, after, once_more)
    assert [of(log, "note") for log in logs] == [["note*"], ["note*"], ["note*", "note*"]]


async def test_residual_loss_c_two_contents_with_one_digest_are_one_identity(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def colliding(segment: int, event_type: str, payload: object) -> tuple[bytes, int]:
        return lf.encode(payload), 0xC0111DE

    monkeypatch.setattr(context_module, "encode_digest", colliding)

    async def before(ctx: lf.WorkflowContext) -> None:
        ctx.emit("note", "one")
        ctx.emit("note", "two")

    async def after(ctx: lf.WorkflowContext) -> None:
        for text in ("one", "two", "three", "four"):
            ctx.emit("note", text)

    async def other(ctx: lf.WorkflowContext) -> None:
        ctx.emit("note", "never logged: served in the place of another")

    async with open_store() as store:
        logs = await run_through(store, before, after, other)
    said = [[event.payload for event in log if event.event_type == "note"] for log in logs]
    assert said == [["one", "two"], ["one", "two", "three", "four"], ["one", "two", "three", "four"]]


# --- duplicates that remain ----------------------------------------------------------------------


@pytest.mark.parametrize("declared", [False, True], ids=["undeclared", "declared"])
async def test_emits_after_an_untyped_failure_are_repeated_until_the_failure_is_declared(
    open_store: OpenStore, declared: bool
) -> None:
    async def down() -> None:
        raise OSError("down")

    step = lf.step(failures=(OSError,) if declared else ())(down)

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(step)
        except OSError:
            ctx.emit("same segment")
        await ctx.suspend("go")
        ctx.emit("later segment")

    async with open_store() as store:
        logs = await run_through(store, *[flow] * 4)
    counts = [(len(of(log, "same segment")), len(of(log, "later segment"))) for log in logs]
    assert counts == ([(1, 0), (1, 1), (1, 1), (1, 1)] if declared else [(1, 0), (2, 1), (3, 2), (4, 3)])


async def test_an_emit_inside_the_window_is_appended_once_more_outside_it(open_store: OpenStore) -> None:
    """While a sibling branch's effect executes; the next re-run serves that step, and makes it outside."""

    @lf.step
    async def work() -> None:
        await turns(20)

    async def flow(ctx: lf.WorkflowContext) -> None:
        async def beside() -> None:
            await turns(10)
            ctx.emit("note", 1)

        await asyncio.gather(ctx.run(work), beside())

    async with open_store() as store:
        logs = await run_through(store, *[flow] * 4)
    assert [of(log, "note") for log in logs] == [["note"], *[["note", "note*"]] * 3]


async def test_a_payload_without_json_form_is_appended_on_every_run_or_refused_at_the_call(
    open_store: OpenStore,
) -> None:
    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            ctx.emit("note", object())
        except lf.UnsupportedTypeError:
            ctx.emit("refused")

    async with open_store() as store:
        logs = await run_through(store, *[flow] * 3)
        seen = [of(log, "note", "refused") for log in logs]
        # Where JSON is persisted, the call raises before anything is folded.
        assert seen == ([["refused*"]] * 3 if store.persists_json else [["note"] * n for n in (1, 2, 3)])


async def test_a_legacy_log_re_emits_its_prefix_once_stamped_and_is_stable_from_then_on(
    open_store: OpenStore,
) -> None:
    """D8: a log from before the stamps."""

    async def flow(ctx: lf.WorkflowContext) -> None:
        ctx.emit("note", 1)
        ctx.ui.append("timeline", "x")
        await ctx.run(noop)
        ctx.emit("note", 2)
        await ctx.suspend("go")
        ctx.emit("note", 3)

    written = lf.MemoryEventStore()
    [log] = await run_through(written, flow)
    legacy = [lf.Envelope.make("x", e.sequence, e.event_type, e.payload, e.timestamp, None) for e in log]
    async with open_store() as store, runtime(store, deployed(*[parking(flow)] * 3)) as rt:
        await store.append_batch(legacy)
        seen = []
        for _ in range(3):
            await (await rt.resume("x", "go")).rest()
            seen.append(of(await store.read("x"), "note", "SURFACE_PATCH"))
    prefix, again = ["note", "SURFACE_PATCH", "note"], ["note*", "SURFACE_PATCH*", "note*"]
    assert seen == [[*prefix, *again, "note*"]] * 3


async def test_a_deploy_that_edits_an_emit_appends_the_new_content_beside_the_old(
    open_store: OpenStore,
) -> None:
    async def before(ctx: lf.WorkflowContext) -> None:
        ctx.emit("note", "helo")

    async def after(ctx: lf.WorkflowContext) -> None:
        ctx.emit("note", "hello")

    async with open_store() as store:
        logs = await run_through(store, before, after, after)
    said = [[event.payload for event in log if event.event_type == "note"] for log in logs]
    assert said == [["helo"], ["helo", "hello"], ["helo", "hello"]]


# --- D1: the paths are split ---------------------------------------------------------------------


class Declined(Exception):
    pass


async def test_only_a_flows_own_emits_carry_a_stamp_and_nothing_else_counts(open_store: OpenStore) -> None:
    """Whole envelopes: what the kernel writes, and what an effect emits, has no metadata at all."""

    @lf.step
    async def speaks(fx: lf.EffectContext) -> str:
        fx.emit("note", 1)
        return "said"

    @lf.step(failures=(Declined,))
    async def declines() -> None:
        raise Declined("no")

    async def flow(ctx: lf.WorkflowContext) -> None:
        await ctx.run(speaks)
        try:
            await ctx.run(declines)
        except Declined:
            await ctx.decide("way", lambda: "on")
        ctx.emit("note", 1)

    async with open_store() as store:
        logs = await run_through(store, flow, flow)
        state = await store.fold("x")
    assert state is not None
    note = lf.digest(0, "note", 1)
    assert state.emits.get(note) == 1

    empty = lf.format_digest(lf.fnv1a64(b"null"))
    declined = {"type": "Declined", "message": "no", "data": {"args": ["no"]}}
    expected: list[tuple[Any, ...]] = [
        ("EXECUTION_STARTED", {"flowId": "flow", "flowVersion": "1", "input": None}),
        ("STEP_STARTED", {"key": "speaks", "stepId": "speaks", "attempt": 1, "inputDigest": empty}),
        ("note", 1),
        ("STEP_COMPLETED", {"key": "speaks", "output": "said"}),
        ("STEP_STARTED", {"key": "declines", "stepId": "declines", "attempt": 1, "inputDigest": empty}),
        ("STEP_FAILED", {"key": "declines", "typed": True, "error": declined}),
        ("DECISION_RECORDED", {"id": "way", "choice": "on"}),
        ("note", 1, {"flowEmit": lf.format_digest(note)}),
        ("EXECUTION_SUSPENDED", {"gate": 0, "on": "go"}),
        ("go", None),
        ("EXECUTION_RESUMED", {"gate": 0, "on": "go"}),
        ("EXECUTION_SUSPENDED", {"gate": 1, "on": "go"}),
    ]
    for sequence, (event, (event_type, payload, *metadata)) in enumerate(
        zip(logs[-1], expected, strict=True)
    ):
        whole = {
            "id": f"x-{sequence}",
            "executionId": "x",
            "sequence": sequence,
            "eventType": event_type,
            "payload": payload,
            "timestamp": event.timestamp,
        }
        assert event.to_json() == (whole | {"metadata": metadata[0]} if metadata else whole)


async def test_what_goes_wrong_and_ends_an_execution_is_never_stamped_either(open_store: OpenStore) -> None:
    @lf.step(at_most_once=True)
    async def pays() -> None:
        raise OSError("line dropped")

    @lf.step
    async def endless() -> None:
        await asyncio.Event().wait()

    async def pay(ctx: lf.WorkflowContext) -> None:
        try:
            async with asyncio.timeout(0.01):
                await ctx.run(endless)
        except TimeoutError:
            pass
        try:
            await ctx.run(pays)
        except OSError:
            await ctx.suspend("go")

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(deployed(pay, pay), execution_id="x")
        await handle.rest()
        await (await rt.resume("x", "go")).rest()
        await rt.cancel("x")
        log = await store.read("x")
    ends = {"STEP_CANCELLED", "STEP_FAILED", "EFFECT_INDOUBT", "EXECUTION_CANCELLED"}
    assert ends <= {event.event_type for event in log}
    assert all(event.stamp is None and event.extra is None for event in log)


@pytest.mark.parametrize("kind", ["effect", "decider"])
async def test_what_an_effect_leaves_running_behind_it_stamps_nothing(
    open_store: OpenStore, kind: str
) -> None:
    """A task that outlives its effect speaks from inside it all the same: the next run does not start it."""

    async def before(ctx: lf.WorkflowContext) -> None:
        async def later() -> None:
            await turns(20)
            ctx.emit("note", 1)

        background: list[asyncio.Task[None]] = []

        async def leaves() -> str:
            background.append(asyncio.create_task(later()))
            return "x"

        if kind == "effect":
            await ctx.run(lf.step(id="noop")(leaves))
        else:
            await ctx.decide("pick", leaves)
        assert ctx._rule.in_flight == 0
        await background[0]

    async def after(ctx: lf.WorkflowContext) -> None:
        if kind == "effect":
            await ctx.run(noop)
        else:
            await ctx.decide("pick", lambda: "y")
        ctx.emit("note", 1)

    async with open_store() as store:
        logs = await run_through(store, before, after, after)
    assert [of(log, "note") for log in logs] == [["note"], ["note", "note*"], ["note", "note*"]]
