"""What the suites of the kit are made of: the store under test, and tests that name guarantees.

What lives here: `Conformance`, the class that a store's author fills in, and `guarantee`, which makes a
coroutine function a test. What must not: any test.

Theory of operation. A suite is a class whose methods are tests, and pytest collects it under the name of the
author's subclass. Each test runs on an event loop of its own, inside the method, so no plugin for async tests
is needed and none gets in the way. It opens the store itself, at a place that is empty at first; to open it
once more is a restart. What a store does not have is declared in `without`, and the tests that need it are
then not part of the subclass: nothing is skipped, and a feature that is not declared missing is tested.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

import pytest

from loomfast._core.snapshots import Snapshot
from loomfast._errors import BadInputError
from loomfast.stores import EventStore

Need: TypeAlias = Literal["restart", "sharing", "isolation", "damaged-snapshots", "damaged-events"]
Test = TypeVar("Test", bound=Callable[..., Coroutine[Any, Any, None]])

# Before the suites are imported: a failed assertion of the kit then says what it compared.
pytest.register_assert_rewrite(f"{__package__}.suites")

# No test waits for anything that takes this long: it hangs.
TEST_LIMIT_S = 120
# For leases that are to outlast their test.
LONG_S = 3600.0


def guarantee(*numbers: int, needs: Need | None = None) -> Callable[[Test], Callable[..., None]]:
    """Make a coroutine function a test of the guarantees with these numbers.

    `needs` names what the store must have for the test to apply.
    """

    def claimed(test: Test) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*arguments: Any, **named: Any) -> None:
            asyncio.run(_bounded(test(*arguments, **named)))

        run.__dict__.update(guarantees=numbers, needs=needs)
        return run

    return claimed


async def _bounded(test: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(TEST_LIMIT_S):
        await test


class Conformance:
    """The store under test. Subclass a suite, and say here how its store is opened.

    `place` is an empty folder, a new one for each test. `without` names what the store does not have:

    - `restart`: what was written is gone once the store is closed;
    - `sharing`: a place can be opened only once at a time;
    - `isolation`: a refused append also rejects those that were written together with it;
    - `damaged-snapshots`, `damaged-events`: there is no way to damage them (see the methods of these names).

    `sizes` are the numbers of events that one batch is tried with; `lease_s` is how long, in seconds, a lease
    is taken in tests that wait for its end.
    """

    without: ClassVar[Collection[Need]] = ()
    sizes: ClassVar[Sequence[int]] = (1, 2, 999, 1_000, 5_000, 40_000)
    lease_s: ClassVar[float] = 1.0
    place: Path

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        unknown = set(cls.without) - set(get_args(Need))
        if unknown:
            raise BadInputError(f"without={sorted(unknown)}: choose from {', '.join(get_args(Need))}")
        for name in dir(cls):
            if getattr(getattr(cls, name), "needs", None) in cls.without:
                setattr(cls, name, None)

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.place = tmp_path

    def open_store(self) -> AbstractAsyncContextManager[EventStore]:
        """Open the store of this test: what an earlier opening in the same test wrote is in it.

        Unless the store is `without` sharing, a test may open it twice at the same time. Closing it a second
        time must do no harm.
        """
        raise NotImplementedError("override open_store: return an async context manager of an EventStore")

    def named(self, execution_id: str) -> str:
        """Return the id by which errors name an execution: the store's own, where a decorator scopes ids."""
        return execution_id

    async def wait(self, seconds: float) -> None:
        """Let the store's clock go on. Override it for a store whose clock is injected."""
        await asyncio.sleep(seconds)

    async def damage_snapshot(self, store: EventStore, damaged: Snapshot) -> None:
        """Put a snapshot in the place of the one that is kept at its sequence, behind the store's back."""
        raise NotImplementedError("override damage_snapshot, or list 'damaged-snapshots' in without")

    async def damage_event(self, store: EventStore, execution_id: str, sequence: int) -> None:
        """Change a stored event behind the store's back, so that it is not as it was written."""
        raise NotImplementedError("override damage_event, or list 'damaged-events' in without")


def guarantees_checked(suite: type[Conformance]) -> dict[int, list[str]]:
    """Return, for each number of a guarantee, the names of the tests of a suite that check it."""
    checked: dict[int, list[str]] = {}
    for name in sorted(dir(suite)):
        for number in getattr(getattr(suite, name), "guarantees", ()):
            checked.setdefault(number, []).append(name)
    return checked
