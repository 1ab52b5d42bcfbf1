"""Where a SQLite store may be made."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file name in an empty folder."""
    return tmp_path / "events.db"
