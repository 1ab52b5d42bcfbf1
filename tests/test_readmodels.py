"""Catch-up reads and read models: neither gap nor repeat, bounded memory, nothing left behind (F24, F38)."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import pytest

import loomfast as lf
from loomfast.stores import PositionedEvent, SqliteEventStore
from loomfast.testing import VirtualClock, run_virtual
from tests.conftest import OpenStore
from tests.runtime.harness import runtime, turns
from tests.stores.logs import event, log
from tests.stores.programs import foreign


async def ids(reader: lf.CatchUpReader) -> list[str]:
    return [placed.event.id async for placed in reader]


class KeptInMemory:
    """A position keeper whose saves can be counted."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    async def load(self) -> int:
        return self.saved[-1] if self.saved else 0

    async def save(self, position: int) -> None:
        self.saved.append(position)


# --- the reader ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_events", [1, 2, 7, 500])
async def test_a_reader_sees_every_event_once_and_ends_where_the_store_does(
    open_store: OpenStore, page_events: int
) -> None:
    async with open_store() as store:
        await store.append_batch([*log("x", 10), *log("y", 10)])
        reader = lf.CatchUpReader(store, page_events=page_events, wait=False)
        expected = [placed.event.id for placed in await store.read_all()]
        assert await ids(reader) == expected
        assert await ids(reader) == []
        await store.append(event("z", 0))
        assert await ids(reader) == ["z-0"]


async def test_a_reader_that_is_dropped_and_made_anew_at_its_position_has_neither_gap_nor_repeat(
    open_store: OpenStore,
) -> None:
    """F38: reading from n after a reconnect."""
    async with open_store() as store:
        position, seen = 0, []
        for n in range(40):
            await store.append_batch(log(f"x{n}", 3))
            reader = lf.CatchUpReader(store, after=position, page_events=4, wait=False)
            async for placed in reader:
                seen.append(placed.event.id)
                assert reader.position == placed.position
                if len(seen) % 5 == 0:
                    break
            position = reader.position
        seen += await ids(lf.CatchUpReader(store, after=position, wait=False))
        assert seen == [placed.event.id for placed in await store.read_all()]


def test_a_reader_at_the_end_waits_and_looks_again_at_intervals_of_the_injected_clock() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = lf.MemoryEventStore()
        reader = lf.CatchUpReader(store, poll_s=10, clock=VirtualClock())
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(25)
        await store.append(event("x", 0))
        assert (await waiting).event.id == "x-0"
        assert loop.time() == 30

    run_virtual(main())


def test_a_reader_that_is_woken_looks_at_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = lf.MemoryEventStore()
        reader = lf.CatchUpReader(store, poll_s=1_000, clock=VirtualClock())
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(5)
        await store.append(event("x", 0))
        reader.wake()
        assert (await waiting).event.id == "x-0"
        assert loop.time() == 5
        assert len(asyncio.all_tasks()) <= 2

    run_virtual(main())


async def test_what_a_runtime_in_this_process_makes_durable_can_wake_a_reader(open_store: OpenStore) -> None:
    @lf.flow(id="noted")
    async def flow(ctx: lf.WorkflowContext, input: Any) -> None:
        ctx.emit("note", input)

    async with open_store() as store:
        reader = lf.CatchUpReader(store, poll_s=3_600)
        seen: list[str] = []

        async def follow() -> None:
            async for placed in reader:
                seen.append(placed.event.event_type)
                if placed.event.event_type == "EXECUTION_COMPLETED":
                    break

        following = asyncio.ensure_future(follow())
        await turns(5)
        async with runtime(store, on_commit=lambda _: reader.wake()) as rt:
            await (await rt.start(flow, 1)).result()
            await following
        assert seen == ["EXECUTION_STARTED", "note", "EXECUTION_COMPLETED"]


async def test_a_cancelled_wait_loses_nothing() -> None:
    store = lf.MemoryEventStore()
    reader = lf.CatchUpReader(store, poll_s=3_600)
    for n in range(5):
        waiting = asyncio.ensure_future(anext(reader))
        await turns(5)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await store.append(event("x", n))
        assert (await anext(reader)).event.sequence == n
    await turns(3)
    assert len(asyncio.all_tasks()) == 1


async def test_a_damaged_event_stops_a_reader_or_is_passed_over_by_its_policy(tmp_path: Path) -> None:
    """F15: the others go on, and the damage is named once."""
    path = tmp_path / "events.db"
    async with await SqliteEventStore.open(path) as store:
        for name in ("x", "bad", "y"):
            await store.append_batch(log(name, 3))
        connection = foreign(path)
        connection.execute("UPDATE events SET timestamp = 5 WHERE id = (2 << 32) + 1")
        connection.close()
        reader = lf.CatchUpReader(store, wait=False)
        seen: list[str] = []
        for _ in range(4):
            seen.append((await anext(reader)).event.id)
        with pytest.raises(lf.StoreReadError) as caught:
            await anext(reader)
        assert seen == ["x-0", "x-1", "x-2", "bad-0"]
        assert (caught.value.execution_id, caught.value.position) == ("bad", 5)
        assert reader.position == 4
        assert caught.value.position is not None
        rest = lf.CatchUpReader(store, after=caught.value.position, wait=False)
        assert await ids(rest) == ["bad-2", "y-0", "y-1", "y-2"]
        passed_over: list[lf.StoreReadError] = []
        tolerant = lf.CatchUpReader(store, wait=False, on_unreadable=passed_over.append)
        assert await ids(tolerant) == [*seen, "bad-2", "y-0", "y-1", "y-2"]
        assert [(error.execution_id, error.position) for error in passed_over] == [("bad", 5)]


async def test_a_damaged_event_at_the_very_end_moves_the_position_behind_it() -> None:
    class Damaged(lf.MemoryEventStore):
        async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
            if after == 3:
                raise lf.StoreReadError("x", "damaged", position=4)
            return [placed for placed in await super().read_all(after, limit=limit) if placed.position != 4]

    store = Damaged()
    await store.append_batch(log("x", 4))
    reader = lf.CatchUpReader(store, wait=False, page_events=1, on_unreadable=lambda error: None)
    assert await ids(reader) == ["x-0", "x-1", "x-2"]
    assert reader.position == 4


async def test_an_error_without_a_position_is_never_passed_over() -> None:
    class Broken(lf.MemoryEventStore):
        async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
            raise lf.StoreReadError(None, "the index is gone")

    with pytest.raises(lf.StoreReadError, match="index"):
        await ids(lf.CatchUpReader(Broken(), wait=False, on_unreadable=lambda error: None))


async def test_what_was_truncated_before_it_was_read_is_passed_over(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.append_batch([*log("x", 10), *log("y", 2)])
        reader = lf.CatchUpReader(store, page_events=2, wait=False)
        assert (await anext(reader)).event.id == "x-0"
        state = await store.fold("x")
        assert state is not None
        await store.snapshots.save(lf.snapshot_of(state))
        await store.truncate_prefix("x", 8)
        assert await ids(reader) == ["x-1", "x-8", "x-9", "y-0", "y-1"]  # x-1 was on the page already


class Endless(lf.MemoryEventStore):
    """Holds a log of 100,000 events that is made as it is read."""

    async def read_all(self, after: int = 0, *, limit: int = 1000) -> list[PositionedEvent]:
        last = min(after + limit, 100_000)
        return [PositionedEvent(n, event("x", n - 1, payload="x" * 100)) for n in range(after + 1, last + 1)]


async def test_a_thousand_readers_that_leave_early_leave_nothing() -> None:
    """F38: memory flat, registered readers 0; without the cycle collector."""
    store = Endless()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        left: list[weakref.ref[lf.CatchUpReader]] = []
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(1_000):
            reader = lf.CatchUpReader(store, page_events=20)
            left.append(weakref.ref(reader))
            async for _ in reader:
                break
            lf.CatchUpReader(store)  # never read
        del reader
        assert [ref for ref in left if ref() is not None] == []
        left.clear()
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
        assert len(asyncio.all_tasks()) == 1
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_the_memory_of_a_reader_does_not_depend_on_the_length_of_the_log() -> None:
    """F38."""
    store, reader_store = Endless(), lf.CatchUpReader(Endless(), page_events=100, wait=False)
    tracemalloc.start()
    try:
        count = 0
        async for _ in reader_store:
            count += 1
            if count == 1_000:
                tracemalloc.reset_peak()
                early = tracemalloc.get_traced_memory()[0]
        assert count == 100_000
        assert tracemalloc.get_traced_memory()[1] - early < 300_000
    finally:
        tracemalloc.stop()
    del store


@pytest.mark.parametrize(
    "options",
    [
        {"after": -1},
        {"after": "x"},
        {"after": 1.5},
        {"page_events": 0},
        {"page_events": "x"},
        {"poll_s": 0},
        {"poll_s": float("nan")},
        {"poll_s": "x"},
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(lf.BadInputError, match=next(iter(options))):
        lf.CatchUpReader(lf.MemoryEventStore(), **options)


# --- positions in files --------------------------------------------------------------------------


async def test_a_position_survives_in_its_file_and_starts_at_0(tmp_path: Path) -> None:
    keeper = lf.FilePosition(tmp_path / "position")
    assert await keeper.load() == 0
    for position in (7, 8, 2**62):
        await keeper.save(position)
        assert await lf.FilePosition(tmp_path / "position").load() == position
    assert [path.name for path in tmp_path.iterdir()] == ["position"]


@pytest.mark.parametrize("content", [b"", b"12", b"-1\n", b"12\n13\n", b"\x00\n", "١٢\n".encode()])
async def test_a_file_that_holds_no_position_is_refused_and_left_alone(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "position"
    path.write_bytes(content)
    with pytest.raises(lf.BadInputError, match="position"):
        await lf.FilePosition(path).load()
    assert path.read_bytes() == content


async def test_a_save_that_fails_leaves_the_old_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = lf.FilePosition(tmp_path / "position")
    await keeper.save(5)

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        await keeper.save(6)
    assert await keeper.load() == 5


# --- read models ---------------------------------------------------------------------------------


async def test_a_read_model_catches_up_and_goes_on_where_it_was_after_a_restart(
    open_store: OpenStore, tmp_path: Path
) -> None:
    async with open_store() as store:
        await store.append_batch(log("x", 25))
        seen: list[str] = []
        for n in range(3):
            model = lf.ReadModel(
                store,
                lambda placed: seen.append(placed.event.id),
                lf.FilePosition(tmp_path / "position"),
                page_events=10,
            )
            assert await model.catch_up() == (await store.read_all())[-1].position
            await store.append_batch(log(f"y{n}", 5))
        assert seen == [placed.event.id for placed in await store.read_all()][:-5]


async def test_the_position_is_saved_after_the_page_that_was_applied_and_never_before() -> None:
    store, keeper = lf.MemoryEventStore(), KeptInMemory()
    await store.append_batch(log("x", 25))
    order: list[object] = []

    class Noted(KeptInMemory):
        async def save(self, position: int) -> None:
            order.append(("saved", position))
            await super().save(position)

    async def apply(placed: PositionedEvent) -> None:
        await asyncio.sleep(0)
        order.append(placed.position)

    keeper = Noted()
    await lf.ReadModel(store, apply, keeper, page_events=10).catch_up()
    assert keeper.saved == [10, 20, 25]
    assert order == [
        *range(1, 11),
        ("saved", 10),
        *range(11, 21),
        ("saved", 20),
        *range(21, 26),
        ("saved", 25),
    ]


async def test_an_event_that_cannot_be_applied_is_where_the_next_run_goes_on() -> None:
    store, keeper = lf.MemoryEventStore(), KeptInMemory()
    await store.append_batch(log("x", 10))
    applied: list[int] = []
    broken = True

    def apply(placed: PositionedEvent) -> None:
        if broken and placed.position == 7:
            raise ValueError("a bug in the read model")
        applied.append(placed.position)

    for _ in range(2):
        with pytest.raises(ValueError, match="bug"):
            await lf.ReadModel(store, apply, keeper).run()
    broken = False
    await lf.ReadModel(store, apply, keeper).catch_up()
    assert applied == list(range(1, 11))


async def test_a_crash_repeats_at_most_a_page_and_loses_nothing() -> None:
    """F24, at least once."""
    store, keeper = lf.MemoryEventStore(), KeptInMemory()
    await store.append_batch(log("x", 100))
    applied: list[int] = []
    for life in range(12):
        ends_at = len(applied) + 17 if life < 11 else None

        async def apply(placed: PositionedEvent, ends_at: int | None = ends_at) -> None:
            applied.append(placed.position)
            if len(applied) == ends_at:
                await asyncio.get_running_loop().create_future()  # the process ends here

        running = asyncio.ensure_future(lf.ReadModel(store, apply, keeper, page_events=10).catch_up())
        await turns(300)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert sorted(set(applied)) == list(range(1, 101))
    repeats = len(applied) - 100
    assert 0 < repeats <= 11 * 10


async def test_a_position_kept_with_what_was_applied_makes_it_exactly_once() -> None:
    store = lf.MemoryEventStore()
    await store.append_batch(log("x", 50))
    table: dict[str, Any] = {"position": 0, "sum": 0}  # stands for a database of the read model's own

    class InTheTable:
        async def load(self) -> int:
            return int(table["position"])

        async def save(self, position: int) -> None:
            pass

    def apply(placed: PositionedEvent) -> None:
        table.update(position=placed.position, sum=table["sum"] + placed.position)  # one transaction
        if placed.position % 7 == 0:
            raise KeyboardInterrupt

    while table["position"] < 50:
        try:
            await lf.ReadModel(store, apply, InTheTable()).catch_up()
        except KeyboardInterrupt:
            continue
    assert table["sum"] == sum(range(1, 51))


async def test_a_running_read_model_is_woken_and_is_stopped_by_cancelling() -> None:
    store, keeper = lf.MemoryEventStore(), KeptInMemory()
    seen: list[str] = []
    model = lf.ReadModel(store, lambda placed: seen.append(placed.event.id), keeper, poll_s=3_600)
    model.wake()  # nothing runs: nothing to wake
    running = asyncio.ensure_future(model.run())
    for n in range(3):
        await turns(10)
        await store.append(event("x", n))
        model.wake()
    await turns(10)
    assert seen == ["x-0", "x-1", "x-2"]
    assert keeper.saved == [1, 2, 3]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await turns(3)
    assert len(asyncio.all_tasks()) == 1
