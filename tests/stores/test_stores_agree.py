"""The same calls have the same outcomes on every store. The calls are drawn at random, by seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from loomfast._core.snapshots import snapshot_of, state_of
from loomfast._errors import LoomError
from loomfast._kernels import Envelope, State
from loomfast.stores import EventStore, MemoryEventStore, SqliteEventStore

from .conftest import OpenPostgres
from .logs import event

IDS = ("a", "a-1", "\ud800", "b\x00")
FORKS = ("c", "\udc00", "a-1-0", "d")


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
        event_type = rng.choice(["note", "\udfff"]) if sequence else "note"  # which makes it a start
        batch.append(event(execution_id, sequence, event_type, {"r": rng.random()}, **metadata))
    return batch


async def outcome(call: Any) -> Any:
    try:
        return await call
    except LoomError as error:
        return type(error), str(error)


async def state_now(store: EventStore, execution_id: str) -> State | None:
    """Fold as a runtime does: from the newest snapshot, if there is one."""
    snapshot = await store.snapshots.latest(execution_id)
    return await store.fold(execution_id, None if snapshot is None else state_of(snapshot))


def draw_upkeep(rng: random.Random, lengths: dict[str, int], states: dict[str, State | None]) -> Any:
    """One call that cuts, copies, snapshots or branches, as a function of the store."""
    one, fork = rng.choice(IDS), rng.choice(FORKS)
    sequence = rng.randint(-1, lengths[one] + 2)
    name = rng.choice(["x", "y", "\ud800", "origin"])
    state = states[one]
    calls: list[Any] = [
        lambda store: store.truncate_prefix(one, sequence),
        lambda store: store.snapshots.delete(one, sequence),
        lambda store: store.copy_prefix(one, fork, sequence),
        lambda store: store.copy_prefix(one, fork, sequence, branch_name=name),
        lambda store: store.branches.add(name, fork, parent_id=one, cut=sequence),
        lambda store: store.branches.promote(one, name),
    ]
    if state is not None:
        calls += [lambda store: store.snapshots.save(snapshot_of(state))] * 4
    return rng.choice(calls)


async def observe(store: EventStore) -> list[Any]:
    # A summary's position is the store's own number: only its order counts.
    seen: list[Any] = [await store.read_all(), [summary[:4] for summary in await store.list_executions()]]
    for execution_id in IDS + FORKS:
        seen += [
            await outcome(store.read(execution_id)),
            await outcome(store.read_range(execution_id, 1, 2)),
            await store.read_range(execution_id, 0, 0),
            await store.last_sequence(execution_id),
            await outcome(store.fold(execution_id)),
            await state_now(store, execution_id),
            await store.snapshots.list(execution_id),
            await store.branches.refs(execution_id),
            await store.branches.tips(execution_id),
            await store.branches.children(execution_id),
            await store.branches.branch_of(execution_id),
        ]
    return seen


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["durable", "postgres"])
async def test_random_calls_have_the_same_outcome_on_every_store(
    path: Path, open_postgres: OpenPostgres, kind: str, seed: int
) -> None:
    async def reopen() -> EventStore:
        return await (open_postgres() if kind == "postgres" else SqliteEventStore.open(path))

    rng = random.Random(seed)
    lengths = dict.fromkeys(IDS, 0)
    fences: dict[str, int] = {}
    memory = MemoryEventStore()
    durable = await reopen()
    try:
        for number in range(250):
            if rng.random() < 0.04:
                execution_id = rng.choice(IDS)
                fences[execution_id] = await memory.acquire_fence(execution_id)
                assert await durable.acquire_fence(execution_id) == fences[execution_id]
                continue
            if rng.random() < 0.4:
                states = {name: await state_now(memory, name) for name in IDS}
                upkeep = draw_upkeep(rng, lengths, states)
                assert await outcome(upkeep(durable)) == await outcome(upkeep(memory))
                continue
            batch = draw_batch(rng, lengths, fences)
            result = await outcome(memory.append_batch(batch))
            assert await outcome(durable.append_batch(batch)) == result
            for execution_id in IDS:
                last = await memory.last_sequence(execution_id)
                lengths[execution_id] = 0 if last is None else last + 1
            if number % 50 == 49:
                await durable.close()
                durable = await reopen()
        assert await observe(durable) == await observe(memory)
        assert sum(lengths.values()) > 100
    finally:
        await durable.close()
