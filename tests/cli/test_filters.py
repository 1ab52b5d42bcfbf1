"""`loomfast fold`, `loomfast digest`, and what they and `import` say of bad lines."""

from __future__ import annotations

import pytest

import loomfast as lf

from .conftest import lines_of, log_of, write_log


@lf.flow(id="kept", version="1")
async def kept(ctx, value):
    """What `check` is given."""


GOOD = b'{"segment":0,"eventType":"note","payload":{"b":1.0,"a":"\\ud800"}}\n'
DIGEST = lf.format_digest(lf.digest(0, "note", {"b": 1.0, "a": "\ud800"}))


def test_fold_prints_the_state_of_a_log(invoke, tmp_path):
    events = log_of("e", notes=4)
    (tmp_path / "log.jsonl").write_bytes(lines_of(events))
    result = invoke("fold", tmp_path / "log.jsonl")
    assert result.exit_code == 0
    assert lf.State.from_json(lf.decode(result.stdout_bytes)) == lf.fold_events(None, events)


@pytest.mark.parametrize("vector", lf.FOLD_VECTORS, ids=lambda vector: vector["name"])
def test_fold_agrees_with_every_fold_vector(invoke, vector):
    text = b"".join(lf.encode(event) + b"\n" for event in vector["events"])
    assert lf.decode(invoke("fold", "-", input=text).stdout_bytes) == vector["state"]


def test_digest_prints_one_digest_per_line(invoke):
    other = b'{"segment":3,"eventType":"note","payload":null,"more":1}\r\n'
    result = invoke("digest", input=GOOD + b"\n" + other)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [DIGEST, lf.format_digest(lf.digest(3, "note", None))]


def test_a_byte_order_mark_in_front_is_passed_over(invoke):
    assert invoke("digest", "-", input=b"\xef\xbb\xbf" + GOOD).stdout == DIGEST + "\n"


def test_a_last_line_without_newline_counts(invoke):
    assert invoke("digest", input=GOOD.rstrip()).stdout == DIGEST + "\n"


BAD_LINES = {
    b"{": "not JSON at byte 1",
    b"[1]": "must be a JSON object",
    b'"\xff"': "not JSON at byte",
    b'{"segment":0,"eventType":"note"}': "payload: is missing",
    b'{"segment":-1,"eventType":"note","payload":1}': "segment: must be a whole number, 0 or more",
    b'{"segment":1.0,"eventType":"note","payload":1}': "segment: must be a whole number, 0 or more",
    b'{"segment":true,"eventType":"note","payload":1}': "segment: must be a whole number, 0 or more",
    b'{"segment":0,"eventType":7,"payload":1}': "eventType: must be text",
    b"[" * 5_000: "not JSON",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda bad: bad[:50].decode(errors="replace"))
def test_digest_names_file_line_and_reason_of_a_bad_line_and_prints_nothing(spawn, tmp_path, bad):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(GOOD + b"\n" + bad + b"\n" + GOOD)
    ended = spawn("digest", path)
    assert (ended.code, ended.out) == (2, b"")
    assert ended.err.startswith(f"loomfast: {path}:3: ")
    if not bad.startswith(b"[["):
        assert BAD_LINES[bad] in ended.err
    assert ended.err.count("\n") == 1


def test_fold_names_the_line_of_an_event_that_does_not_follow(invoke):
    events = log_of("e", notes=2)
    result = invoke("fold", "-", input=lines_of([events[0], events[2]]))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "loomfast: <stdin>:2: sequence: must be 1\n"


def test_fold_refuses_two_executions_in_one_log(invoke):
    result = invoke("fold", "-", input=lines_of([log_of("a")[0], log_of("b")[1]]))
    assert result.exit_code == 2
    assert result.stderr == "loomfast: <stdin>:2: executionId: the log is 'a''s\n"


def test_fold_names_the_missing_field_of_an_event(invoke):
    result = invoke("fold", "-", input=b'{"executionId":"e","sequence":0}\n')
    assert result.exit_code == 2
    assert result.stderr == "loomfast: <stdin>:1: eventType: is missing\n"


def test_an_error_stays_on_one_printable_line_whatever_it_quotes(invoke):
    result = invoke("fold", "-", input=b'{"executionId":"e\\n\\u001b[31m","sequence":0,"eventType":"x",\n')
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    result = invoke("bench", "no\n\x1b[31m\ud800case")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    "command", [("fold",), ("digest",), ("import", "b.db"), ("check", "--flow", f"{__name__}:kept")]
)
def test_a_database_in_place_of_json_lines_is_named_as_one(invoke, tmp_path, command):
    write_log(tmp_path / "a.db", log_of("e"))
    for given, source, text in (
        (tmp_path / "a.db", tmp_path / "a.db", b""),
        ("-", "<stdin>", (tmp_path / "a.db").read_bytes()),
        ("postgresql://me:secret@host/db", "postgresql://…", b""),
    ):
        result = invoke(*command, given, input=text)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == (
            f"loomfast: {source}: is a database, not JSON lines"
            " (print a log of it first: loomfast export DB EXECUTION_ID)\n"
        )
