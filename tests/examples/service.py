"""A real process of the web service and a real client of it.

What lives here: `Service`, which starts, kills and stops the process, and reading server-sent events. The
socket it listens on belongs to the test and is inherited, so that the address outlives every process, and a
request that comes in between waits for the next one: nothing here waits for a server to be up.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from loomfast import decode

PATIENCE_S = 30.0


@dataclass(frozen=True)
class Sent:
    """One server-sent event."""

    id: int
    event: str
    data: Any


def sent(lines: Iterator[str]) -> Iterator[Sent]:
    """Read server-sent events as a browser does: an event that did not arrive whole is none."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
            continue
        if "data" in fields:
            yield Sent(int(fields["id"]), fields["event"], decode(fields["data"].encode()))
        fields = {}


class Service:
    """The service on a database in `folder`. It is killed on the way out, whatever happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._socket = socket.create_server(("127.0.0.1", 0))
        host, port = self._socket.getsockname()
        self.client = httpx.Client(base_url=f"http://{host}:{port}", timeout=PATIENCE_S)
        self.process: subprocess.Popen[bytes] | None = None
        self.permit(0)

    def start(self) -> None:
        """Start a process; the client may talk to it at once."""
        fd = self._socket.fileno()
        program = [sys.executable, "-W", "error", str(Path(__file__).with_name("writer.py"))]
        with open(self.folder / "stderr", "ab") as stderr:
            self.process = subprocess.Popen(
                [*program, self.folder, self.folder / "reports.db", "--fd", str(fd), "--lease-ttl-s", "1.5"],
                pass_fds=(fd,),
                stderr=stderr,
                stdout=stderr,
            )

    def end(self, number: signal.Signals) -> int:
        """Send the process a signal, wait until it has ended, and return how."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def permit(self, sections: int) -> None:
        """Let the writer write so many sections in all."""
        (self.folder / "permits").write_bytes(b"." * sections)

    def ledger(self) -> list[str]:
        """What the writer has begun and done, in all processes."""
        path = self.folder / "ledger"
        return path.read_text().splitlines() if path.exists() else []

    def said(self) -> str:
        """What the processes have said."""
        return (self.folder / "stderr").read_text()

    def order(self, key: str, sections: int, **more: Any) -> httpx.Response:
        """POST /reports."""
        return self.client.post(
            "/reports",
            json={"topic": "looms", "sections": sections, **more},
            headers={"Idempotency-Key": key},
        )

    @contextmanager
    def events(self, report: str, after: int | None = None) -> Iterator[Iterator[Sent]]:
        """Follow a report; leaving drops the connection."""
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        with self.client.stream("GET", f"/reports/{report}/events", headers=headers) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield sent(response.iter_lines())

    def approve(self, report: str, answer: Any, key: str | None = None) -> httpx.Response:
        """POST /reports/{id}/approval."""
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.client.post(f"/reports/{report}/approval", json=answer, headers=headers)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self._socket.close()
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE_S)
        if error is not None:
            error.add_note(self.said())


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that has no event."""
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up, "it does not come to hold"
        time.sleep(0.005)
