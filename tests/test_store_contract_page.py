"""The page on the store contract says what the kit checks, and its example runs without anything of ours."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from loomfast.testing import conformance

PAGE = (Path(__file__).parents[1] / "docs" / "store-contract.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", PAGE, flags=re.MULTILINE)


def test_every_guarantee_is_on_the_page() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 27))


@pytest.mark.parametrize(("number", "suites"), ROWS, ids=[number for number, _ in ROWS])
def test_the_suites_that_the_page_names_check_the_guarantee(number: str, suites: str) -> None:
    named = re.findall(r"`(\w+)`", suites)
    assert named
    for name in named:
        assert int(number) in conformance.guarantees_checked(getattr(conformance, name))


def test_the_page_lists_what_a_store_can_be_without() -> None:
    table = PAGE[PAGE.index("| `without` |") :]
    listed = re.findall(r"`([a-z-]+)`(?=[^|]*\| )", table[: table.index("\n\n")])
    assert sorted(set(listed) - {"without"}) == sorted(get_args(conformance.Need))


def test_the_example_of_the_page_passes_in_a_folder_of_its_own(tmp_path: Path) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "test_my_store.py").write_text(example, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    command += ["-p", "no:cacheprovider", "-k", "restart or batch or openings", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert run.returncode == 0, run.stdout
    assert re.search(r"^\d\d passed, \d+ deselected", run.stdout, flags=re.MULTILINE), run.stdout
    assert "skipped" not in run.stdout
