"""Declaring flows and steps: what a signature says, and what is refused at the declaration."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from typing import Any

import pydantic
import pytest

import loomfast as lf
from loomfast import BadInputError, InputValidationError
from loomfast._core.definitions import define_step
from loomfast._core.schema import check, check_schema

FX = object()


class Callable:
    async def __call__(self, input: Any) -> Any:
        return input


@pytest.mark.parametrize(
    ("effect", "given", "arguments"),
    [
        (lambda: (), None, ()),
        (lambda order: (order,), 1, (1,)),
        (lambda order: (order,), None, (None,)),
        (lambda order=7: (order,), 1, (1,)),
        (lambda order=7: (order,), None, (7,)),
        (lambda fx: (fx,), None, (FX,)),
        (lambda fx, order: (fx, order), 1, (FX, 1)),
        (functools.partial(lambda rate, order: (rate, order), 3), 1, (3, 1)),
    ],
)
def test_an_effect_is_called_with_what_its_signature_asks_for(
    effect: Any, given: Any, arguments: Any
) -> None:
    assert lf.step(id="s")(effect).call(FX, given) == arguments


def test_the_context_may_have_any_name_when_it_is_annotated() -> None:
    def effect(context: lf.EffectContext, order: int) -> Any:
        return context, order

    assert lf.step(effect).call(FX, 1) == (FX, 1)


def test_a_callable_object_with_an_async_call_is_an_async_step() -> None:
    assert lf.step(id="s")(Callable()).is_async


def two(order: Any, mode: Any) -> None: ...


def variadic(*args: Any) -> None: ...


def keyword(*, order: Any) -> None: ...


def three(fx: Any, order: Any, mode: Any) -> None: ...


@pytest.mark.parametrize("effect", [two, variadic, keyword, three])
def test_a_signature_no_step_can_fill_is_refused_at_the_declaration(effect: Any) -> None:
    with pytest.raises(lf.BadInputError, match=r"must take \(\), \(input\), \(fx\) or \(fx, input\)"):
        lf.step(effect)


@pytest.mark.parametrize(
    "options",
    [
        {"failures": ("x",)},
        {"failures": (KeyboardInterrupt,)},
        {"id": "a#1"},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"timeout_s": "3"},
        {"retry": 3},
    ],
)
def test_options_that_make_no_sense_are_refused_at_the_declaration(options: dict[str, Any]) -> None:
    with pytest.raises(lf.BadInputError):
        lf.step(**options)(lambda: None)


def test_calling_a_step_directly_says_how_it_is_run() -> None:
    with pytest.raises(lf.BadInputError, match=r"await ctx\.run\(step, input\)"):
        lf.step(id="s")(lambda: None)()


def test_a_flow_that_is_run_as_a_step_is_told_how_a_flow_is_started() -> None:
    @lf.flow
    async def child(ctx: Any, input: Any) -> None: ...

    with pytest.raises(lf.BadInputError, match=r"'child' is a flow, not a step: start or submit it"):
        define_step(child)  # type: ignore[arg-type]


async def no_input(ctx: Any) -> None: ...


async def extra(ctx: Any, input: Any, more: Any) -> None: ...


@pytest.mark.parametrize("function", [no_input, extra, two, "sell", None])
def test_what_is_no_flow_is_refused_at_the_declaration(function: Any) -> None:
    with pytest.raises(lf.BadInputError):
        lf.flow(id="f")(function)


@dataclasses.dataclass
class Approval:
    ok: bool


@pytest.mark.parametrize("schema", [Approval, dict, "text", 5])
def test_what_is_no_schema_is_refused_at_the_declaration(schema: Any) -> None:
    async def gated(ctx: Any, input: Any) -> None: ...

    with pytest.raises(lf.BadInputError, match="is no schema"):
        lf.flow(gates={"go": schema})(gated)


async def checks_nothing(value: Any) -> None:
    raise AssertionError("never awaited")


@pytest.mark.parametrize("schema", [list[int], dict, checks_nothing, {"type": "object"}])
def test_what_would_check_nothing_is_no_schema(schema: Any) -> None:
    with pytest.raises(BadInputError, match="is no schema"):
        check_schema(schema)


def test_a_schema_checks_strictly_since_the_value_is_not_converted() -> None:
    class Answer(pydantic.BaseModel):
        ok: bool
        on: datetime.date

    check(Answer, {"ok": True, "on": "2026-01-02"}, "answer")
    for wrong in ({"ok": "no", "on": "2026-01-02"}, {"ok": 1, "on": "2026-01-02"}, {"ok": True, "on": 5}):
        with pytest.raises(InputValidationError):
            check(Answer, wrong, "answer")
    with pytest.raises(InputValidationError, match="does not fit"):
        check(lambda value: value["ok"], {"ok": False}, "answer")
