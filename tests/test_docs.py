"""The code in the documentation does what the documentation says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OpenStore

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {
    "dispatching.md": 1,
    "embedding.md": 2,
    "flows.md": 5,
    "nodes.md": 2,
    "running.md": 2,
    "schedules.md": 1,
}
SNIPPETS = {
    page: re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for page in PAGES
}


@pytest.mark.parametrize(
    ("page", "number"), [(page, number) for page in PAGES for number in range(PAGES[page])]
)
async def test_each_snippet_of_a_page_runs(open_store: OpenStore, page: str, number: int) -> None:
    names: dict[str, Any] = {}
    exec(compile(SNIPPETS[page][0].split("\n\n\n")[0], page, "exec"), names)  # the imports
    exec(compile(SNIPPETS[page][number], f"{page}, snippet {number}", "exec"), names)
    async with open_store() as store:
        await names["main"](store)


def test_no_snippet_is_left_out() -> None:
    assert {page: len(snippets) for page, snippets in SNIPPETS.items()} == PAGES
    for snippet in (snippet for snippets in SNIPPETS.values() for snippet in snippets):
        assert "async def main(store):" in snippet
        assert "assert" in snippet
