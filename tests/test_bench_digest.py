"""The benchmark cases of the digest kernel run, compare their answers, and name their variants."""

from __future__ import annotations

import pytest

from loomfast.bench import digest as cases
from loomfast.bench.timing import interleaved


@pytest.mark.parametrize(
    ("case", "variants"),
    [
        (cases.fnv1a64_314, {"loomfast", "limbs", "c_chain", "big_integers"}),
        (cases.digest_300, {"loomfast", "loomfast_both", "orjson_sorted", "c_chain", "pure", "rfc8785"}),
        (cases.encode_300, {"loomfast", "orjson"}),
        (cases.decode_300, {"loomfast", "orjson"}),
    ],
)
def test_each_case_returns_seconds_per_call_of_each_variant(case, variants):
    seconds = case(rounds=2)
    assert set(seconds) == variants
    assert all(0 < value < 0.1 for value in seconds.values())


def test_variants_take_turns():
    order: list[str] = []
    interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, number=1)
    assert order == ["a", "b"] * 3
