"""Long folds: the compiled kernel collects and sorts stamps there, and looks ahead for steps."""

from __future__ import annotations

import random
from collections import Counter
from types import ModuleType
from typing import Any

import pytest

from loomfast import MalformedEventError

STARTED = b'{"flowId":"f","flowVersion":"1","input":null}'


def stamped(kernel: ModuleType, first: int, digests: list[int]) -> list[Any]:
    return [kernel.Envelope("e", first + at, "note", b"{}", 0, None, d) for at, d in enumerate(digests)]


def started(kernel: ModuleType) -> Any:
    return kernel.Envelope("e", 0, "EXECUTION_STARTED", STARTED, 0)


@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, 2047, 2048, 2049, 20_000])
def test_any_number_of_stamps_is_counted_on_top_of_a_state_that_stays_as_it_was(
    fold_kernel: ModuleType, count: int
) -> None:
    rnd = random.Random(count)
    before = [rnd.randrange(500) * 0x1001001001001 for _ in range(300)]
    base = fold_kernel.fold_events(None, [started(fold_kernel), *stamped(fold_kernel, 1, before)])
    newer = fold_kernel.fold_events(base, stamped(fold_kernel, 301, [7]))
    digests = [rnd.choice([rnd.getrandbits(64), rnd.choice(before)]) for _ in range(count)]
    whole = fold_kernel.fold_events(base, stamped(fold_kernel, 301, digests))
    assert dict(whole.emits.items()) == Counter(before) + Counter(digests)
    assert dict(base.emits.items()) == Counter(before)
    assert dict(newer.emits.items()) == Counter(before) + Counter([7])


def test_more_stamps_than_are_collected_at_once_are_counted(kernels: dict[str, ModuleType]) -> None:
    kernel = list(kernels.values())[-1]
    digests = [random.Random(at % 400_000).getrandbits(64) if at % 3 else at for at in range(1_060_000)]
    state = kernel.fold_events(None, [started(kernel), *stamped(kernel, 1, digests)])
    assert dict(state.emits.items()) == Counter(digests)


def test_a_large_replay_is_bumped_on_and_let_go_while_older_states_are_held(
    kernels: dict[str, ModuleType],
) -> None:
    kernel = list(kernels.values())[-1]
    digests = [random.Random(at).getrandbits(64) for at in range(550_000)]
    large = kernel.fold_events(None, [started(kernel), *stamped(kernel, 1, digests)])
    more = [digest ^ 1 for digest in digests[:60_000]] + digests[:2_000]
    newer = held = large
    for event in stamped(kernel, 550_001, more):
        newer = kernel.fold_events(newer, (event,))
        if event.sequence == 580_000:
            held = newer
    branch = kernel.fold_events(large, stamped(kernel, 550_001, more))
    counts = Counter(digests)
    assert dict(large.emits.items()) == counts
    assert dict(held.emits.items()) == counts + Counter(more[:30_000])
    del large, held
    assert newer.emits == branch.emits
    del branch
    assert dict(newer.emits.items()) == counts + Counter(more)


def test_an_error_late_in_a_long_fold_names_its_event_and_changes_nothing(fold_kernel: ModuleType) -> None:
    base = fold_kernel.fold_events(None, [started(fold_kernel), *stamped(fold_kernel, 1, [1, 2, 3])])
    before = base.to_json()
    events = stamped(fold_kernel, 4, list(range(3000)))
    events.append(fold_kernel.Envelope("e", 9999, "note", b"{}", 0))
    with pytest.raises(MalformedEventError, match="must be 3004") as caught:
        fold_kernel.fold_events(base, events)
    assert (caught.value.sequence, caught.value.field) == (9999, "sequence")
    assert base.to_json() == before
    assert len(fold_kernel.fold_events(base, events[:-1]).emits) == 3000


def test_a_list_that_shrinks_while_it_is_folded_is_folded_as_far_as_it_goes(fold_kernel: ModuleType) -> None:
    events: list[Any] = [started(fold_kernel), *stamped(fold_kernel, 1, list(range(40)))]

    class Shrinking(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            del events[4:]
            return super().get(name, default)

    events[2] = Shrinking(events[2].to_json())
    assert fold_kernel.fold_events(None, events).sequence == 3
