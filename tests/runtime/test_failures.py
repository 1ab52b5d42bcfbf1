"""A failure is plain data: what is declared comes back as it was raised, the rest is recorded (F33)."""

from __future__ import annotations

from typing import Any

import pytest

import loomfast as lf
from tests.conftest import OpenStore
from tests.runtime.harness import (
    run_through,
    steps_of,
)


class Plain(Exception):
    pass


class Coded(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class Slotted(Exception):
    __slots__ = ("code",)

    def __new__(cls, code: int) -> Slotted:
        return super().__new__(cls)

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class Child(Coded):
    pass


class Network(OSError):
    def __init__(self, host: str) -> None:
        super().__init__(111, "refused", host)
        self.host = host


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Holder(Exception):
    def __init__(self, held: object) -> None:
        super().__init__("holds", held)
        self.held, self.kept = held, "kept"


class Many(ExceptionGroup[Exception]):
    def derive(self, excs: Any) -> Many:
        return Many(self.message, excs)


def caused() -> Exception:
    try:
        try:
            raise ValueError("root")
        except ValueError as error:
            raise Plain("on top") from error
    except Plain as error:
        return error


def noted() -> Exception:
    error = Plain("noted")
    error.add_note("seen by the doorman")
    return error


RAISED: dict[str, tuple[Exception, type[Exception]]] = {
    "plain": (Plain("x", 1), Plain),
    "without arguments": (Plain(), Plain),
    "a constructor that takes other arguments": (Coded(7, "x"), Coded),
    "a subclass of the declared class": (Child(8, "y"), Coded),
    "slots and __new__": (Slotted(9), Slotted),
    "errno of a built-in": (FileNotFoundError(2, "gone", "file"), OSError),
    "a subclass of a built-in": (Network("db"), OSError),
    "a key error": (KeyError("k"), LookupError),
    "a cause": (caused(), Plain),
    "notes": (noted(), Plain),
    "a group": (Many("several", [Coded(1, "a"), Many("inner", [Coded(2, "b")])]), Many),
    "a built-in group": (ExceptionGroup("a (b)", [Plain("c")]), ExceptionGroup),
    "a message of 10 MB": (Plain("x" * 10_000_000), Plain),
    "half a surrogate pair": (Plain("\ud800"), Plain),
}


def view(error: BaseException) -> Any:
    """All that a handler can see of an exception, as far as it has a JSON form."""
    inner = [view(one) for one in error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    fields = {"code": getattr(error, "code", None), "errno": getattr(error, "errno", None)} | vars(error)
    return type(error), str(error), fields, inner


@pytest.mark.parametrize("case", RAISED)
async def test_a_declared_failure_comes_back_as_it_was_raised_on_every_run(
    open_store: OpenStore, case: str
) -> None:
    """F33."""
    raised, declared = RAISED[case]
    views: list[Any] = []
    calls: list[int] = []

    @lf.step(failures=(declared, Coded, Plain))
    async def fails() -> None:
        calls.append(1)
        raise raised

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(fails)
        except declared as error:
            views.append(view(error))

    async with open_store() as store:
        await run_through(store, flow, flow, flow)
    assert views == [view(raised)] * 3
    assert calls == [1]


async def test_what_of_a_declared_failure_has_no_json_form_is_missing_on_every_run(
    open_store: OpenStore,
) -> None:
    seen: list[Any] = []

    @lf.step(failures=(Holder, Silent))
    async def fails(silent: bool) -> None:
        raise Silent("x") if silent else Holder(object())

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(fails, False)
        except Holder as error:
            seen.append((error.args[0].startswith("('holds', <object"), vars(error)))
        try:
            await ctx.run(fails, True)
        except Silent as error:
            seen.append(error.args)

    async with open_store() as store:
        [log, _] = await run_through(store, flow, flow)
    assert seen == [(True, {"kept": "kept"}), ("x",)] * 2
    assert [e.payload["error"]["message"] for e in log if e.event_type == "STEP_FAILED"][1] == (
        "<str() of this Silent raised RuntimeError>"
    )


async def test_a_member_of_a_group_that_is_not_declared_becomes_a_step_failed_error(
    open_store: OpenStore,
) -> None:
    seen: list[list[str]] = []

    @lf.step(failures=(ExceptionGroup,))
    async def fails() -> None:
        raise ExceptionGroup("several", [ValueError("x")])

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(fails)
        except ExceptionGroup as group:
            seen.append([f"{type(one).__name__}: {one}" for one in group.exceptions])

    async with open_store() as store:
        await run_through(store, flow, flow)
    assert seen == [["StepFailedError: step 'fails' failed: ValueError: x"]] * 2


async def test_two_declared_classes_of_one_name_are_told_apart(open_store: OpenStore) -> None:
    first, second = (type("Timeout", (Exception,), {"__module__": module}) for module in ("one", "two"))
    seen: list[type] = []

    @lf.step(failures=(first, second))
    async def fails() -> None:
        raise second("x")

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(fails)
        except Exception as error:
            seen.append(type(error))

    async with open_store() as store:
        await run_through(store, flow, flow)
    assert seen == [second, second]


async def test_a_failure_whose_class_is_gone_degrades_to_step_failed_error(open_store: OpenStore) -> None:
    async def fails() -> None:
        raise Coded(7, "x")

    async def before(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(Coded):
            await ctx.run(lf.step(failures=(Coded,))(fails))

    async def after(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(lf.StepFailedError, match="step 'fails' failed: Coded: 7: x") as caught:
            await ctx.run(fails)
        assert caught.value.error["type"] == "Coded"

    async with open_store() as store:
        await run_through(store, before, after)


@pytest.mark.parametrize("case", [*RAISED, "silent"])
async def test_an_undeclared_failure_is_recorded_whatever_it_is_and_not_served(
    open_store: OpenStore, case: str
) -> None:
    raised = Silent("x") if case == "silent" else RAISED[case][0]
    caught: list[BaseException] = []

    async def fails() -> None:
        raise raised

    async def flow(ctx: lf.WorkflowContext) -> None:
        try:
            await ctx.run(fails)
        except Exception as error:
            caught.append(error)

    async with open_store() as store:
        log = (await run_through(store, flow, flow))[-1]
    assert caught == [raised] * 2
    assert steps_of(log) == ["STARTED", "FAILED"] * 2
    failed = [event for event in log if event.event_type == "STEP_FAILED"]
    assert all(not event.payload["typed"] and len(event.body) < 60_000 for event in failed)


async def test_an_effect_that_raises_more_than_an_exception_has_an_outcome_too(
    open_store: OpenStore,
) -> None:
    class Stop(BaseException):
        pass

    async def fails() -> None:
        raise Stop("everything")

    async def flow(ctx: lf.WorkflowContext) -> None:
        with pytest.raises(Stop):
            await ctx.run(fails)

    async with open_store() as store:
        [log] = await run_through(store, flow)
    assert steps_of(log) == ["STARTED", "FAILED"]
