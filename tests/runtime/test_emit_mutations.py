"""Each guard of the emit rule is needed: without it its own guard test fails, and no other."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import loomfast as lf
from loomfast._core.emit_rule import EmitRule
from loomfast._runtime import context, effects
from tests.conftest import OpenStore
from tests.runtime import test_emit_guards as guards

GUARD_TESTS = [
    guards.test_live_guard_a_deploy_inserts_a_live_step_before_identical_content,
    guards.test_unsettled_flag_a_transient_failures_increment_swallows_no_later_one,
    guards.test_unsettled_flag_a_timed_out_zombies_path_swallows_no_later_emit,
    guards.test_segment_scope_a_deploy_removes_an_emit_and_makes_it_in_a_later_segment,
    guards.test_in_flight_window_an_emit_from_inside_an_effect_serves_none_of_the_flow,
    guards.test_in_flight_window_an_emit_from_inside_a_decider_serves_none_of_the_flow,
]


def nothing(rule: EmitRule) -> None:
    pass


def forget(*_: object) -> None:
    pass


def no_window_for(module: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Switch the in-flight window off for what this module executes: effects, or deciders."""

    def switch_off(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(module, "executing", SimpleNamespace(get=forget, set=forget, reset=forget))
        for name in ("began", "ended"):
            patch.setattr(EmitRule, name, unless_called_from(module, getattr(EmitRule, name)))

    return switch_off


def unless_called_from(module: Any, method: Callable[[EmitRule], None]) -> Callable[[EmitRule], None]:
    def guarded(rule: EmitRule) -> None:
        if sys._getframe(1).f_globals["__name__"] != module.__name__:
            method(rule)

    return guarded


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "live_guard": lambda patch: patch.setattr(EmitRule, "syscall_live", nothing),
    "unsettled_flag": lambda patch: patch.setattr(EmitRule, "ended_unsettled", nothing),
    "segment_scope": lambda patch: patch.setattr(
        context, "encode_digest", lambda segment, *content: lf.encode_digest(0, *content)
    ),
    "in_flight_window_an_emit_from_inside_an_effect": no_window_for(effects),
    "in_flight_window_an_emit_from_inside_a_decider": no_window_for(context),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
async def test_without_one_guard_exactly_its_own_tests_fail(
    open_store_again: Callable[[], OpenStore], monkeypatch: pytest.MonkeyPatch, mutation: str
) -> None:
    MUTATIONS[mutation](monkeypatch)
    failed = set()
    for guard_test in GUARD_TESTS:
        try:
            await guard_test(open_store_again())
        except AssertionError:
            failed.add(guard_test.__name__)
    assert failed == {test.__name__ for test in GUARD_TESTS if test.__name__.startswith(f"test_{mutation}")}


async def test_with_every_guard_in_place_every_guard_test_passes(
    open_store_again: Callable[[], OpenStore],
) -> None:
    for guard_test in GUARD_TESTS:
        await guard_test(open_store_again())


def test_every_guard_test_has_a_mutation_and_every_mutation_a_test() -> None:
    def prefixed(name: str) -> list[str]:
        return [mutation for mutation in MUTATIONS if name.startswith(f"test_{mutation}")]

    named = [name for name in vars(guards) if prefixed(name)]
    assert sorted(named) == sorted(test.__name__ for test in GUARD_TESTS)
    assert {prefixed(name)[0] for name in named} == set(MUTATIONS)


@pytest.fixture(params=["memory", "sqlite"])
def open_store_again(request: pytest.FixtureRequest, tmp_path: Any) -> Callable[[], OpenStore]:
    """Makes one `open_store` after the other, each with an empty store of its own."""
    count = iter(range(1_000))

    def again() -> OpenStore:
        path = tmp_path / f"{next(count)}.db"

        @asynccontextmanager
        async def opened() -> AsyncIterator[lf.EventStore]:
            if request.param == "memory":
                store: lf.EventStore = lf.MemoryEventStore()
            else:
                store = await lf.SqliteEventStore.open(path)
            async with store:
                yield store

        return opened

    return again
