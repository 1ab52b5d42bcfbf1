"""The command line of the service."""

from __future__ import annotations

import argparse
import socket

import uvicorn
from starlette.applications import Starlette

from .app import create_app, end_streams

SHUTDOWN_S = 5  # how long open requests may go on once the service is told to stop


class Server(uvicorn.Server):
    """Ends the open streams before it waits for open requests. Who reads them connects again."""

    def __init__(self, app: Starlette, *, port: int, fd: int | None) -> None:
        super().__init__(uvicorn.Config(app, port=port, fd=fd, timeout_graceful_shutdown=SHUTDOWN_S))
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end_streams(self._app)
        await super().shutdown(sockets)


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="web_service", description="Serve reports.")
    parser.add_argument("store", help="a SQLite file, or postgresql://…")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--fd", type=int, help="an inherited socket to listen on: requests outwait restarts")
    parser.add_argument(
        "--lease-ttl-s", type=float, default=10, help="how soon others take over from a dead one"
    )
    args = parser.parse_args()
    app = create_app(args.store, lease_ttl_s=args.lease_ttl_s)
    Server(app, port=args.port, fd=args.fd).run()


if __name__ == "__main__":
    main()
