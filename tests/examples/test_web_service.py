"""The web service end to end: real processes, a real client, and a SQLite file between them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.examples.service import Sent, Service, until
from tests.examples.writer import words


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path) as service:
        yield service


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One process for all tests that leave it running; every report of theirs has a key of its own."""
    with Service(tmp_path_factory.mktemp("service")) as service:
        service.permit(100)
        yield service


def texts(events: list[Sent]) -> list[str]:
    return [event.data for event in events if event.event == "text"]


def whole(sections: int) -> list[str]:
    return [word for section in range(sections) for word in words(section)]


def read_until(stream: Iterator[Sent], kind: str) -> list[Sent]:
    """What a stream sends, up to an event of this kind."""
    events: list[Sent] = []
    for event in stream:
        events.append(event)
        if event.event == kind:
            return events
    raise AssertionError(f"the stream ended without {kind!r}: {events}")


def test_a_key_starts_one_report_and_the_stream_is_read_to_its_end(service: Service) -> None:
    service.permit(100)
    first, again = service.order("k", 3), service.order("k", 3)
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["id"] == again.json()["id"]
    assert first.headers["location"] == again.headers["location"]
    report = first.json()["id"]
    with service.events(report) as stream:
        events = read_until(stream, "waiting")
        assert service.client.get(f"/reports/{report}").json() == {
            "id": report,
            "status": "suspended",
            "waiting_for": "approval",
            "result": None,
            "error": None,
        }
        assert service.approve(report, {"approved": True}, "yes").status_code == 202
        events += stream  # to the end of the response
    assert texts(events) == whole(3)
    assert [event.event for event in events[-2:]] == ["waiting", "end"]
    assert events[-1].data == "completed"
    ids = [event.id for event in events]
    assert ids == sorted(set(ids))
    shown = service.client.get(f"/reports/{report}").json()
    assert (shown["status"], shown["result"]) == (
        "completed",
        {"published": True, "text": "".join(whole(3))},
    )
    assert service.ledger() == [f"{what} {n}" for n in range(3) for what in ("begun", "done")]


def test_who_loses_the_connection_behind_every_single_event_misses_nothing_and_gets_nothing_twice(
    shared: Service,
) -> None:
    report = shared.order("lossy", 4).json()["id"]
    events: list[Sent] = []
    while not events or events[-1].event != "waiting":
        with shared.events(report, events[-1].id if events else None) as stream:
            events.append(next(stream))
    assert texts(events) == whole(4)
    shared.approve(report, {"approved": False})
    with shared.events(report, events[-1].id) as stream:
        (end,) = stream
    assert (end.event, end.data) == ("end", "completed")
    gone = shared.client.get(f"/reports/{report}/events", headers={"Last-Event-ID": str(end.id)})
    assert gone.status_code == 204  # a browser stops asking


def test_killed_in_the_middle_of_a_stream_it_goes_on_after_a_restart(service: Service) -> None:
    service.permit(3)
    report = service.order("k", 6).json()["id"]
    events: list[Sent] = []
    with (  # noqa: PT012  # the connection breaks in the middle of what a client does
        pytest.raises(httpx.TransportError),
        service.events(report) as stream,
    ):
        while len(events) < len(whole(3)):
            events.append(next(stream))
        until(lambda: "begun 3" in service.ledger())
        assert service.end(signal.SIGKILL) == -signal.SIGKILL
        events += stream
    assert texts(events) == whole(3)
    service.start()
    service.permit(6)
    with service.events(report, events[-1].id) as stream:
        events += read_until(stream, "waiting")
    assert texts(events) == whole(6)
    assert len({event.id for event in events}) == len(events)
    with service.events(report) as stream:  # and whoever reads it afresh reads the same
        assert read_until(stream, "waiting") == events
    assert service.ledger().count("begun 3") >= 2  # what was under way
    for section in range(3):  # and nothing that had completed
        assert service.ledger().count(f"begun {section}") == 1
    for section in range(6):
        assert service.ledger().count(f"done {section}") == 1


def test_told_to_stop_it_ends_its_streams_and_they_go_on_after_a_restart(service: Service) -> None:
    service.permit(1)
    report = service.order("k", 1).json()["id"]
    with service.events(report) as stream:
        events = read_until(stream, "waiting")
        assert service.end(signal.SIGTERM) == -signal.SIGTERM
        assert list(stream) == []  # the response is whole
    assert "Application shutdown complete" in service.said()
    assert "ERROR" not in service.said()
    service.start()
    assert service.approve(report, {"approved": True}).status_code == 202
    with service.events(report, events[-1].id) as stream:
        assert [event.event for event in stream] == ["end"]


def test_of_two_processes_on_a_store_one_serves_and_then_takes_over_what_the_other_drove(
    tmp_path: Path,
) -> None:
    with Service(tmp_path) as one, Service(tmp_path) as other:
        one.permit(2)
        report = one.order("k", 4).json()["id"]
        assert other.order("k", 4).status_code == 200
        with other.events(report) as stream:
            events = [next(stream) for _ in whole(2)]
            one.end(signal.SIGKILL)
            other.permit(4)
            events += read_until(stream, "waiting")
            assert other.approve(report, {"approved": True}).status_code == 202
            events += stream
    assert texts(events) == whole(4)
    assert events[-1].data == "completed"


def test_an_answer_counts_once_and_a_repeat_of_it_by_its_key_is_no_second_one(shared: Service) -> None:
    report = shared.order("answered", 1).json()["id"]
    with shared.events(report) as stream:
        read_until(stream, "waiting")
        assert shared.approve(report, {"approved": True}, "click").status_code == 202
        read_until(stream, "end")
    assert shared.approve(report, {"approved": True}, "click").status_code == 202
    reused = shared.approve(report, {"approved": False}, "click")
    assert (reused.status_code, reused.json()["code"]) == (422, "resume-id-reused")
    late = shared.approve(report, {"approved": False}, "another click")
    assert (late.status_code, late.json()["code"]) == (409, "gate-refused")
    assert shared.client.get(f"/reports/{report}").json()["result"]["published"] is True


def test_an_answer_that_comes_before_its_gate_is_refused(service: Service) -> None:
    report = service.order("k", 1).json()["id"]
    early = service.approve(report, {"approved": True})
    assert (early.status_code, early.json()["code"]) == (409, "gate-refused")


@pytest.mark.parametrize("wrong", [{}, {"approved": "yes"}, {"approved": 1}])
def test_a_bad_answer_is_refused_with_its_path_and_the_gate_stays_open(shared: Service, wrong: Any) -> None:
    report = shared.order("badly answered", 1).json()["id"]
    with shared.events(report) as stream:
        read_until(stream, "waiting")
    refused = shared.approve(report, wrong)
    assert refused.status_code == 422
    assert refused.json()["problems"] == [{"path": "$.approved", "reason": "must be true or false"}]
    assert shared.client.get(f"/reports/{report}").json()["waiting_for"] == "approval"


def test_a_key_that_is_used_for_another_order_is_refused(shared: Service) -> None:
    assert shared.order("taken", 1).status_code == 202
    reused = shared.order("taken", 2)
    assert (reused.status_code, reused.json()["code"]) == (422, "idempotency-key-reused")
    assert shared.order("taken", 1).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b'{"topic": "", "sections": 1}', 422, "$.topic"),
        (b'{"topic": "t", "sections": 0}', 422, "$.sections"),
        (b'{"topic": "t", "sections": true}', 422, "$.sections"),
        (b'{"topic": "t"}', 422, "$.sections"),
        (b"[]", 422, "must be an object"),
        (b"", 400, "bad-json"),
        (b'{"topic": ', 400, "bad-json"),
        (b"\xff", 400, "bad-json"),
        (b"[" * 100_000, 413, "at most 65536 bytes"),
        (b"[" * 60_000, 422, "too-deep"),
    ],
)
def test_an_order_that_is_none_is_refused_and_starts_nothing(
    shared: Service, body: bytes, status: int, told: str
) -> None:
    refused = shared.client.post("/reports", content=body, headers={"Idempotency-Key": "bad"})
    assert refused.status_code == status
    assert told in refused.text
    assert shared.client.post("/reports", content=body).status_code == 400  # a key is needed


def test_what_is_not_there_is_not_found(shared: Service) -> None:
    for path in ("/reports/nope", "/reports/nope/events"):
        missing = shared.client.get(path)
        assert (missing.status_code, missing.json()["code"]) == (404, "unknown-execution")
    assert shared.approve("nope", {"approved": True}).status_code == 404
    assert shared.client.get("/reports").status_code == 405


@pytest.mark.parametrize("wrong", ["x", "-1", "1.5", "99999", "9" * 18, "9" * 5000])
def test_a_last_event_id_that_is_none_of_the_stream_is_refused(shared: Service, wrong: str) -> None:
    report = shared.order("positions", 1).json()["id"]
    refused = shared.client.get(f"/reports/{report}/events", headers={"Last-Event-ID": wrong})
    assert refused.status_code == 400
