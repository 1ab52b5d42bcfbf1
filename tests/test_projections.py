"""Surfaces: what `ctx.ui` builds, live and after a restart."""

from __future__ import annotations

from typing import Any

import pytest

import loomfast as lf
from loomfast.projections import ProjectionRuntime, UiProjection
from tests.conftest import OpenStore
from tests.runtime.harness import runtime


@lf.flow
async def surface_flow(ctx: lf.WorkflowContext, input: Any) -> None:
    ctx.ui.append("timeline", "x")
    ctx.ui.set("progress.done", 1)
    await ctx.suspend("go")
    ctx.ui.increment("progress.done", 2)
    await ctx.suspend("go")
    ctx.ui.merge("progress", {"of": 3})
    ctx.ui.remove("timeline.0")
    ctx.ui.set("title", "aside", surface="side")


async def test_an_append_before_a_gate_is_there_once_after_any_number_of_resumes(
    open_store: OpenStore,
) -> None:
    async with open_store() as store:
        live = ProjectionRuntime(store)
        seen = []
        async with runtime(store) as rt:
            handle = await rt.start(surface_flow)
            for _ in range(2):
                await handle.rest()
                seen.append(await live.get_state("ui", handle.execution_id))
                await rt.resume(handle.execution_id, "go")
            await handle.result()
        assert seen == [
            {"timeline": ["x"], "progress": {"done": 1}},
            {"timeline": ["x"], "progress": {"done": 3}},
        ]
        for projections in (live, ProjectionRuntime(store)):
            final = await projections.get_state("ui", handle.execution_id)
            assert final == {"timeline": [], "progress": {"done": 3, "of": 3}}
            assert await projections.get_state("ui", handle.execution_id, surface="side") == {
                "title": "aside"
            }


async def test_what_is_returned_is_the_callers_own(open_store: OpenStore) -> None:
    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(surface_flow)
        await handle.rest()
        projections = ProjectionRuntime(store, keep=1)
        (await projections.get_state("ui", handle.execution_id))["timeline"].append("spoilt")
        assert (await projections.get_state("ui", handle.execution_id))["timeline"] == ["x"]


async def test_projections_of_ones_own_stand_beside_the_built_in_one(open_store: OpenStore) -> None:
    class Count:
        def initial(self) -> int:
            return 0

        def apply(self, state: int, event: lf.Envelope) -> int:
            return state + 1

    async with open_store() as store, runtime(store) as rt:
        handle = await rt.start(surface_flow)
        state = await handle.rest()
        projections = ProjectionRuntime(store, {"count": Count()})
        assert await projections.get_state("count", handle.execution_id) == state.sequence + 1
        with pytest.raises(lf.BadInputError, match="there are count, ui"):
            await projections.get_state("nothing", handle.execution_id)
        with pytest.raises(lf.UnknownExecutionError):
            await projections.get_state("count", "nobody")


PATCHES = [
    ([("append", "a", 1), ("append", "a", 2)], {"a": [1, 2]}),
    ([("set", "a", "text"), ("append", "a", 1)], {"a": [1]}),
    ([("set", "a", 1), ("set", "a.b.c", 2)], {"a": {"b": {"c": 2}}}),
    ([("increment", "n", 2), ("increment", "n", 0.5)], {"n": 2.5}),
    ([("set", "n", True), ("increment", "n", 1)], {"n": 1}),
    ([("merge", "o", {"x": 1}), ("merge", "o", {"y": 2})], {"o": {"x": 1, "y": 2}}),
    ([("set", "l", [1, 2, 3]), ("set", "l.1", 9), ("remove", "l.0", None)], {"l": [9, 3]}),
    ([("set", "l", [1]), ("set", "l.7", 9)], {"l": [1, 9]}),
    ([("remove", "no.such.path", None)], {}),
    ([("set", "a", 1), ("remove", "a", None)], {}),
    ([("set", "n", 10**400), ("increment", "n", 0.5)], {"n": 0.5}),
    ([("unheard-of", "a", 1)], {}),
]


@pytest.mark.parametrize(("patches", "surface"), PATCHES)
def test_every_patch_fits_somehow(patches: list[tuple[str, str, Any]], surface: dict[str, Any]) -> None:
    projection = UiProjection()
    state = projection.initial()
    for sequence, (op, path, value) in enumerate(patches):
        payload = {"surface": "main", "op": op, "path": path, "value": value}
        state = projection.apply(state, lf.Envelope.make("e", sequence, "SURFACE_PATCH", payload, 0))
    assert state.get("main", {}) == surface


def test_a_patch_that_is_none_changes_nothing() -> None:
    projection = UiProjection()
    odd = lf.Envelope("e", 1, "SURFACE_PATCH", lf.encode({"surface": 1}), 0)
    assert projection.apply({}, odd) == {}
