"""The scenarios of the crash matrix: each flow with what it meets, and what its contract leaves open.

Between them they use every verb of a context, alone and together.
"""

from __future__ import annotations

from typing import Any

from loomfast.testing import Scenario, World
from tests.crash import flows_of_emits as emits
from tests.crash import flows_of_steps as steps


def _resolve_declined(key: str, world: World) -> dict[str, Any]:
    return {"error": steps.Declined(4, "no money")} if world.count(key) else {"release": True}


GO: dict[str | tuple[str, int], Any] = {"go": "answer"}

SCENARIOS = [
    Scenario("emits-around-a-step", emits.emits_around_a_step, 1),
    Scenario(
        "output-before-gates", emits.output_before_gates, answers={("go", 0): 1, ("go", 1): {"z": 1, "a": 2}}
    ),
    Scenario("surfaces", emits.surfaces, answers=GO),
    Scenario("streams", emits.streams, answers=GO),
    Scenario("identical-emits", emits.identical_emits, answers=GO),
    Scenario(
        "gates-in-a-loop", emits.gates_in_a_loop, answers={"say": "hm", ("say", 1): "more", "detail": 1}
    ),
    Scenario("sleeps", emits.sleeps),
    Scenario("recorded-values", emits.recorded_values, answers=GO),
    Scenario("decisions", emits.decisions, {"kg": 900}, answers=GO, chosen_id=True),
    Scenario("a-decider-that-emits", emits.a_decider_that_emits, answers=GO, unstamped=("thought",)),
    Scenario("a-decider-that-raises", emits.a_decider_that_raises, answers=GO, unstamped=("anyway",)),
    Scenario("patches", emits.patches, answers=GO),
    Scenario("sync-steps-that-emit", emits.sync_steps_that_emit, answers=GO, unstamped=("progress",)),
    Scenario("effects-that-emit", emits.effects_that_emit, answers=GO),
    Scenario("retries", steps.retries, answers=GO),
    Scenario("typed-failures", steps.typed_failures, answers=GO),
    Scenario("untyped-failures", steps.untyped_failures, answers=GO, optional=("caught",)),
    Scenario("caught-failures", steps.caught_failures, answers=GO, optional=("caught",)),
    Scenario("a-flow-that-fails", steps.a_flow_that_fails, answers=GO),
    Scenario("timeouts", steps.timeouts, answers=GO, optional=("late",)),
    Scenario("asyncio-timeouts", steps.asyncio_timeouts, answers=GO),
    Scenario("gathers", steps.gathers, answers=GO),
    Scenario("task-groups", steps.task_groups, answers=GO),
    Scenario("at-most-once", steps.at_most_once, 10, answers=GO, chosen_id=True),
    Scenario("at-most-once-declined", steps.at_most_once_declined, answers=GO, in_doubt=_resolve_declined),
    Scenario("cancelled-in-a-step", steps.cancelled_in_a_step, cancel_on="begun"),
    Scenario(
        "cancelled-at-a-gate", steps.cancelled_at_a_gate, cancel_on="EXECUTION_SUSPENDED", chosen_id=True
    ),
    Scenario(
        "everything-at-once",
        steps.everything_at_once,
        ["a", "b", "cc"],
        answers={("approve", 0): "no", "approve": "yes"},
        chosen_id=True,
    ),
    Scenario(
        "payloads-without-a-json-form",
        emits.payloads_without_a_json_form,
        answers=GO,
        unstamped=("opaque",),
    ),
]
