"""What a person sees of the records that a fold is made of: `help()` and `repr()`, alike on all kernels."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest

from .conftest import IMPLEMENTATIONS, load


@pytest.mark.parametrize("name", ["Envelope", "Gate", "State", "Step"])
def test_help_names_every_attribute_and_says_the_same_on_all_kernels(name: str) -> None:
    classes: list[Any] = [getattr(load(implementation, "fold"), name) for implementation in IMPLEMENTATIONS]
    (told,) = {inspect.getdoc(cls) for cls in classes}
    assert told is not None
    for cls in classes:
        attributes = {
            attribute
            for attribute, value in vars(cls).items()
            if not attribute.startswith("_") and inspect.isdatadescriptor(value)
        }
        assert attributes
        assert {attribute for attribute in attributes if f"`{attribute}`" not in told} == set()


def test_a_gate_says_what_it_waits_for_and_whether_it_has_an_answer(fold_kernel: ModuleType) -> None:
    opened = b'{"gate":1,"on":"approve"}'
    assert repr(fold_kernel.Gate(1, "approve", 12, opened, None)) == "<Gate 1 on approve, open at 12>"
    assert repr(fold_kernel.Gate(1, "approve", 13, opened, b"{}")) == "<Gate 1 on approve, answered at 13>"


def test_a_step_says_how_far_it_has_come(fold_kernel: ModuleType) -> None:
    assert repr(fold_kernel.Step("in-doubt", 4, None, b'{"key":"pay"}')) == "<Step in-doubt at 4>"
