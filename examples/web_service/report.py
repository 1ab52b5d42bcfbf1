"""The flow: what a report is made of, and what it takes from outside. It knows nothing of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import loomfast as lf


def check(where: str, value: Any, **members: tuple[Callable[[Any], bool], str]) -> None:
    """Raise `InputValidationError` with the path of each member that does not fit."""
    problems = [("$", "must be an object")]
    if isinstance(value, dict):
        problems = [(f"$.{name}", why) for name, (fits, why) in members.items() if not fits(value.get(name))]
    if problems:
        raise lf.InputValidationError(where, problems)


def check_order(order: Any) -> None:
    """Accept `{topic, sections}`."""
    check(
        "order",
        order,
        topic=(
            lambda it: isinstance(it, str) and 0 < len(it) <= 200,
            "must be text, 1 to 200 characters",
        ),
        sections=(lambda it: type(it) is int and 0 < it <= 50, "must be a whole number from 1 to 50"),
    )


def check_approval(answer: Any) -> None:
    """Accept `{approved: true or false}`."""
    check("approval", answer, approved=(lambda it: isinstance(it, bool), "must be true or false"))


async def compose(topic: str, section: int) -> list[str]:
    """Make the words of one section. Call your language model here."""
    await asyncio.sleep(1)
    return [f"{word} " for word in f"{section + 1}. What is there to say about {topic}?".split()]


@lf.step(retry=lf.RetryPolicy(max_attempts=3, on=(OSError,)))
async def write_section(order: dict[str, Any]) -> list[str]:
    return await compose(order["topic"], order["section"])


@lf.flow(input=check_order, gates={"approval": check_approval})
async def report(ctx: lf.WorkflowContext, order: dict[str, Any]) -> dict[str, Any]:
    """Write section by section, and publish what a person has approved."""
    text = ""
    for section in range(order["sections"]):
        for word in await ctx.run(write_section, {"topic": order["topic"], "section": section}):
            await ctx.stream("text", word)
            text += word
    answer = await ctx.suspend("approval")
    return {"published": answer["approved"], "text": text}
