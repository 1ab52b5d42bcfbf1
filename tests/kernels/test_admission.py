"""Judging batches, on both kernels: the same heads and refusals, and heads stand where the log does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from loomfast import DuplicateSequenceError, MalformedEventError, StaleFenceError
from loomfast import _events as ev
from tests.kernels.conftest import Kernel
from tests.kernels.logs import random_log

FIELDS = ("number", "flow_id", "status", "last_sequence", "fence", "pending", "in_doubt", "wake_at")
STARTED = ("EXECUTION_STARTED", b'{"flowId":"f","flowVersion":"1","input":null}')


def seen(head: Any) -> tuple[Any, ...]:
    return tuple((type(getattr(head, name)), getattr(head, name)) for name in FIELDS)


def event(kernel: Kernel, execution_id: str, sequence: int, kind: str = "note", **rest: Any) -> Any:
    event_type, body = STARTED if sequence == 0 else (kind, rest.pop("body", b"null"))
    return kernel.fold.Envelope(execution_id, sequence, event_type, body, 0, **rest)


class Heads:
    """What a store remembers."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.known: dict[str, Any] = {}

    def of(self, execution_id: str) -> Any:
        return self.known.get(execution_id) or self.kernel.admission.Head()

    def admit(self, *events: Any) -> None:
        self.known.update(self.kernel.admission.admit(self.of, events))


@pytest.mark.parametrize("seed", range(20))
def test_heads_stand_where_the_log_does_however_it_is_cut(admissions: list[Kernel], seed: int) -> None:
    walks = []
    for kernel in admissions:
        rng = random.Random(seed)
        log = [kernel.fold.Envelope.from_json(each) for each in random_log(seed)]
        heads = Heads(kernel)
        state = None
        walk = []
        while log:
            size = rng.randint(1, 5)
            batch, log = log[:size], log[size:]
            heads.admit(*batch)
            state = kernel.fold.fold_events(state, batch)
            head = heads.of("e")
            assert (head.status, head.last_sequence) == (state.status, state.sequence)
            assert (head.pending, head.flow_id) == (state.pending is not None and state.ended is None, "f")
            walk.append(seen(head))
        walks.append(walk)
    assert walks.count(walks[0]) == len(walks)


@pytest.mark.parametrize("kind", [*ev.KIND_OF, "note"])
@pytest.mark.parametrize(
    "before", ["", "EXECUTION_SUSPENDED", "EFFECT_INDOUBT", "EXECUTION_COMPLETED", "EXECUTION_CANCELLED"]
)
@pytest.mark.parametrize("subject", [None, "k"])
def test_every_kind_of_event_moves_the_heads_of_both_kernels_alike(
    admissions: list[Kernel], before: str, kind: str, subject: str | None
) -> None:
    after = []
    for kernel in admissions:
        heads = Heads(kernel)
        heads.admit(event(kernel, "e", 0))
        if before:
            heads.admit(event(kernel, "e", 1, before, subject="k", body=b'{"wakeAt":5}'))
        last = heads.of("e").last_sequence
        heads.admit(event(kernel, "e", last + 1, kind, subject=subject, body=b'{"wakeAt":7}'))
        after.append(seen(heads.of("e")))
    assert after.count(after[0]) == len(after)


@pytest.mark.parametrize(
    ("body", "wake_at"),
    [
        (b'{"wakeAt":0}', 0),
        (b'{"wakeAt":99999999999999999999}', 2**63 - 1),
        (b'{"wakeAt":-1}', None),
        (b'{"wakeAt":1.5}', None),
        (b'{"wakeAt":true}', None),
        (b"[]", None),
    ],
)
def test_a_gate_wakes_at_a_time_that_a_column_can_hold(
    admission_kernel: Kernel, body: bytes, wake_at: int | None
) -> None:
    heads = Heads(admission_kernel)
    heads.admit(
        event(admission_kernel, "e", 0), event(admission_kernel, "e", 1, "EXECUTION_SUSPENDED", body=body)
    )
    assert (heads.of("e").pending, heads.of("e").wake_at) == (True, wake_at)


def test_a_batch_of_several_executions_moves_the_head_of_each(admission_kernel: Kernel) -> None:
    heads = Heads(admission_kernel)
    order = [("a", 0), ("b", 0), ("a", 1), ("c", 0), ("b", 1), ("b", 2)]
    heads.admit(*(event(admission_kernel, name, sequence) for name, sequence in order))
    assert {name: heads.of(name).last_sequence for name in "abcd"} == {"a": 1, "b": 2, "c": 0, "d": -1}


@pytest.mark.parametrize(
    ("batch", "refusal", "told"),
    [
        ([("a", 2), ("a", 2)], DuplicateSequenceError, ("a", 2)),
        ([("a", 1)], DuplicateSequenceError, ("a", 1)),
        ([("b", 0), ("a", 3)], MalformedEventError, ("a", 3)),
        ([("a", 2), ("b", 1)], MalformedEventError, ("b", 1)),
    ],
)
def test_a_refused_batch_changes_no_head(
    admission_kernel: Kernel, batch: list[tuple[str, int]], refusal: type[Exception], told: tuple[str, int]
) -> None:
    heads = Heads(admission_kernel)
    heads.admit(event(admission_kernel, "a", 0), event(admission_kernel, "a", 1))
    before = seen(heads.of("a"))
    with pytest.raises(refusal) as caught:
        heads.admit(*(event(admission_kernel, name, sequence) for name, sequence in batch))
    error: Any = caught.value
    assert (error.execution_id, error.sequence) == told
    assert (seen(heads.of("a")), list(heads.known)) == (before, ["a"])


def test_fences_are_judged_first_and_on_every_event(admission_kernel: Kernel) -> None:
    heads = Heads(admission_kernel)
    heads.admit(event(admission_kernel, "a", 0))
    heads.known["a"].fence = 5
    gap = event(admission_kernel, "a", 9, fence=6)
    for fence in (None, 4):
        with pytest.raises(StaleFenceError) as caught:
            heads.admit(gap, event(admission_kernel, "a", 1, fence=fence))
        assert caught.value.execution_id == "a"
    heads.admit(event(admission_kernel, "a", 1, fence=5), event(admission_kernel, "a", 2, fence=6))
    assert (heads.of("a").last_sequence, heads.of("a").fence) == (2, 5)


def test_a_copy_stands_for_itself(admission_kernel: Kernel) -> None:
    head = admission_kernel.admission.Head(7, "f", ev.SUSPENDED, 3, 5, True, frozenset({"k"}), 9)
    copy = head.copy()
    assert seen(copy) == seen(head)
    copy.advance(event(admission_kernel, "e", 4, "EXECUTION_RESUMED"))
    assert (copy.last_sequence, copy.pending, copy.wake_at) == (4, False, None)
    assert (head.last_sequence, head.pending, head.wake_at) == (3, True, 9)


@pytest.mark.parametrize("stranger", [None, "event", 5])
def test_what_is_no_envelope_is_refused(admission_kernel: Kernel, stranger: object) -> None:
    heads = Heads(admission_kernel)
    with pytest.raises(TypeError, match="must be envelopes of this kernel"):
        heads.admit(event(admission_kernel, "a", 0), stranger)
    assert heads.known == {}
