"""`loomfast export` and `loomfast import`."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys

import pytest

import loomfast as lf

from .conftest import lines_of, log_of, read_log, write_log


def test_an_exported_log_is_imported_event_for_event(tmp_path, invoke):
    events = log_of("é/\ud800", notes=3)
    (tmp_path / "log.jsonl").write_bytes(lines_of(events))
    assert invoke("import", tmp_path / "a.db", tmp_path / "log.jsonl").exit_code == 0
    exported = invoke("export", tmp_path / "a.db", "é/\ud800")
    assert exported.exit_code == 0
    assert exported.stdout_bytes == lines_of(events)
    assert invoke("import", tmp_path / "b.db", "-", input=exported.stdout_bytes).exit_code == 0
    assert read_log(tmp_path / "b.db", "é/\ud800") == events


def test_export_pages_through_a_log_longer_than_one_page(tmp_path, invoke, monkeypatch):
    monkeypatch.setattr("loomfast.cli.logs.PAGE_EVENTS", 4)
    events = log_of("e", notes=11)
    write_log(tmp_path / "a.db", events)
    assert invoke("export", tmp_path / "a.db", "e").stdout_bytes == lines_of(events)


def test_exported_lines_are_utf_8_with_lone_surrogates_escaped_whatever_the_locale(tmp_path):
    write_log(tmp_path / "a.db", log_of("e"))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "loomfast", "export", str(tmp_path / "a.db"), "e"]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "😀".encode() in done.stdout
    assert rb"\ud800" in done.stdout


def test_an_unknown_execution_is_a_one_line_error_with_a_hint(tmp_path, spawn):
    write_log(tmp_path / "a.db", log_of("e"))
    ended = spawn("export", tmp_path / "a.db", "nope")
    assert (ended.code, ended.out) == (2, b"")
    assert ended.err == f"loomfast: no execution 'nope' ({lf.UnknownExecutionError.hint})\n"


def test_reading_a_database_that_is_not_there_makes_none(tmp_path, spawn):
    ended = spawn("export", tmp_path / "none.db", "e")
    assert (ended.code, ended.out) == (2, b"")
    assert (
        ended.err
        == f"loomfast: {tmp_path / 'none.db'}: no loomfast store is there ({lf.StoreMissingError.hint})\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a database, and longer than a header " * 50])
def test_reading_what_is_no_database_changes_nothing(tmp_path, invoke, content):
    path = tmp_path / "file.db"
    path.write_bytes(content)
    result = invoke("export", path, "e")
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_database_of_another_application_is_left_alone(tmp_path, invoke, command):
    path = tmp_path / "shop.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE customers (id)")
    connection.close()
    before = path.read_bytes()
    argument = "e" if command == "export" else "-"
    result = invoke(command, path, argument, input=lines_of(log_of("e")))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is not a loomfast database" in result.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize("args", [("export", "e"), ("import", "-")])
def test_a_path_that_sqlite_cannot_take_is_a_one_line_error(tmp_path, spawn, args):
    name = os.path.join(os.fsencode(tmp_path), b"caf\xe9.db")
    for there in (False, True):
        if there:
            with open(name, "wb") as file:
                file.write(b"x")
        command, argument = args
        ended = spawn(command, os.fsdecode(name), argument, input=lines_of(log_of("e")))
        assert (ended.code, ended.out) == (2, b"")
        assert "caf\\udce9.db: SQLite takes names in UTF-8 only" in ended.err
        assert ended.err.count("\n") == 1


def test_a_database_in_a_folder_that_is_not_there_cannot_be_made(tmp_path, spawn):
    for command in (["import", tmp_path / "no" / "a.db", "-"], ["demo", "--db", tmp_path / "no" / "a.db"]):
        ended = spawn(*command, input=lines_of(log_of("e")))
        assert (ended.code, ended.out) == (2, b"")
        assert ended.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_event_stops_the_export_with_nothing_printed(tmp_path, invoke):
    write_log(tmp_path / "a.db", log_of("e", notes=5))
    connection = sqlite3.connect(tmp_path / "a.db")
    with connection:
        connection.execute("UPDATE events SET body = X'7B7D' WHERE id & 4294967295 = 4")
    connection.close()
    result = invoke("export", tmp_path / "a.db", "e")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'e'" in result.stderr
    assert lf.StoreReadError.hint in result.stderr


def test_a_folder_is_no_database(tmp_path, invoke):
    for command in (["export", tmp_path, "e"], ["import", tmp_path, "-"]):
        result = invoke(*command, input=lines_of(log_of("e")))
        assert result.exit_code == 2
        assert "is a folder" in result.stderr


def test_one_bad_line_keeps_everything_from_being_written(tmp_path, invoke):
    good, bad = log_of("good"), log_of("bad")
    text = lines_of(good) + lines_of(bad).replace(b'"flowEmit"', b'"flowEmit":1,"x"')
    result = invoke("import", tmp_path / "a.db", "-", input=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("loomfast: <stdin>:5: metadata.flowEmit: must be 16")
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_does_not_fold_is_refused_at_its_line(tmp_path, invoke):
    events = log_of("e", notes=3)
    result = invoke("import", tmp_path / "a.db", "-", input=lines_of(events[:2] + events[3:]))
    assert result.exit_code == 2
    assert result.stderr == "loomfast: <stdin>:3: sequence: must be 2\n"
    assert list(tmp_path.iterdir()) == []


def test_a_log_the_store_has_already_is_refused_whole(tmp_path, invoke):
    write_log(tmp_path / "a.db", log_of("e"))
    text = lines_of(log_of("new")) + lines_of(log_of("e"))
    result = invoke("import", tmp_path / "a.db", "-", input=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "loomfast: <stdin>:4: execution 'e' has sequence 0 already\n"
    assert read_log(tmp_path / "a.db", "new") == []


def test_a_log_may_go_on_where_the_store_ends(tmp_path, invoke):
    events = log_of("e", notes=4)
    write_log(tmp_path / "a.db", events[:3])
    assert invoke("import", tmp_path / "a.db", "-", input=lines_of(events[3:])).exit_code == 0
    assert read_log(tmp_path / "a.db", "e") == events


def test_several_logs_in_one_file_are_told_apart_even_interleaved(tmp_path, invoke):
    one, two = log_of("one"), log_of("two")
    text = lines_of([event for pair in zip(one, two, strict=True) for event in pair])
    result = invoke("import", tmp_path / "a.db", "-", input=text)
    assert result.stdout.splitlines() == [
        "imported 3 events of execution 'one'",
        "imported 3 events of execution 'two'",
    ]
    assert read_log(tmp_path / "a.db", "two") == two


def test_an_import_that_is_killed_has_written_its_log_whole_or_not_at_all(tmp_path):
    events = log_of("e", notes=8_000)
    (tmp_path / "log.jsonl").write_bytes(lines_of(events))
    path = tmp_path / "a.db"
    command = [sys.executable, "-m", "loomfast", "import", str(path), str(tmp_path / "log.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not path.exists() and process.poll() is None:
            pass
        process.kill()
    assert read_log(path, "e") in ([], events)
    assert subprocess.run(command, capture_output=True, timeout=60).returncode in (0, 2)
    assert read_log(path, "e") == events


@pytest.mark.parametrize("text", [b"", b"\n \r\n"])
def test_a_file_without_events_is_no_log(tmp_path, invoke, text):
    for command in (["import", tmp_path / "a.db", "-"], ["fold", "-"]):
        result = invoke(*command, input=text)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == "loomfast: -: holds no event\n"


def test_a_missing_input_file_is_a_one_line_error(tmp_path, spawn):
    for command in (["import", tmp_path / "a.db"], ["fold"], ["digest"]):
        ended = spawn(*command, tmp_path / "none.jsonl")
        assert (ended.code, ended.out) == (2, b"")
        assert ended.err == f"loomfast: {tmp_path / 'none.jsonl'}: No such file or directory\n"


def test_a_reader_that_goes_away_is_no_error_to_speak_of(tmp_path):
    write_log(tmp_path / "a.db", log_of("e", notes=5_000))
    command = [sys.executable, "-m", "loomfast", "export", str(tmp_path / "a.db"), "e"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'{"id":"e-0"')
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("args", [("info",), ("bench", "--list"), ("--help",), ("fold", "-")])
def test_no_command_complains_when_its_reader_is_gone_from_the_start(args):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "loomfast", *args]
    done = subprocess.run(
        command, input=lines_of(log_of("e")), stdout=writing, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writing)
    assert done.stderr == b""


def test_a_full_disk_under_the_output_is_reported(tmp_path):
    write_log(tmp_path / "a.db", log_of("e"))
    command = [sys.executable, "-m", "loomfast", "export", str(tmp_path / "a.db"), "e"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 2
    assert done.stderr == b"loomfast: input/output: No space left on device\n"


def test_a_store_on_postgresql_is_read_and_written_by_its_url(postgres_server, tmp_path, invoke, spawn):
    url = postgres_server.dsn
    events = log_of("cli/\ud800", notes=3)
    (tmp_path / "start.jsonl").write_bytes(lines_of(events[:2]))
    (tmp_path / "rest.jsonl").write_bytes(lines_of(events[2:]))
    for part in ("start", "rest"):  # a log may go on where the store's ends
        assert invoke("import", url, tmp_path / f"{part}.jsonl").exit_code == 0
    assert invoke("export", url, "cli/\ud800").stdout_bytes == lines_of(events)
    ended = spawn("export", "postgresql://me:secret@127.0.0.1:1/db", "e")
    assert ended.code == 2
    assert ended.err.startswith("loomfast: postgresql://127.0.0.1:1/db schema 'loomfast': cannot be opened")
