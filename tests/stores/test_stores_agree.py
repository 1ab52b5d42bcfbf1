"""The same calls have the same outcomes on every store. The calls are drawn at random, by seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from loomfast._errors import LoomError
from loomfast._kernels import Envelope
from loomfast.stores import EventStore, MemoryEventStore, SqliteEventStore

from .logs import event

IDS = ("a", "a-1", "\ud800", "b\x00")


def draw_batch(rng: random.Random, lengths: dict[str, int], fences: dict[str, int]) -> list[Envelope]:
    batch = []
    ahead = dict(lengths)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 40])):
        execution_id = rng.choice(IDS)
        # Mostly the next sequence; at times one that is taken, or one too far.
        sequence = max(0, ahead[execution_id] + rng.choices([0, -1, 1], [30, 1, 1])[0])
        ahead[execution_id] = max(ahead[execution_id], sequence + 1)
        metadata: dict[str, Any] = {}
        if execution_id in fences and rng.random() < 0.95:
            metadata["fence"] = fences[execution_id] - (rng.random() < 0.05)
        if rng.random() < 0.3:
            metadata["flowEmit"] = f"{rng.getrandbits(64):016x}"
        event_type = rng.choice(["note", "\udfff"])
        batch.append(event(execution_id, sequence, event_type, {"r": rng.random()}, **metadata))
    return batch


async def outcome(call: Any) -> Any:
    try:
        return await call
    except LoomError as error:
        return type(error), str(error)


async def observe(store: EventStore) -> list[Any]:
    # A summary's position is the store's own number: only its order counts.
    seen: list[Any] = [await store.read_all(), [summary[:4] for summary in await store.list_executions()]]
    for execution_id in IDS:
        log = await store.read(execution_id)
        seen += [log, await store.last_sequence(execution_id), await store.read_range(execution_id, 1, 2)]
        if log and log[0].event_type == "EXECUTION_STARTED":
            seen.append(await store.fold(execution_id))
    return seen


@pytest.mark.parametrize("seed", range(8))
async def test_random_calls_have_the_same_outcome_on_every_store(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lengths = dict.fromkeys(IDS, 0)
    fences: dict[str, int] = {}
    memory = MemoryEventStore()
    sqlite = await SqliteEventStore.open(path)
    try:
        for number in range(150):
            if rng.random() < 0.04:
                execution_id = rng.choice(IDS)
                fences[execution_id] = await memory.acquire_fence(execution_id)
                assert await sqlite.acquire_fence(execution_id) == fences[execution_id]
                continue
            batch = draw_batch(rng, lengths, fences)
            result = await outcome(memory.append_batch(batch))
            assert await outcome(sqlite.append_batch(batch)) == result
            for execution_id in IDS:
                last = await memory.last_sequence(execution_id)
                lengths[execution_id] = 0 if last is None else last + 1
            if number % 50 == 49:
                await sqlite.close()
                sqlite = await SqliteEventStore.open(path)
        assert await observe(sqlite) == await observe(memory)
        assert sum(lengths.values()) > 100
    finally:
        await sqlite.close()
