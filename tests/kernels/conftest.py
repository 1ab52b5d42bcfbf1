"""Every kernel test runs on both implementations: ask for `fold_kernel`, and get each in turn.

A missing native kernel fails the test, it does not skip it: a green run must mean that both were tested.
LOOMFAST_TEST_KERNELS=pure leaves native out, for the run that tests the wheel without extensions.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import NamedTuple

import pytest

IMPLEMENTATIONS = os.environ.get("LOOMFAST_TEST_KERNELS", "pure,native").split(",")


class Kernel(NamedTuple):
    """Two kernels of one implementation."""

    admission: ModuleType
    fold: ModuleType


def load(implementation: str, stem: str) -> ModuleType:
    """Import one kernel; a missing one is a failure."""
    name = f"loomfast._{implementation}.{stem}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.fail(f"the kernel {name} is not installed: {error}")


@pytest.fixture(params=IMPLEMENTATIONS)
def digest_kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param, "digest")


@pytest.fixture(scope="session")
def digest_kernels() -> list[ModuleType]:
    """All implementations at once, the specification first, for tests that compare them."""
    return [load(implementation, "digest") for implementation in IMPLEMENTATIONS]


@pytest.fixture(params=IMPLEMENTATIONS)
def trie_kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param, "trie")


@pytest.fixture(params=IMPLEMENTATIONS)
def fold_kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param, "fold")


@pytest.fixture(params=IMPLEMENTATIONS)
def admission_kernel(request: pytest.FixtureRequest) -> Kernel:
    """The admission of one implementation, with the envelopes it judges."""
    return Kernel(load(request.param, "admission"), load(request.param, "fold"))


@pytest.fixture
def kernels() -> dict[str, ModuleType]:
    """The fold kernels by implementation."""
    return {implementation: load(implementation, "fold") for implementation in IMPLEMENTATIONS}


@pytest.fixture
def admissions() -> list[Kernel]:
    """As `admission_kernel`, all implementations at once, the specification first."""
    return [Kernel(load(name, "admission"), load(name, "fold")) for name in IMPLEMENTATIONS]
