"""Any mixture of what the table of JSON forms knows: every kernel gives the same texts, or the same error."""

from __future__ import annotations

from collections import OrderedDict
from decimal import Decimal
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from loomfast._errors import JsonFormError


class Hooked:
    """A value whose hook hands over another one; hashable, so that it can stand in a set."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __json__(self) -> object:
        return self.inner


def hooked_twice(inner: object) -> Hooked:
    return Hooked({"b": inner, "a": inner})


class Text(str):
    pass


NAMES = st.sampled_from(
    ["", "a", "b", "ab", "abcdefghi", "abcdefghj", "\u00e9", "\ue000", "\U0001f600", '"', "\n", "\ud800"]
)
KEYS = st.one_of(
    NAMES, NAMES, NAMES, st.integers(0, 3), st.sampled_from([None, True, 1.5, -0.0, Text("a"), (1,)])
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5),
    st.sampled_from([0.0, -0.0, 1.0, 1.5, 1e21, 1e16, 10**30, 2**64]),
    st.floats(), NAMES, st.sampled_from([b"x", Decimal("1.0"), Text("t"), 1j]),
)  # fmt: skip
HASHABLE = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.frozensets(inner, max_size=4),
        st.tuples(inner, inner),
        inner.map(Hooked),
        inner.map(hooked_twice),
    ),
    max_leaves=8,
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=5),
        st.dictionaries(NAMES, inner, max_size=5),
        st.dictionaries(NAMES, inner, max_size=3).map(OrderedDict),
        inner.map(Hooked),
    ),
    max_leaves=25,
)


def outcome(function: Any, *arguments: object) -> object:
    try:
        return function(*arguments)
    except JsonFormError as error:
        return type(error), str(error), error.path, error.type_name


@settings(max_examples=1500, deadline=None)
@given(VALUES)
def test_every_kernel_gives_the_same_texts_or_the_same_error(digest_kernels, value):
    encoded = [outcome(kernel.encode, value) for kernel in digest_kernels]
    canonical = [outcome(kernel.canonical, value) for kernel in digest_kernels]
    both = [outcome(kernel.encode_digest, 1, "NOTE", value) for kernel in digest_kernels]
    assert encoded.count(encoded[0]) == len(encoded)
    assert canonical.count(canonical[0]) == len(canonical)
    assert both.count(both[0]) == len(both)
    if not isinstance(encoded[0], bytes):
        assert encoded[0] == canonical[0] == both[0]
        return
    kernel = digest_kernels[-1]
    back = kernel.decode(encoded[0])
    assert both[0] == (encoded[0], kernel.fnv1a64(b'1|["NOTE",' + canonical[0] + b"]"))
    assert kernel.encode(back) == encoded[0]
    assert kernel.canonical(back) == canonical[0]
