"""What the SQLite store makes of a file that is not as it wrote it: rows, pages, indexes, its log."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import apsw
import pytest

from loomfast._core.snapshots import snapshot_of, state_of
from loomfast._errors import (
    BadSnapshotError,
    StorageError,
    StorageWriteError,
    StoreCorruptError,
    StoreReadError,
)
from loomfast._kernels import fold_events
from loomfast.stores import SqliteEventStore

from .logs import GATED, event, log
from .programs import damage_kept, foreign

# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        "body = CAST(replace(CAST(body AS TEXT), '1', '2') AS BLOB)",
        "body = 'text'",
        "body = 5",
        "coded = coded + (1 << 32)",
        "coded = coded + 1",
        "coded = ~coded",
        "coded = 'x'",
        "timestamp = timestamp + 1",
        "stamp = 5",
        "subject = 'other'",
        "subject = NULL",
        "subject = 5",
        "fence = 9",
        "extra = x'7b7d'",
        "checksum = checksum + 1",
    ],
)
async def test_a_row_that_is_not_as_it_was_written_is_found_and_named(path: Path, change: str) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch([*log("x", 3), *log("sound", 3)])
        connection = foreign(path)
        connection.execute(f"UPDATE events SET {change} WHERE id = (1 << 32) + 1")
        connection.close()
        with pytest.raises(StoreReadError, match=r"'x', sequence 1") as caught:
            await store.read("x")
        assert caught.value.execution_id == "x"
        assert await store.read("sound") == log("sound", 3)
        assert await store.fold("sound") == fold_events(None, log("sound", 3))


@pytest.mark.parametrize(
    "change",
    [
        "coded = coded + (1 << 32)",
        "coded = coded + 1",
        "coded = ~coded",
        "coded = 'x'",
        "stamp = 5",
        "subject = 'b'",
        "subject = 5",
        "body = body || ' '",
        "body = 5",
    ],
)
@pytest.mark.parametrize("sequence", [1, 2, 3, 7])
async def test_a_fold_finds_damage_of_what_it_reads_and_names_it(
    path: Path, change: str, sequence: int
) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch([*GATED, *log("sound", 3)])
        connection = foreign(path)
        connection.execute(f"UPDATE events SET {change} WHERE id = (1 << 32) + ?", (sequence,))
        connection.close()
        unread = GATED[sequence].stamp is not None and change.startswith(("subject", "body"))
        if unread:  # a stamped emit counts by its stamp alone
            assert await store.fold("s") == fold_events(None, GATED)
        with pytest.raises(StoreReadError, match=f"'s', sequence {sequence}") as caught:
            await (store.read("s") if unread else store.fold("s"))
        assert caught.value.execution_id == "s"
        assert await store.fold("sound") == fold_events(None, log("sound", 3))


async def test_a_log_that_lost_its_newest_rows_does_not_fold_to_an_older_state(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 5))
        state = await store.fold("x")
        connection = foreign(path)
        connection.execute("DELETE FROM events WHERE id >= (1 << 32) + 3")
        for known in (None, fold_events(None, log("x", 2)), fold_events(None, log("x", 4))):
            with pytest.raises(StoreReadError, match="'x'"):
                await store.fold("x", known)
        connection.execute("DELETE FROM events")
        connection.close()
        with pytest.raises(StoreReadError, match="'x'"):
            await store.fold("x")
        assert await store.fold("x", state) == state


async def test_a_damaged_page_is_a_read_error_that_names_the_execution(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 2_000))
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * 20_000)
    async with await SqliteEventStore.open(path) as store:
        with pytest.raises(StoreReadError) as caught:
            await store.read("x")
        assert caught.value.execution_id == "x"
        with pytest.raises(StoreReadError):
            await store.fold("x")
        await store.append(event("y", 0))


async def test_damage_that_was_in_a_log_is_not_copied_into_another(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 3))
        _change(path, "UPDATE events SET stamp = 5 WHERE id = (1 << 32) + 1")
        with pytest.raises(StoreReadError, match="'x', sequence 1"):
            await store.copy_prefix("x", "y", 2)
        assert await store.last_sequence("y") is None


async def test_a_damaged_row_ends_a_page_of_the_total_order_and_can_be_passed_over(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:  # guarantee 7, F15
        (a0, a1), (b0, b1) = log("a", 2), log("b", 2)
        await store.append_batch([a0, b0, a1, b1])
        _change(path, "UPDATE events SET timestamp = 0 WHERE position = 3")
        assert [p.position for p in await store.read_all()] == [1, 2]
        with pytest.raises(StoreReadError, match="'a', sequence 1") as caught:
            await store.read_all(2)
        assert (caught.value.execution_id, caught.value.position) == ("a", 3)
        assert [p.position for p in await store.read_all(3)] == [4]
        assert len(await store.list_executions()) == 2
        assert await store.read("b") == [b0, b1]


async def test_an_event_of_no_execution_is_damage_and_not_passed_over_in_silence(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch([event("a", 0), event("b", 0)])
        _change(path, "DELETE FROM executions WHERE id = 'a'")
        with pytest.raises(StoreReadError, match="position 1") as caught:
            await store.read_all()
        assert caught.value.position == 1
        assert [p.event for p in await store.read_all(1)] == [event("b", 0)]


# --- pages ---------------------------------------------------------------------------------------


async def _big_store(path: Path) -> list[int]:
    """Write the logs `before`, `x` (a few hundred pages) and `after`; return the leaf pages of events."""
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("before", 3))
        for first in range(0, 4_000, 1_000):
            await store.append_batch(
                [event("x", n, payload={"n": n, "text": "t" * 150}) for n in range(first, first + 1_000)]
            )
        await store.append_batch(log("after", 3))
    return _pages(path, "events")


def _pages(path: Path, table: str) -> list[int]:
    connection = foreign(path)
    rows = connection.execute(
        "SELECT pageno FROM dbstat WHERE name = ? AND pagetype = 'leaf' ORDER BY path", (table,)
    ).fetchall()
    connection.close()
    return [number for (number,) in rows]


def _overwrite(path: Path, page: int, content: bytes = b"\xff" * 4096) -> None:
    with open(path, "r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(content)


def _change(path: Path, sql: str) -> None:
    connection = foreign(path)
    connection.execute(sql)
    connection.close()


async def test_a_damaged_page_concerns_the_executions_on_it_and_everybody_else_goes_on(
    path: Path,
) -> None:  # F15
    pages = await _big_store(path)
    _overwrite(path, pages[len(pages) // 2])
    async with await SqliteEventStore.open(path) as store:
        for answer in (store.read, store.fold):
            with pytest.raises(StoreCorruptError, match="'x'") as caught:
                await answer("x")
            assert caught.value.execution_id == "x"
            assert isinstance(caught.value.__cause__, apsw.CorruptError)
        for name in ("before", "after"):
            assert await store.read(name) == log(name, 3)
            assert await store.fold(name) == fold_events(None, log(name, 3))
        assert len(await store.list_executions()) == 3
        await store.append(event("before", 3))
        await store.append(event("new", 0))

        behind = (await store.read_all(limit=10_000))[-1].position
        refused: list[tuple[str | None, int | None]] = []
        while behind < 4_008:
            try:
                behind = (await store.read_all(behind, limit=10_000))[-1].position
            except StoreReadError as error:
                refused.append((error.execution_id, error.position))
                behind += 1
        assert refused == [("x", n) for n in range(refused[0][1] or 0, (refused[0][1] or 0) + len(refused))]
        assert 0 < len(refused) < 100
        assert await store.read_all(4_008) == []


async def test_a_write_that_meets_damage_fails_alone_and_says_so(path: Path) -> None:
    pages = await _big_store(path)
    async with await SqliteEventStore.open(path) as store:
        last = pages[-2]  # the newest events of "x"; those of "after" begin on the last
        _overwrite(path, last)
        results = await asyncio.gather(
            store.append(event("x", 4_000)), store.append(log("after", 4)[3]), return_exceptions=True
        )
        failed = [result for result in results if result is not None]
        for error in failed:
            assert isinstance(error, StorageWriteError)
            assert isinstance(error.__cause__, StoreCorruptError)
        assert results[1] is None
        assert await store.read("after") == log("after", 4)


async def test_a_damaged_index_is_found(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch(log("x", 2_000))
    for page in _pages(path, "events_by_position"):
        _overwrite(path, page)
    async with await SqliteEventStore.open(path) as store:
        with pytest.raises(StoreCorruptError):
            await store.read_all()
        assert await store.read("x") == log("x", 2_000)  # the log itself is whole
        with pytest.raises(StorageWriteError) as caught:
            await store.append(event("x", 2_000))
        assert (caught.value.execution_id, caught.value.sequence) == ("x", 2_000)
        assert isinstance(caught.value.__cause__, StoreCorruptError)
        assert await store.last_sequence("x") == 1_999


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.1])
async def test_a_truncated_file_is_damage_wherever_it_is_noticed(path: Path, kept: float) -> None:
    await _big_store(path)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(int(size * kept) // 4096 * 4096)
    with pytest.raises(StoreCorruptError):
        await _fold_all(path)


async def _fold_all(path: Path) -> None:
    async with await SqliteEventStore.open(path) as store:
        for summary in await store.list_executions():
            await store.fold(summary.execution_id)


async def test_a_file_whose_header_is_damaged_is_refused_and_left_as_it_is(path: Path) -> None:
    await _big_store(path)
    _overwrite(path, 1, b"\xff" * 50)
    before = path.read_bytes()
    with pytest.raises(StorageError):
        await SqliteEventStore.open(path)
    assert path.read_bytes() == before


# --- the log beside the file ---------------------------------------------------------------------


async def test_of_a_damaged_write_ahead_log_what_lies_before_the_damage_is_left(
    path: Path, tmp_path: Path
) -> None:
    """As after a power failure: whole transactions are dropped from where the log fails its checksum."""
    async with await SqliteEventStore.open(path) as store:
        for n in range(20):
            await store.append_batch(log(f"x{n}", 5))
        copy = tmp_path / "copy.db"
        shutil.copy(path, copy)
        shutil.copy(f"{path}-wal", f"{copy}-wal")
    wal = Path(f"{copy}-wal")
    content = bytearray(wal.read_bytes())
    content[content.index(b"x15")] ^= 0x10
    wal.write_bytes(content)
    async with await SqliteEventStore.open(copy) as store:
        listed = await store.list_executions()
        assert [s.execution_id for s in listed] == [f"x{n}" for n in range(15)]
        for summary in listed:
            assert await store.read(summary.execution_id) == log(summary.execution_id, 5)
        assert len(await store.read_all()) == 5 * len(listed)


# --- snapshots -----------------------------------------------------------------------------------


async def test_a_damaged_snapshot_concerns_nobody_but_itself(path: Path) -> None:
    events = log("x", 5)
    async with await SqliteEventStore.open(path) as store:
        await store.append_batch([*events, *log("y", 2)])
        snapshot = snapshot_of(fold_events(None, events))
        await store.snapshots.save(snapshot)
        await store.snapshots.save(snapshot_of(fold_events(None, log("y", 2))))
        damage_kept(path, _with_flipped_bit(snapshot))
        latest = await store.snapshots.latest("x")
        assert latest is not None
        with pytest.raises(BadSnapshotError, match="'x'"):
            state_of(latest)
        assert [fault.execution_id for fault in await store.snapshots.verify()] == ["x"]
        assert await store.fold("x") == fold_events(None, events)
        sound = await store.snapshots.latest("y")
        assert sound is not None
        assert state_of(sound) == await store.fold("y")


def _with_flipped_bit(snapshot: Any) -> Any:
    body = bytearray(snapshot.body)
    body[10] ^= 1
    return type(snapshot)(
        snapshot.execution_id, snapshot.sequence, snapshot.schema_version, bytes(body), snapshot.checksum
    )
