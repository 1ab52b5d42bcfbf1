"""`Trie`, pure and compiled: every version keeps its counts, whatever is done with the others."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomfast._errors import BadInputError, BadSnapshotError
from tests.kernels.conftest import IMPLEMENTATIONS, load

# In the run of the pure wheel there is one kernel, and it stands for both.
pure, native = (load(name, "trie") for name in (IMPLEMENTATIONS[0], IMPLEMENTATIONS[-1]))

SEED = st.integers(0, 2**32)
EXAMPLE = [
    (0x00000000000001A7, 2),
    (0xFFFFFFFFFFFFF1A7, 1),
    (0x00000000000001A8, 1),
]


def trie_of(kernel: ModuleType, counts: list[tuple[int, int]]) -> Any:
    trie = kernel.Trie()
    for digest, count in counts:
        for _ in range(count):
            trie = trie.bump(digest)
    return trie


def inverse_mix(word: int) -> int:
    """The digest that the compiled trie mixes to `word` (see `unmix` in `nodes.pxd`)."""
    for _ in range(2):
        word = (word ^ (word >> 32)) * 0xCFEE444D8B59A89B % 2**64
    return word ^ (word >> 32)


# Digests that a trie over some of their bits, or over all bits once mixed, has a hard time to tell apart.
FAMILIES: dict[str, Callable[[int], int]] = {
    "sequential": lambda i: i,
    "equal low bits": lambda i: i << 40 & (2**64 - 1),
    "equal high bits": lambda i: (2**64 - 1) ^ i,
    "only the highest nibble differs": lambda i: (i & 15) << 60 | 0xABC,
    "equal high bits once mixed": lambda i: inverse_mix(i),
    "equal low bits once mixed": lambda i: inverse_mix(i << 40 & (2**64 - 1)),
    "random": lambda i: random.Random(i).getrandbits(64),
}


def test_an_empty_trie_counts_nothing(trie_kernel: ModuleType) -> None:
    trie = trie_kernel.Trie()
    assert (len(trie), list(trie), list(trie.items()), trie.get(7)) == (0, [], [], 0)
    assert trie == trie_kernel.Trie()
    assert trie.to_json() == [None] * 16
    assert repr(trie) == "<Trie of 0 digests>"


def test_a_bump_leaves_the_version_it_was_made_from_as_it_was(trie_kernel: ModuleType) -> None:
    none = trie_kernel.Trie()
    one = none.bump(5)
    two = one.bump(5)
    other = two.bump(6)
    assert [t.get(5) for t in (none, one, two, other)] == [0, 1, 2, 2]
    assert [t.get(6) for t in (none, one, two, other)] == [0, 0, 0, 1]
    assert [len(t) for t in (none, one, two, other)] == [0, 1, 1, 2]
    assert sorted(other.items()) == [(5, 2), (6, 1)]
    assert sorted(other) == [5, 6]


def test_versions_bumped_from_one_version_do_not_see_each_other(trie_kernel: ModuleType) -> None:
    base = trie_of(trie_kernel, [(i, 1) for i in range(200)])
    branches = [base.bump(i) for i in range(400)]
    for i, branch in enumerate(branches):
        assert branch.get(i) == (2 if i < 200 else 1)
        assert len(branch) == (200 if i < 200 else 201)
        assert branch.get((i + 1) % 400) == (1 if (i + 1) % 400 < 200 else 0)
    assert len(base) == 200


def test_a_draft_changes_in_place_and_its_origin_does_not(trie_kernel: ModuleType) -> None:
    base = trie_of(trie_kernel, [(1, 1), (2, 1)])
    draft = base.draft()
    assert draft == base
    for digest in (1, 1, 3):
        draft.bump_in_place(digest)
    assert sorted(draft.items()) == [(1, 3), (2, 1), (3, 1)]
    assert sorted(base.items()) == [(1, 1), (2, 1)]


def test_what_was_made_of_a_draft_does_not_change_with_it(trie_kernel: ModuleType) -> None:
    draft = trie_kernel.Trie().draft()
    draft.bump_in_place(1)
    bumped, copy = draft.bump(2), draft.draft()
    draft.bump_in_place(1)
    copy.bump_in_place(9)
    assert sorted(draft.items()) == [(1, 2)]
    assert sorted(bumped.items()) == [(1, 1), (2, 1)]
    assert sorted(copy.items()) == [(1, 1), (9, 1)]


def test_a_count_that_has_reached_the_maximum_stays_there(trie_kernel: ModuleType) -> None:
    leaf = {"0000000000000000": trie_kernel.MAX_COUNT}
    trie = trie_kernel.Trie.from_json([[[leaf, *[None] * 15], *[None] * 15], *[None] * 15])
    assert trie.bump(0).get(0) == trie_kernel.MAX_COUNT == 2**53 - 1


@pytest.mark.parametrize("digest", [True, False, 1.0, None, "1", b"1", -1, 2**64, 2**20000], ids=type)
@pytest.mark.parametrize("method", ["get", "bump", "bump_in_place"])
def test_what_is_no_digest_is_refused(trie_kernel: ModuleType, method: str, digest: object) -> None:
    trie = trie_kernel.Trie().bump(1)
    with pytest.raises(BadInputError, match="digest"):
        getattr(trie, method)(digest)
    assert list(trie.items()) == [(1, 1)]
    assert trie.bump(1).get(1) == 2


def test_both_kernels_refuse_in_the_same_words() -> None:
    for digest in (True, None, -1, 2**64):
        messages = []
        for kernel in (pure, native):
            with pytest.raises(BadInputError) as caught:
                kernel.Trie().bump(digest)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("count", [2**31 - 2, 2**31 - 1, 2**31, 2**32])
def test_counts_of_any_size_are_counted_on_in_every_version(trie_kernel: ModuleType, count: int) -> None:
    root: list[Any] = trie_kernel.Trie().bump(0).to_json()
    root[0][0][0]["0000000000000000"] = count
    versions = [trie_kernel.Trie.from_json(root)]
    for _ in range(4):
        versions.append(versions[-1].bump(0))
    branch = versions[2].bump(16**3)
    assert [version.get(0) for version in versions] == [count + n for n in range(5)]
    assert dict(branch.items()) == {0: count + 2, 16**3: 1}
    assert dict(branch.bump(0).items()) == {0: count + 3, 16**3: 1}
    draft = versions[0].draft()
    for _ in range(4):
        draft.bump_in_place(0)
    assert (draft.get(0), versions[0].get(0)) == (count + 4, count)
    assert trie_kernel.Trie.from_json(draft.to_json()) == draft


@pytest.mark.parametrize("digest", [0, 1, 2**30, 2**32, 2**60, 2**63, 2**64 - 1])
def test_digests_at_the_edges_of_their_range_are_counted(trie_kernel: ModuleType, digest: int) -> None:
    assert list(trie_kernel.Trie().bump(digest).items()) == [(digest, 1)]


def test_equality_compares_counts_not_histories(trie_kernel: ModuleType) -> None:
    there = trie_of(trie_kernel, [(i, 1 + i % 3) for i in range(100)])
    back = trie_of(trie_kernel, [(i, 1 + i % 3) for i in reversed(range(100))])
    assert there == back
    assert there != back.bump(0)
    assert there.bump(0) != there.bump(1)
    assert there != there.bump(100)
    assert there != "a trie"


def test_a_trie_is_made_without_arguments(trie_kernel: ModuleType) -> None:
    for cls in (trie_kernel.Trie, trie_kernel.Table):
        with pytest.raises(TypeError):
            cls({1: 1})


def test_a_trie_has_no_hash(trie_kernel: ModuleType) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(trie_kernel.Trie())


@pytest.mark.parametrize("family", FAMILIES)
def test_any_distribution_of_digests_is_counted(trie_kernel: ModuleType, family: str) -> None:
    digests = [FAMILIES[family](i) for i in range(3000)]
    expected: dict[int, int] = {}
    trie, kept = trie_kernel.Trie(), []
    for i, digest in enumerate(digests):
        trie = trie.bump(digest)
        expected[digest] = expected.get(digest, 0) + 1
        if i % 500 == 0:
            kept.append((trie, dict(expected)))
    for version, counts in [*kept, (trie, expected)]:
        assert dict(version.items()) == counts
        assert len(version) == len(counts)


# --- the persisted form ---------------------------------------------------------------------------


def test_the_persisted_form_is_the_records(trie_kernel: ModuleType) -> None:
    inner: list[Any] = [None] * 16
    inner[7] = {"00000000000001a7": 2, "fffffffffffff1a7": 1}
    inner[8] = {"00000000000001a8": 1}
    middle: list[Any] = [None] * 16
    middle[10] = inner
    outer: list[Any] = [None] * 16
    outer[1] = middle
    written = trie_of(trie_kernel, EXAMPLE).to_json()
    assert written == outer
    assert list(written[1][10][7]) == ["00000000000001a7", "fffffffffffff1a7"]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_kernel_reads_what_the_other_wrote(family: str) -> None:
    counts = [(FAMILIES[family](i), 1 + i % 2) for i in range(500)]
    written = trie_of(pure, counts).to_json()
    assert trie_of(native, counts).to_json() == written
    assert pure.Trie.from_json(native.Trie.from_json(written).to_json()) == trie_of(pure, counts)
    assert native.Trie.from_json(written) == trie_of(native, counts)


def test_what_was_read_can_be_bumped(trie_kernel: ModuleType) -> None:
    read = trie_kernel.Trie.from_json(trie_of(trie_kernel, EXAMPLE).to_json())
    assert sorted(read.bump(0x1A7).items()) == sorted(trie_of(trie_kernel, EXAMPLE).bump(0x1A7).items())
    assert read == trie_of(trie_kernel, EXAMPLE)


def with_leaf(leaf: object) -> list[Any]:
    inner: list[Any] = [None] * 16
    inner[7] = leaf
    return [None, [*[None] * 10, inner, *[None] * 5], *[None] * 14]


LEAF = "_flowEmits[1][10][7]"
COUNT = "_flowEmits[1][10][7].00000000000001a7"
MALFORMED: dict[str, tuple[object, str, str]] = {
    "not a list": ({}, "_flowEmits", "list of 16"),
    "null": (None, "_flowEmits", "list of 16"),
    "too few slots": ([None] * 15, "_flowEmits", "list of 16"),
    "too many slots": ([None] * 17, "_flowEmits", "list of 16"),
    "a tuple": ((None,) * 16, "_flowEmits", "list of 16"),
    "a level that is an object": ([None, {}, *[None] * 14], "_flowEmits[1]", "list of 16"),
    "a level too short": ([None, [None], *[None] * 14], "_flowEmits[1]", "list of 16"),
    "an empty level": ([None, [None] * 16, *[None] * 14], "_flowEmits[1]", "not null"),
    "a leaf too high": ([{"0000000000000000": 1}, *[None] * 15], "_flowEmits[0]", "list of 16"),
    "a list where a leaf belongs": (with_leaf([None] * 16), LEAF, "non-empty object"),
    "an empty leaf": (with_leaf({}), LEAF, "non-empty object"),
    "an upper-case digit": (with_leaf({"00000000000001A7": 1}), LEAF, "16 lower-case"),
    "a short name": (with_leaf({"1a7": 1}), LEAF, "16 lower-case"),
    "a long name": (with_leaf({"000000000000001a7": 1}), LEAF, "16 lower-case"),
    "a name with a newline": (with_leaf({"00000000000001a7\n": 1}), LEAF, "16 lower-case"),
    "a name in other digits": (with_leaf({"0000000000000١a7": 1}), LEAF, "16 lower-case"),
    "a name that is no text": (with_leaf({0x1A7: 1}), LEAF, "16 lower-case"),
    "another leaf's digest": (with_leaf({"00000000000001a8": 1}), LEAF, "another leaf"),
    "a count of 0": (with_leaf({"00000000000001a7": 0}), COUNT, "whole"),
    "a negative count": (with_leaf({"00000000000001a7": -1}), COUNT, "whole"),
    "a count that is true": (with_leaf({"00000000000001a7": True}), COUNT, "whole"),
    "a count of 1.0": (with_leaf({"00000000000001a7": 1.0}), COUNT, "whole"),
    "no count": (with_leaf({"00000000000001a7": None}), COUNT, "whole"),
    "a huge count": (with_leaf({"00000000000001a7": 2**53}), COUNT, "to 9007"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_persisted_form_that_no_fold_writes_is_refused(trie_kernel: ModuleType, fault: str) -> None:
    value, field, reason = MALFORMED[fault]
    with pytest.raises(BadSnapshotError, match=reason) as caught:
        trie_kernel.Trie.from_json(value)
    assert caught.value.field == field


# --- many versions --------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(SEED, st.integers(1, 400), st.sampled_from(list(FAMILIES)), st.sampled_from([1, 3, 40, 700]))
def test_any_interleaving_of_versions_agrees_with_a_dict_for_each(
    seed: int, steps: int, family: str, spread: int
) -> None:
    digests = [FAMILIES[family](i) for i in range(spread)]
    for kernel in (pure, native):
        rnd = random.Random(seed)
        versions: list[tuple[Any, dict[int, int]]] = [(kernel.Trie(), {})]
        for _ in range(steps):
            action = rnd.random()
            at = -1 if rnd.random() < 0.7 else rnd.randrange(len(versions))
            trie, counts = versions[at]
            if action < 0.6:
                digest = rnd.choice(digests)
                versions.append((trie.bump(digest), counts | {digest: counts.get(digest, 0) + 1}))
            elif action < 0.75:
                draft, drafted = trie.draft(), dict(counts)
                for digest in rnd.choices(digests, k=rnd.randrange(60)):
                    draft.bump_in_place(digest)
                    drafted[digest] = drafted.get(digest, 0) + 1
                    if rnd.random() < 0.02:
                        versions.append((draft.draft(), dict(drafted)))
                versions.append((draft, drafted))
            elif action < 0.9 and len(versions) > 1:
                del versions[at]
            else:
                assert dict(trie.items()) == counts
                assert len(trie) == len(counts)
        for trie, counts in versions:
            assert dict(trie.items()) == counts
            assert all(trie.get(digest) == counts.get(digest, 0) for digest in digests)
            assert len(trie) == len(counts)


def test_iteration_is_not_disturbed_by_further_versions(trie_kernel: ModuleType) -> None:
    trie = trie_of(trie_kernel, [(i * 977, 1) for i in range(300)])
    seen, newest = {}, trie
    for i, (digest, count) in enumerate(trie.items()):
        seen[digest] = count
        for j in range(20):
            newest = newest.bump(i * 31 + j)
    assert seen == {i * 977: 1 for i in range(300)}


def test_every_version_of_a_hot_digest_keeps_its_count(trie_kernel: ModuleType) -> None:
    versions = [trie_kernel.Trie()]
    for _ in range(5000):
        versions.append(versions[-1].bump(42))
    assert [version.get(42) for version in versions] == list(range(5001))


def test_every_version_can_be_bumped_twice(trie_kernel: ModuleType) -> None:
    line = [trie_kernel.Trie()]
    for i in range(1000):
        line.append(line[-1].bump(i % 100))
    branches = [version.bump(7).bump(1000) for version in line]
    for i, branch in enumerate(branches):
        assert branch.get(7) == line[i].get(7) + 1 == (i + 92) // 100 + 1
        assert len(branch) == len(line[i].bump(7)) + 1


# --- memory ---------------------------------------------------------------------------------------


def held_memory(work: Any) -> int:
    """Bytes that are still allocated after `work`, with what it returns held."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] if kept is not None else 0
    finally:
        tracemalloc.stop()


def test_dropping_every_version_frees_everything(trie_kernel: ModuleType) -> None:
    def work() -> bool:
        rnd = random.Random(5)
        versions = [trie_kernel.Trie()]
        for i in range(20_000):
            base = versions[-1] if i % 3 else rnd.choice(versions)
            versions.append(base.bump(rnd.randrange(500)))
        return True

    assert held_memory(work) < 16_384  # what free lists keep


def bump_and_forget(trie: Any, digests: list[int], times: int) -> Any:
    for i in range(times):
        trie = trie.bump(digests[i % len(digests)])
    return trie


def keep_a_window(trie: Any, times: int) -> Any:
    window = [trie] * 50
    for i in range(times):
        window[i % 50] = window[i % 50 - 1].bump(7)
    return window[(times - 1) % 50]


SHAPES: dict[str, Callable[[Any, int], Any]] = {
    "one digest, newest held": lambda trie, times: bump_and_forget(trie, [7], times),
    "many digests, newest held": lambda trie, times: bump_and_forget(trie, list(range(300)), times),
    "one digest, first and newest held": lambda trie, times: (trie, bump_and_forget(trie, [7], times)),
    "one digest, a window held": keep_a_window,
    "one digest, the first and a window held": lambda trie, times: (trie, keep_a_window(trie, times)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_does_not_grow_with_versions_that_were_dropped(shape: str) -> None:
    def after(times: int) -> int:
        digests = list(range(300))
        return held_memory(lambda: SHAPES[shape](bump_and_forget(native.Trie(), digests, 300), times))

    after(10)
    assert after(60_000) < after(6_000) + 150_000


def test_branching_from_branches_keeps_only_what_is_held() -> None:
    def after(times: int) -> int:
        def work() -> Any:
            trie = bump_and_forget(native.Trie(), list(range(1000)), 1000)
            for i in range(times):
                trie.bump(i)
                trie = trie.bump(i % 1000)
            return trie

        return held_memory(work)

    after(10)
    assert after(40_000) < after(4_000) + 150_000


def test_an_old_version_lets_go_of_what_only_dropped_versions_saw() -> None:
    def work() -> Any:
        trie = native.Trie().bump(1)
        bump_and_forget(trie, list(range(100_000)), 100_000)
        return bump_and_forget(trie, [1], 60_000)

    assert held_memory(work) < 200_000
