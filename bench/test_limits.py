"""Every case of a plain `loomfast bench`, run quickly: its answers are equal. The command judges."""

from __future__ import annotations

import pytest

from loomfast.bench import cases


@pytest.mark.parametrize("case", cases.choose(()), ids=lambda case: case.name)
def test_the_answers_of_a_case_are_equal(benchmark, case):
    outcome = benchmark.pedantic(cases.run, args=(case,), kwargs={"quick": True}, rounds=1)
    benchmark.extra_info.update(outcome.measured, ratio=outcome.ratio, limit=outcome.limit)
    assert outcome.answers_equal is not False, outcome.reason
