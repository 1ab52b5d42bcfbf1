"""What a user declares: flows and steps.

A flow is a plain async function `async def flow(ctx, input)`. A step is a plain function, async or not, whose
body is an effect: `def step(input)`, or `def step(fx, input)` when it wants its `EffectContext`; a step
that takes no input leaves it out. Nothing here runs anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Never, TypeAlias, overload

from loomfast._core.arguments import shown, text_argument
from loomfast._core.retry import RetryPolicy
from loomfast._core.schema import check_schema
from loomfast._errors import BadInputError

FlowFunction: TypeAlias = Callable[[Any, Any], Coroutine[Any, Any, Any]]
Effect: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class FlowDefinition:
    """A flow: its function, its identity in the log, and the schemas of what it takes from outside.

    `input` and the values of `gates` (event type -> schema) are schemas as `loomfast._core.schema` takes
    them.
    """

    id: str
    version: str
    function: FlowFunction
    input: Any = None
    gates: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepDefinition:
    """A step: its effect, its identity, and how its attempts go.

    `failures` are the exception classes that are part of its result: such a failure is settled, and a re-run
    is served it. Any other failure is not, and the step executes again: within the run as `retry` says, and
    in a later run in any case. `timeout_s` bounds one attempt, in seconds. `at_most_once` makes STEP_STARTED
    durable before the effect runs; an attempt that a later run finds without a settled outcome is never
    repeated, but parks the execution in doubt until `WorkflowRuntime.resolve_in_doubt`.
    """

    id: str
    effect: Effect
    failures: tuple[type[Exception], ...]
    timeout_s: float | None
    retry: RetryPolicy | None
    at_most_once: bool
    wants_context: bool
    wants_input: bool
    needs_input: bool
    is_async: bool

    def __call__(self, *arguments: object, **keywords: object) -> Never:
        """Refuse: an effect that is called directly is neither logged nor served."""
        raise BadInputError(f"step {self.id!r} runs through the flow's context: await ctx.run(step, input)")

    def call(self, fx: object, input: object) -> Any:
        """Call the effect with what its signature asks for."""
        arguments: list[object] = [fx] if self.wants_context else []
        if self.needs_input or (self.wants_input and input is not None):
            arguments.append(input)
        return self.effect(*arguments)


@overload
def flow(function: FlowFunction, /) -> FlowDefinition: ...
@overload
def flow(
    *,
    id: str | None = None,
    version: str = "1",
    input: Any = None,
    gates: Mapping[str, Any] | None = None,
) -> Callable[[FlowFunction], FlowDefinition]: ...
def flow(
    function: FlowFunction | None = None,
    /,
    *,
    id: str | None = None,
    version: str = "1",
    input: Any = None,
    gates: Mapping[str, Any] | None = None,
) -> FlowDefinition | Callable[[FlowFunction], FlowDefinition]:
    """Declare an async function `(ctx, input)` a flow.

    `id` (default: the function's name) and `version` stand in the log; `input` and `gates` are schemas that
    `start` and `resume` check before anything is written.
    """

    def declare(function: FlowFunction) -> FlowDefinition:
        if not inspect.iscoroutinefunction(function):
            raise BadInputError(f"a flow must be an async function (ctx, input), not {function!r}")
        try:
            inspect.signature(function).bind("ctx", "input")
        except TypeError as error:
            raise BadInputError(f"flow {_name(function)!r} must take (ctx, input): {error}") from error
        text_argument("id", id or _name(function))
        text_argument("version", version)
        for schema in (input, *(gates or {}).values()):
            check_schema(schema)
        return FlowDefinition(id or _name(function), version, function, input, dict(gates or {}))

    return declare if function is None else declare(function)


@overload
def step(effect: Effect, /) -> StepDefinition: ...
@overload
def step(
    *,
    id: str | None = None,
    failures: tuple[type[Exception], ...] = (),
    timeout_s: float | None = None,
    retry: RetryPolicy | None = None,
    at_most_once: bool = False,
) -> Callable[[Effect], StepDefinition]: ...
def step(
    effect: Effect | None = None,
    /,
    *,
    id: str | None = None,
    failures: tuple[type[Exception], ...] = (),
    timeout_s: float | None = None,
    retry: RetryPolicy | None = None,
    at_most_once: bool = False,
) -> StepDefinition | Callable[[Effect], StepDefinition]:
    """Declare a function a step; `id` (default: the function's name) is its identity in the log.

    The other parameters are those of `StepDefinition`. Raises `BadInputError` for a function no step can
    call, a timeout that is not positive, or `retry` on a step that is `at_most_once`.
    """

    def declare(effect: Effect) -> StepDefinition:
        return define_step(
            effect, id=id, failures=failures, timeout_s=timeout_s, retry=retry, at_most_once=at_most_once
        )

    return declare if effect is None else declare(effect)


def define_step(
    effect: Effect,
    *,
    id: str | None = None,
    failures: tuple[type[Exception], ...] = (),
    timeout_s: float | None = None,
    retry: RetryPolicy | None = None,
    at_most_once: bool = False,
) -> StepDefinition:
    """Read an effect's signature and make its step; see `step`."""
    name = id or _name(effect)
    if "#" in name:
        raise BadInputError(f"step id {name!r}: '#' is kept for the keys of repeated calls")
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and 0 < timeout_s < float("inf")):
        raise BadInputError(
            f"step {name!r}: timeout_s={shown(timeout_s)} must be a number of seconds above 0"
        )
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise BadInputError(f"step {name!r}: retry={shown(retry)} must be a RetryPolicy(max_attempts=…)")
    if at_most_once and retry is not None:
        raise BadInputError(f"step {name!r}: a step that runs at most once cannot be retried")
    wants_context, wants_input, needs_input = _reads(name, effect)
    for failure in failures:
        if not (isinstance(failure, type) and issubclass(failure, Exception)):
            raise BadInputError(f"step {name!r}: failures must be exception classes, not {failure!r}")
    return StepDefinition(
        name,
        effect,
        tuple(failures),
        timeout_s,
        retry,
        at_most_once,
        wants_context,
        wants_input,
        needs_input,
        is_async=inspect.iscoroutinefunction(effect) or inspect.iscoroutinefunction(type(effect).__call__),
    )


def _reads(name: str, effect: Effect) -> tuple[bool, bool, bool]:
    """Return whether an effect takes its context, whether it takes an input, and whether it must have one."""
    if isinstance(effect, FlowDefinition):
        raise BadInputError(
            f"{effect.id!r} is a flow, not a step: start or submit it as an execution of its own, from a step"
        )
    if not callable(effect):
        raise BadInputError(f"step {name!r} must be a function, not {type(effect).__name__}")
    parameters = list(inspect.signature(effect).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wants_context = bool(positional) and (
        positional[0].name == "fx" or _names_effect_context(positional[0].annotation)
    )
    inputs = positional[wants_context:]
    if any(p not in positional for p in needed) or len(inputs) > 1 or len(parameters) > len(positional):
        raise BadInputError(
            f"step {name!r} must take (), (input), (fx) or (fx, input), where the parameter for its "
            f"EffectContext is called fx or annotated so; it takes {inspect.signature(effect)}"
        )
    return wants_context, bool(inputs), any(p.default is p.empty for p in inputs)


def _names_effect_context(annotation: object) -> bool:
    written = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return written.rpartition(".")[2] == "EffectContext"


def _name(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__name__", type(function).__name__)
    return name
