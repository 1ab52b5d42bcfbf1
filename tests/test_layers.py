"""The layering of ARCHITECTURE.md: what each layer may import, and the one door each thing has."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import loomfast

SOURCE = Path(loomfast.__file__).parent

# layer -> the layers it may import besides itself.
BASE = {"_digits", "_errors", "_events", "_jsonform", "_jsontext", "_wire"}
MAY_IMPORT: dict[str, set[str]] = {
    "_errors": set(),
    "_events": set(),
    "_digits": set(),
    "_jsonform": {"_digits", "_errors"},
    "_jsontext": {"_digits", "_errors", "_jsonform"},
    "_wire": {"_errors", "_events"},
    "_pure": BASE,
    "_native": BASE,
    "_kernels": BASE,
    "_vectors": BASE | {"_kernels"},
    "_core": BASE | {"_kernels"},
    "stores": BASE | {"_kernels", "_core"},
    "_runtime": BASE | {"_kernels", "_core", "stores"},
    "_nodes": BASE | {"_kernels", "_core", "stores", "_runtime"},
    "projections": BASE | {"_kernels", "stores"},
    "readmodels": BASE | {"_kernels", "_core", "stores", "_runtime"},
    "verification": BASE | {"_kernels", "_core", "stores"},
    "__main__": {"cli"},
    "bench": BASE | {"_kernels", "_core", "stores", "_runtime", "testing", "_pure", "_native", ""},
    "testing": BASE | {"_kernels", "_core", "stores", "_runtime"},
    "examples": {""},
    "cli": BASE | {"_kernels", "_core", "stores", "_runtime", "_nodes", "bench", "examples", ""},
}
SANS_IO = {"asyncio", "time", "random", "uuid", "sqlite3", "apsw", "socket", "threading", "os", "secrets"}


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Yield the modules a file imports at run time: what stands under TYPE_CHECKING costs nothing."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            skipped.update(inner for branch in node.body for inner in ast.walk(branch))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "loomfast":
                yield from (f"loomfast.{alias.name}" for alias in node.names)
            else:
                yield node.module


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path.name != "__init__.py" or path.parent != SOURCE]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_layer_imports_only_the_layers_below_it(path: Path) -> None:
    layer = layer_of(path)
    for module in imports(path):
        if not module.startswith("loomfast"):
            continue
        target = module.removeprefix("loomfast").removeprefix(".").split(".")[0]
        if target and not (SOURCE / target).exists() and not (SOURCE / f"{target}.py").exists():
            target = ""  # a name that the package's own door gives out
        assert target == layer or target in MAY_IMPORT[layer], f"{layer} must not import {module}"


@pytest.mark.parametrize("path", sorted((SOURCE / "_core").glob("*.py")), ids=lambda path: path.name)
def test_the_core_does_no_io_and_reads_no_clock(path: Path) -> None:
    assert not {module.split(".")[0] for module in imports(path)} & SANS_IO


def test_every_public_name_exists_and_is_listed_once() -> None:
    for name in loomfast.__all__:
        assert getattr(loomfast, name) is not None
    assert len(set(loomfast.__all__)) == len(loomfast.__all__)


def test_what_most_programs_do_not_use_is_imported_on_first_use_and_listed_all_the_same() -> None:
    ask = (
        "import sys, loomfast\n"
        "print('loomfast._nodes.worker' in sys.modules, {*loomfast.__all__} - {*dir(loomfast)})"
    )
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False set()"


def test_everything_the_package_imports_for_users_is_public() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    given = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("loomfast")
        for alias in node.names
    }
    assert given | {"__version__"} == set(loomfast.__all__)
