"""`loomfast worker`: a process that takes up by itself what a store holds for it to do."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import click

import loomfast
from loomfast.cli.named import load_named
from loomfast.cli.output import CommandError
from loomfast.stores import POSTGRES_SCHEMES

logger = logging.getLogger("loomfast.worker")


@click.command("worker")
@click.argument("app", metavar="MODULE:APP")
@click.option("--db", required=True, help="The store: a SQLite file, or a postgresql:// URL.")
@click.option(
    "--concurrency", type=click.IntRange(1), default=100, show_default=True, help="Executions at a time."
)
@click.option("--per-flow", metavar="[FLOW=]N", multiple=True, help="Of each flow, or of one by its id.")
@click.option("--per-tenant", type=click.IntRange(1), help="Of each tenant.")
@click.option("--tenants", is_flag=True, help="Drive what tenants' views of the store hold as theirs.")
@click.option("--lease-ttl", type=float, default=30.0, show_default=True, help="Seconds a lease lasts.")
@click.option(
    "--poll", type=float, default=1.0, show_default=True, help="Seconds between looks at what is due."
)
@click.option(
    "--sweep", type=float, help="Seconds between looks at what is abandoned; 5, or a third of a lease."
)
@click.option(
    "--grace",
    type=float,
    default=20.0,
    show_default=True,
    help="Seconds that running effects get at the end.",
)
@click.option(
    "--statement-timeout",
    type=float,
    help="Seconds that PostgreSQL may leave a statement unanswered before its connection is given up; 60.",
)
@click.option("--health", metavar="HOST:PORT", help="Serve the worker's health over HTTP.")
def worker(
    app: str,
    *,
    db: str,
    concurrency: int,
    per_flow: tuple[str, ...],
    per_tenant: int | None,
    tenants: bool,
    lease_ttl: float,
    poll: float,
    sweep: float | None,
    grace: float,
    statement_timeout: float | None,
    health: str | None,
) -> None:
    """Recover what is abandoned in a store, wake what sleeps, and start what schedules call for.

    MODULE:APP names a loomfast.App, or a list of flows. Any number of workers may share a store. SIGTERM or
    SIGINT ends one in order: it takes nothing up any more, effects that run get --grace seconds, and others
    take over what is left. A second signal ends it at once.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    limits = loomfast.Limits(concurrency=concurrency, per_flow=_per_flow(per_flow), per_tenant=per_tenant)
    address = None if health is None else _address(health)
    timeout_ms = None if statement_timeout is None else _timeout_ms(statement_timeout, db)
    loaded = _app(app)

    def make(store: loomfast.EventStore) -> loomfast.Worker:
        return loomfast.Worker(
            store,
            loaded,
            limits=limits,
            lease_ttl_s=lease_ttl,
            poll_s=poll,
            sweep_s=sweep,
            close_grace_s=grace,
            tenants=tenants,
        )

    asyncio.run(_run(db, timeout_ms, make, address))


async def _run(
    db: str,
    timeout_ms: int | None,
    make: Callable[[loomfast.EventStore], loomfast.Worker],
    address: tuple[str, int] | None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def told(number: signal.Signals) -> None:
        if stop.is_set():  # told twice: what the signal does by itself, which for SIGINT is not Python's way
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        logger.info("%s: stopping", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(await _opened(db, timeout_ms))
        worker = make(store)
        if address is not None:
            host, port = await stack.enter_async_context(_served(worker, *address))
            logger.info("health at http://%s:%d/healthz", host, port)
        await stack.enter_async_context(worker)
        gc.freeze()  # what was imported stays: full collections of it would hold up the loop
        logger.info("ready, process %d", os.getpid())
        await stop.wait()
    logger.info("stopped")
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        _leave_threads_behind()


async def _opened(db: str, timeout_ms: int | None) -> loomfast.EventStore:
    if timeout_ms is None:
        return await loomfast.open_store(db)
    from loomfast.stores import PostgresEventStore

    return await PostgresEventStore.open(db, timeout_ms=timeout_ms)


def _leave_threads_behind() -> None:
    """End the process without waiting for the threads of sync steps, which nothing can stop."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def _served(worker: loomfast.Worker, host: str, port: int) -> AbstractAsyncContextManager[tuple[str, int]]:
    try:
        from loomfast._nodes.health import serve_health
    except ModuleNotFoundError as error:
        if error.name != "h11":
            raise
        raise CommandError("--health needs h11", "run: pip install 'loomfast[worker]'") from error
    return serve_health(worker, host, port)


def _app(name: str) -> loomfast.App:
    app = load_named(name, "MODULE:APP")
    if isinstance(app, loomfast.App):
        return app
    if isinstance(app, Iterable) and not isinstance(app, str | bytes):
        return loomfast.App(app)
    raise CommandError(f"MODULE:APP {name}: must be a loomfast.App, or a list of flows")


def _per_flow(limits: tuple[str, ...]) -> int | dict[str, int] | None:
    named: dict[str, int] = {}
    general: list[int] = []
    for limit in limits:
        flow_id, equals, count = limit.rpartition("=")
        if not count.isascii() or not count.isdigit() or len(count) > 9 or (equals and not flow_id):
            raise CommandError(f"--per-flow {limit}: must be N, or FLOW=N")
        if equals:
            named[flow_id] = int(count)
        else:
            general.append(int(count))
    if len(general) + bool(named) > 1:
        raise CommandError("--per-flow: say one number for every flow, or FLOW=N for each of some")
    return general[0] if general else named or None


def _timeout_ms(seconds: float, db: str) -> int:
    if not db.startswith(POSTGRES_SCHEMES):
        raise CommandError("--statement-timeout: only a store at postgresql://… has one")
    if not 0.001 <= seconds < math.inf:
        raise CommandError(f"--statement-timeout {seconds}: must be a number of seconds, 0.001 or more")
    return int(seconds * 1000)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65_535:
        raise CommandError(f"--health {text}: must be HOST:PORT")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise CommandError(f"--health {text}: must be HOST:PORT ({error})") from error
    return host.strip("[]") or "127.0.0.1", int(port)
