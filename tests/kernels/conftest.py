"""Runs every kernel test on both implementations. A missing extension is a failure, never a skip."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from loomfast import _kernels

IMPLEMENTATIONS = ("pure", "native")


def load(stem: str, implementation: str) -> ModuleType:
    return _kernels.load(implementation)[stem]


@pytest.fixture(params=IMPLEMENTATIONS)
def trie_kernel(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"loomfast._{request.param}.trie")


@pytest.fixture(params=IMPLEMENTATIONS)
def fold_kernel(request: pytest.FixtureRequest) -> ModuleType:
    return load("fold", request.param)


@pytest.fixture
def kernels() -> dict[str, ModuleType]:
    """The fold kernels by implementation."""
    return {name: load("fold", name) for name in IMPLEMENTATIONS}
