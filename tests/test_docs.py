"""The code in the documentation does what the documentation says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OpenStore

PAGE = (Path(__file__).parents[1] / "docs" / "flows.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
async def test_each_snippet_of_the_page_on_flows_runs(open_store: OpenStore, number: int) -> None:
    names: dict[str, Any] = {}
    exec(compile(SNIPPETS[0].split("\n\n\n")[0], "flows.md", "exec"), names)  # the imports
    exec(compile(SNIPPETS[number], f"flows.md, snippet {number}", "exec"), names)
    async with open_store() as store:
        await names["main"](store)


def test_no_snippet_is_left_out() -> None:
    assert len(SNIPPETS) == PAGE.count("```python") == 5
    assert all("async def main(store):" in snippet and "assert" in snippet for snippet in SNIPPETS)
