"""Looking once a turn at all the journals that have something to write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from loomfast._runtime.flushing import Flushes


class Waiting:
    """Is worth waiting for so many looks."""

    def __init__(self, looks: int, then: Callable[[], object] = lambda: None) -> None:
        self.looks = looks
        self.flushed = False
        self._then = then

    def flush_due(self) -> bool:
        self.looks -= 1
        if self.looks:
            return False
        self._then()
        self.flushed = True
        return True


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_each_is_looked_at_once_a_turn_until_it_is_flushed() -> None:
    flushes = Flushes()
    first, second, late = Waiting(1), Waiting(3), Waiting(2)
    flushes.add(first)
    flushes.add(second)
    assert (first.looks, second.looks) == (1, 3)
    await turns(1)
    assert (first.flushed, second.looks) == (True, 2)
    flushes.add(late)
    await turns(1)
    assert (second.looks, late.looks) == (1, 1)
    await turns(3)
    assert (second.flushed, late.flushed) == (True, True)
    assert (first.looks, second.looks, late.looks) == (0, 0, 0)


async def test_one_that_is_added_by_the_flush_of_another_is_looked_at_in_the_next_turn() -> None:
    flushes = Flushes()
    added = Waiting(1)
    flushes.add(Waiting(1, lambda: flushes.add(added)))
    await turns(1)
    assert not added.flushed
    await turns(1)
    assert added.flushed


def test_what_a_hook_raises_for_the_program_leaves_nobody_behind() -> None:
    def leave() -> None:
        raise KeyboardInterrupt

    async def add() -> None:
        for waiting in (before, leaving, behind):
            flushes.add(waiting)
        await turns(1)

    flushes = Flushes()
    before, leaving, behind = Waiting(2), Waiting(1, leave), Waiting(1)
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(add())
        loop.run_until_complete(turns(2))
    finally:
        loop.close()
    assert (before.flushed, leaving.flushed, behind.flushed) == (True, False, True)


def test_what_waited_on_a_loop_that_is_gone_keeps_nobody_from_being_flushed() -> None:
    async def add(waiting: Waiting) -> None:
        flushes.add(waiting)

    async def add_and_wait(waiting: Waiting) -> None:
        await add(waiting)
        await turns(2)

    flushes = Flushes()
    gone, here = Waiting(1_000), Waiting(1)
    asyncio.run(add(gone))
    asyncio.run(add_and_wait(here))
    assert (gone.flushed, here.flushed) == (False, True)
