"""The README: its flow runs as it stands there, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").glob("*.md"),
]


def test_the_flow_of_the_readme_runs_as_it_stands_there(tmp_path: Path) -> None:
    (program,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    command = [sys.executable, "-W", "error", "-c", program]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (first.returncode, first.stdout) == (0, "{'receipt': 'R-7', 'approved': True}\n"), first.stderr
    repeated = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert repeated.returncode == 1
    assert "ExecutionAlreadyExistsError" in repeated.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
