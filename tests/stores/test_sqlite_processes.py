"""One SQLite file, many processes: crashes, contention, and the order that readers rely on."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import apsw

from loomfast.stores import SqliteEventStore

from .logs import event
from .programs import start_program

WRITER = """
    import asyncio, sys
    from loomfast._kernels import Envelope
    from loomfast.stores import SqliteEventStore

    START = {"flowId": "f", "flowVersion": "1", "input": None}

    def event(execution_id, n, payload=None):
        kind = "note" if n else "EXECUTION_STARTED"
        return Envelope.make(execution_id, n, kind, payload if n else START, n)
"""

APPENDER = (
    WRITER
    + """
    async def main(path, name, count):
        async with await SqliteEventStore.open(path, busy_timeout_ms=60_000) as store:
            for n in range(count):
                await store.append(event(name, n))

    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""
)

# Twenty executions append batches of seven side by side and print what was acknowledged, until the kill.
VICTIM = (
    WRITER
    + """
    async def drive(store, name):
        n = 0
        while True:
            await store.append_batch([event(name, n + i, "x" * 300) for i in range(7)])
            n += 7
            print(name, n, flush=True)

    async def main(path, round):
        async with await SqliteEventStore.open(path) as store:
            await asyncio.gather(*(drive(store, f"r{round}-{k}") for k in range(20)))

    asyncio.run(main(sys.argv[1], sys.argv[2]))
"""
)


async def test_eight_processes_append_two_hundred_events_each_and_none_is_lost_or_refused(path: Path) -> None:
    processes = [start_program(APPENDER, path, f"p{n}", "200") for n in range(8)]
    async with await SqliteEventStore.open(path) as store:
        seen: list[tuple[int, str]] = []
        running = True
        while True:
            page = await store.read_all(seen[-1][0] if seen else 0, limit=50)
            seen += [(p.position, p.event.id) for p in page]
            if not page:
                if not running:
                    break
                await asyncio.sleep(0.01)
                running = any(process.poll() is None for process in processes)
        for process in processes:
            _, complaints = await asyncio.to_thread(process.communicate)
            assert (process.returncode, complaints) == (0, "")
        # The reader followed the writers as they went: it has seen every event once, in order, no holes.
        assert [position for position, _ in seen] == list(range(1, 1_601))
        assert {event_id for _, event_id in seen} == {f"p{n}-{k}" for n in range(8) for k in range(200)}
        assert [len(await store.read(f"p{n}")) for n in range(8)] == [200] * 8


async def test_a_killed_writer_leaves_whole_batches_and_all_that_was_acknowledged(path: Path) -> None:
    for round_ in range(5):
        process = start_program(VICTIM, path, str(round_))
        assert process.stdout is not None
        acknowledged: dict[str, int] = {}
        for _ in range(40 + 37 * round_):
            name, count = (await asyncio.to_thread(process.stdout.readline)).split()
            acknowledged[name] = int(count)
        process.kill()
        rest, _ = await asyncio.to_thread(process.communicate)
        for line in rest.splitlines():
            with contextlib.suppress(ValueError):  # the last line may be cut
                name, count = line.split()
                acknowledged[name] = max(acknowledged.get(name, 0), int(count))
        async with await SqliteEventStore.open(path) as store:
            for k in range(20):
                name = f"r{round_}-{k}"
                stored = await store.read(name)
                assert len(stored) % 7 == 0
                assert len(stored) >= acknowledged.get(name, 0)
                assert [one.sequence for one in stored] == list(range(len(stored)))
            positions = []
            while page := await store.read_all(positions[-1] if positions else 0):
                positions += [p.position for p in page]
            assert positions == list(range(1, len(positions) + 1))
            for summary in await store.list_executions(limit=1_000):
                last = await store.read_from(summary.execution_id, summary.last_sequence)
                assert [one.sequence for one in last] == [summary.last_sequence]
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_a_reader_neither_passes_over_an_open_transaction_nor_waits_for_one_rolled_back(
    path: Path,
) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append(event("x", 0))
        holder = apsw.Connection(str(path))
        holder.execute("BEGIN IMMEDIATE")
        holder.execute(
            "INSERT INTO events (id, coded, position, timestamp, checksum, body)"
            " VALUES ((1 << 32) + 1, 0, 2, 0, 0, x'30')"
        )
        waiting = asyncio.create_task(store.append(event("y", 0)))
        assert [p.position for p in await store.read_all()] == [1]
        holder.execute("ROLLBACK")
        holder.close()
        await waiting
        assert [(p.position, p.event.id) for p in await store.read_all(1)] == [(2, "y-0")]
