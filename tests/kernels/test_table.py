"""`Table`, pure and compiled: every version keeps its values, and no reference is lost or leaked."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomfast._errors import BadInputError
from tests.kernels.conftest import IMPLEMENTATIONS, load

# In the run of the pure wheel there is one kernel, and it stands for both.
pure, native = (load(name, "trie") for name in (IMPLEMENTATIONS[0], IMPLEMENTATIONS[-1]))

SEED = st.integers(0, 2**32)
MODULUS = sys.hash_info.modulus  # ints this far apart have equal hashes


class Value:
    """Something that can be watched going away."""


def test_an_empty_table_holds_nothing(trie_kernel: ModuleType) -> None:
    table = trie_kernel.Table()
    assert (len(table), list(table), list(table.items())) == (0, [], [])
    assert (table.get("a"), table.get("a", 5)) == (None, 5)
    assert "a" not in table
    assert table == trie_kernel.Table()
    assert repr(table) == "<Table of 0 keys>"


def test_setting_a_key_leaves_the_version_it_was_made_from_as_it_was(trie_kernel: ModuleType) -> None:
    none = trie_kernel.Table()
    one = none.set("a", 1)
    two = one.set("a", 2).set(3, b"3")
    assert [t.get("a") for t in (none, one, two)] == [None, 1, 2]
    assert [3 in t for t in (none, one, two)] == [False, False, True]
    assert [len(t) for t in (none, one, two)] == [0, 1, 2]
    assert dict(two.items()) == {"a": 2, 3: b"3"}
    assert set(two) == {"a", 3}


def test_a_value_of_none_is_a_value(trie_kernel: ModuleType) -> None:
    table = trie_kernel.Table().set("a", None)
    assert "a" in table
    assert table.get("a", 5) is None
    assert table != trie_kernel.Table().set("b", None)


def test_a_draft_changes_in_place_and_its_origin_does_not(trie_kernel: ModuleType) -> None:
    base = trie_kernel.Table().set("a", 1)
    draft = base.draft()
    draft.set_in_place("a", 2)
    shared = draft.draft()
    draft.set_in_place("b", 3)
    shared.set_in_place("a", 4)
    assert dict(base.items()) == {"a": 1}
    assert dict(draft.items()) == {"a": 2, "b": 3}
    assert dict(shared.items()) == {"a": 4}


class Text(str):
    __slots__ = ()


class Hostile:
    def __hash__(self) -> int:
        raise RuntimeError("asked for a hash")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")


@pytest.mark.parametrize("key", [True, None, 1.0, b"a", ("a",), Text("a"), Hostile(), []])
def test_a_key_that_is_neither_str_nor_int_is_refused(trie_kernel: ModuleType, key: Any) -> None:
    table = trie_kernel.Table().set("a", 1)
    for method, values in (("get", ()), ("__contains__", ()), ("set", (1,)), ("set_in_place", (1,))):
        with pytest.raises(BadInputError, match="key: must be a str or an int, not "):
            getattr(table, method)(key, *values)
    assert dict(table.items()) == {"a": 1}


def test_keys_of_equal_hash_are_told_apart(trie_kernel: ModuleType) -> None:
    keys: list[Any] = [5 + i * MODULUS for i in range(100)]
    text = "some text"
    if abs(hash(text)) < MODULUS:
        keys += [text, hash(text)]
    versions = [trie_kernel.Table()]
    for key in keys:
        versions.append(versions[-1].set(key, str(key)))
    for i, version in enumerate(versions):
        assert dict(version.items()) == {key: str(key) for key in keys[:i]}
        assert len(version) == i
    branch = versions[50].set(keys[3], "other")
    assert [branch.get(key) for key in keys[:5]] == [str(k) for k in keys[:3]] + ["other", str(keys[4])]


def test_a_key_equal_to_a_held_one_finds_it(trie_kernel: ModuleType) -> None:
    table = trie_kernel.Table().set("".join(["a", "ä"]), 1).set(10**20, 2)
    assert table.get("aä") == 1
    assert table.get(int("1" + "0" * 20)) == 2
    assert table.get("1" + "0" * 20) is None


def test_equality_compares_values_and_passes_on_what_a_value_raises(trie_kernel: ModuleType) -> None:
    hostile = Hostile()
    table = trie_kernel.Table().set("a", hostile)
    assert table == trie_kernel.Table().set("a", hostile)
    with pytest.raises(RuntimeError, match="compared"):
        _ = table == trie_kernel.Table().set("a", Hostile())
    assert trie_kernel.Table().set("a", 1.0) == trie_kernel.Table().set("a", 1)
    assert trie_kernel.Table().set("a", 1) != trie_kernel.Table().set("a", 2)
    assert trie_kernel.Table() != {}


def test_a_table_has_no_hash(trie_kernel: ModuleType) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(trie_kernel.Table())


@settings(max_examples=100, deadline=None)
@given(SEED, st.integers(1, 300), st.sampled_from([1, 3, 40, 700]), st.sampled_from([1, MODULUS]))
def test_any_interleaving_of_versions_agrees_with_a_dict_for_each(
    seed: int, steps: int, spread: int, apart: int
) -> None:
    keys: list[Any] = [i * apart for i in range(spread)] + [f"step#{i}" for i in range(spread)]
    for kernel in (pure, native):
        rnd = random.Random(seed)
        versions: list[tuple[Any, dict[Any, Any]]] = [(kernel.Table(), {})]
        for _ in range(steps):
            action = rnd.random()
            at = -1 if rnd.random() < 0.7 else rnd.randrange(len(versions))
            table, values = versions[at]
            if action < 0.6:
                key, value = rnd.choice(keys), Value()
                versions.append((table.set(key, value), values | {key: value}))
            elif action < 0.75:
                draft, drafted = table.draft(), dict(values)
                for key in rnd.choices(keys, k=rnd.randrange(60)):
                    drafted[key] = Value()
                    draft.set_in_place(key, drafted[key])
                    if rnd.random() < 0.02:
                        versions.append((draft.draft(), dict(drafted)))
                versions.append((draft, drafted))
            elif action < 0.9 and len(versions) > 1:
                del versions[at]
            else:
                assert dict(table.items()) == values
        for table, values in versions:
            assert dict(table.items()) == values
            assert all(table.get(key) is values.get(key) for key in keys)
            assert len(table) == len(values)


def test_dropping_every_version_drops_every_value(trie_kernel: ModuleType) -> None:
    rnd = random.Random(5)
    watched = []
    versions = [trie_kernel.Table()]
    for i in range(5000):
        base = versions[-1] if i % 3 else rnd.choice(versions)
        value = Value()
        watched.append(weakref.ref(value))
        versions.append(base.set(rnd.choice(["a", "b", 5, 5 + MODULUS, f"k{i % 300}"]), value))
    del value, base
    kept = versions[1000]
    values = dict(kept.items())
    versions.clear()
    gc.collect()
    assert dict(kept.items()) == values
    del kept, values
    gc.collect()
    assert sum(ref() is not None for ref in watched) == 0


def test_a_value_that_no_version_sees_any_more_goes_away_with_the_next_write_to_its_key() -> None:
    table = native.Table()
    watched = []
    for i in range(100):
        value = Value()
        watched.append(weakref.ref(value))
        table = table.set("a", value)
        del value
        assert sum(ref() is not None for ref in watched) <= 3, i


def test_keys_and_values_keep_exact_reference_counts(trie_kernel: ModuleType) -> None:
    key, value = "".join(["ke", "y"]), Value()
    before = sys.getrefcount(key), sys.getrefcount(value)
    versions = [trie_kernel.Table().set(key, value)]
    for i in range(50):
        versions.append(versions[i // 2].set(f"other{i}", value).set(key, value))
        assert versions[-1].get(key) is value
        assert (key, value) in list(versions[-1].items())
    draft = versions[3].draft()
    draft.set_in_place(key, value)
    draft.set_in_place(key, None)
    del draft, versions
    gc.collect()
    assert (sys.getrefcount(key), sys.getrefcount(value)) == before


def test_a_value_whose_end_writes_to_the_table_does_no_harm(trie_kernel: ModuleType) -> None:
    made: list[Any] = []

    class Meddler:
        def __init__(self) -> None:
            self.alive = True

        def __del__(self) -> None:
            made.append(newest[0].set(f"grave{len(made)}", len(made)))
            made.append(made[-1].set("a", len(made)))

    newest = [trie_kernel.Table()]
    for i in range(500):
        newest[0] = newest[0].set("a" if i % 2 else f"k{i % 7}", Meddler())
    assert len(made) > 100
    assert made[-1].get("a") == len(made) - 1
    newest[0] = trie_kernel.Table()
    gc.collect()
    assert len(newest[0]) == 0


def test_iteration_is_not_disturbed_by_further_versions(trie_kernel: ModuleType) -> None:
    table = trie_kernel.Table().draft()
    for i in range(300):
        table.set_in_place(f"k{i}", i)
    seen, newest = {}, table
    for key, value in table.items():
        seen[key] = value
        for j in range(20):
            newest = newest.set(f"k{value}.{j}", j).set(key, None)
    assert seen == {f"k{i}": i for i in range(300)}
    assert len(newest) == 6300
