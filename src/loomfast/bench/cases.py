"""What a benchmark case is, what comes of running one, and the list of all cases with their limits.

A case measures variants in one run and is judged by one ratio, so that the speed of the machine cancels out.
Lower is better everywhere, and `limit` is the highest ratio that is good enough. Measuring is done in the
modules beside this one, which import what they measure; so nothing is imported here before a case runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Measured: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    `measure(quick)` returns a figure per variant, in `unit` (`s` per call or event, or `B`); it raises
    `AssertionError` when the variants' answers differ and `ImportError` when a peer is not installed.
    `judge` makes the ratio. `gate` cases are what `loomfast bench --check` runs; `long` ones take many
    minutes and run only when they are named.
    """

    name: str
    what: str
    measure: Callable[[bool], Measured]
    judge: Callable[[Mapping[str, float]], float]
    limit: float
    unit: str = "s"
    gate: bool = False
    long: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case.

    `ok` is None where it could not be measured; `reason` says why, or what is wrong.
    """

    name: str
    what: str
    unit: str
    measured: Measured
    ratio: float | None
    limit: float
    answers_equal: bool | None
    ok: bool | None
    reason: str = ""


def run(case: Case, *, quick: bool = False, attempts: int = 1) -> Outcome:
    """Run a case: check its answers, measure, judge.

    One that is over its limit is measured again, up to `attempts` times in all: a busy machine can push a
    ratio over its limit once, a cost that grows with the log does so every time.
    """
    outcome = _run_once(case, quick)
    while attempts > 1 and outcome.answers_equal and not outcome.ok:
        attempts -= 1
        outcome = _run_once(case, quick)
    return outcome


def _run_once(case: Case, quick: bool) -> Outcome:
    try:
        measured = case.measure(quick)
    except AssertionError as error:
        return _outcome(case, {}, None, answers_equal=False, ok=False, reason=str(error))
    except ImportError as error:
        return _outcome(case, {}, None, answers_equal=None, ok=None, reason=f"not measured: {error}")
    try:
        ratio = case.judge(measured)
    except KeyError as missing:
        reason = f"not judged: {missing.args[0]} is not installed"
        return _outcome(case, measured, None, answers_equal=True, ok=None, reason=reason)
    return _outcome(case, measured, ratio, answers_equal=True, ok=ratio <= case.limit)


def _outcome(
    case: Case,
    measured: Measured,
    ratio: float | None,
    *,
    answers_equal: bool | None,
    ok: bool | None,
    reason: str = "",
) -> Outcome:
    return Outcome(case.name, case.what, case.unit, measured, ratio, case.limit, answers_equal, ok, reason)


def of(over: str, *under: str) -> Callable[[Mapping[str, float]], float]:
    """Judge by one variant divided by the sum of others."""
    return lambda measured: measured[over] / sum(measured[name] for name in under)


def within(figure: float, variant: str = "loomfast") -> Callable[[Mapping[str, float]], float]:
    """Judge by one variant divided by a fixed figure."""
    return lambda measured: measured[variant] / figure


def _fnv(quick: bool) -> Measured:
    from loomfast.bench.digest import fnv1a64_314

    return fnv1a64_314(40 if quick else 200)


def _digest(quick: bool) -> Measured:
    from loomfast.bench.digest import digest_300

    return digest_300(40 if quick else 200)


def _import(quick: bool) -> Measured:
    from loomfast.bench.startup import import_cost

    return import_cost(7 if quick else 25)


def _memory(quick: bool) -> Measured:
    from loomfast.bench.memory import held_versions

    return held_versions(2_000 if quick else 10_000)


def _emit_peer(quick: bool) -> Measured:
    from loomfast.bench.fold import emit_and_peer

    return emit_and_peer(50_000, 30 if quick else 100)


def _emit_flat_1m(quick: bool) -> Measured:
    from loomfast.bench.fold import live_cost

    return live_cost("emits", (1_000, 1_000_000), 30 if quick else 100)


def _emit_one_leaf(quick: bool) -> Measured:
    from loomfast.bench.fold import crowded_cost

    return crowded_cost(50_000, 30 if quick else 100)


def _flat(part: str) -> Callable[[bool], Measured]:
    def measure(quick: bool) -> Measured:
        from loomfast.bench.fold import live_cost

        return live_cost(part, (1_000, 5_000, 50_000), 30 if quick else 100)

    return measure


def _longest(quick: bool) -> Measured:
    from loomfast.bench.fold import longest_bump

    return longest_bump(1_000_000, 3 if quick else 10)


def _trie(quick: bool) -> Measured:
    from loomfast.bench.trie import live_bump

    return live_bump(5 if quick else 20, 2_000 if quick else 5_000)


def _trie_shapes(quick: bool) -> Measured:
    from loomfast.bench.trie import distributions

    return distributions(5 if quick else 20, 2_000 if quick else 5_000)


def _trie_longest(quick: bool) -> Measured:
    from loomfast.bench.trie import longest_bump

    return longest_bump(3, number=20_000 if quick else 200_000)


def _table(quick: bool) -> Measured:
    from loomfast.bench.trie import live_set

    return live_set(5 if quick else 20, 2_000 if quick else 5_000)


def _worst_shape(measured: Mapping[str, float]) -> float:
    return max(measured.values()) / measured["random"]


def _replay(quick: bool) -> Measured:
    from loomfast.bench.replay import in_memory

    return in_memory(100_000 if quick else 1_000_000, 3 if quick else 5)


def _replay_rows(quick: bool) -> Measured:
    from loomfast.bench.replay import from_sqlite

    return from_sqlite(100_000 if quick else 1_000_000, 3 if quick else 5)


def _drivers(quick: bool) -> Measured:
    from loomfast.bench.driver import drivers

    return drivers(100_000 if quick else 400_000, 3 if quick else 5)


def _slower_driver(measured: Mapping[str, float]) -> float:
    """Judge the store's driver by the part where it does worse."""
    return max(measured[f"apsw {part}"] / measured[f"sqlite3 {part}"] for part in ("fetch", "insert"))


def _flatness(measured: Mapping[str, float]) -> float:
    """Judge 50,000 entries against 1,000 and against 5,000, and by the lower ratio.

    A log of 50,000 does not fit the processor's caches, one of 1,000 does: that alone makes up to 1.9 on fast
    kernels. A cost that grows with the log shows against 5,000 as well: copying a history would make 10.
    """
    return measured["k=50000"] / max(measured["k=1000"], measured["k=5000"])


FLAT_LIMIT = 2.0


def _live_emit(quick: bool) -> Measured:
    from loomfast.bench.session import live_emits

    return live_emits((1_000, 50_000), 5 if quick else 20)


def _served(quick: bool) -> Measured:
    from loomfast.bench.session import served_calls

    return served_calls(5 if quick else 20)


def _session(quick: bool) -> Measured:
    from loomfast.bench.session import session_turns

    return session_turns(200 if quick else 1_000)


def _latest_turn(measured: Mapping[str, float]) -> float:
    return max(measured.values()) / measured["turn 10"]


def _flows_memory(quick: bool) -> Measured:
    from loomfast.bench.flows import on_memory

    return on_memory(2_000 if quick else 20_000, 3 if quick else 6)


def _flows_sqlite(quick: bool) -> Measured:
    from loomfast.bench.flows import on_sqlite

    return on_sqlite(2_000 if quick else 20_000, 1 if quick else 3)


def _flows_postgres(quick: bool) -> Measured:
    from loomfast.bench.flows import on_postgres

    return on_postgres(2_000 if quick else 20_000, 1 if quick else 3)


def _flow_alone(quick: bool) -> Measured:
    from loomfast.bench.flows import alone_on_sqlite

    return alone_on_sqlite(100 if quick else 1_000)


def _new_on_sqlite(quick: bool) -> Measured:
    from loomfast.bench.flows import new_on_sqlite

    return new_on_sqlite(3 if quick else 15)


def _stall(quick: bool) -> Measured:
    from loomfast.bench.flows import stall

    return stall(5_000, 1) if quick else stall(20_000, 5)


# How many parked executions a case compares with, and how many it wakes at once. So few fill whatever is
# remembered up to a bound, so that many show what grows without one.
FEW = 10_000
WOKEN = 1_000


def _parked_sqlite(many: int) -> Callable[[bool], Measured]:
    def measure(quick: bool) -> Measured:
        from loomfast.bench import parked

        return parked.on_sqlite(*_parked_numbers(many, quick), parked.TIMES)

    return measure


def _parked_memory(many: int) -> Callable[[bool], Measured]:
    def measure(quick: bool) -> Measured:
        from loomfast.bench import parked

        return parked.on_sqlite(*_parked_numbers(many, quick), parked.MEMORY)

    return measure


def _parked_postgres(many: int) -> Callable[[bool], Measured]:
    def measure(quick: bool) -> Measured:
        from loomfast.bench import parked

        return parked.on_postgres(*_parked_numbers(many, quick))

    return measure


def _parked_numbers(many: int, quick: bool) -> tuple[int, int, int, int]:
    """Few, many, how many of them are woken at once, and how often."""
    return (FEW // 2, many // 5, WOKEN // 10, 2) if quick else (FEW, many, WOKEN, 5)


def _worst_growth(measured: Mapping[str, float]) -> float:
    """Judge what is measured with many parked against the same with few, by the part where it does worst."""
    parts: dict[str, list[float]] = {}
    for name, figure in measured.items():
        parts.setdefault(name.split()[0], []).append(figure)
    return max(many / few for few, many in parts.values())


CASES: tuple[Case, ...] = (
    Case(
        "fnv1a64",
        "FNV-1a 64 of 314 bytes, against its bare multiply chain in C",
        _fnv,
        of("loomfast", "c_chain"),
        1.3,
    ),
    Case(
        "digest",
        "canonical form and digest of a 300-byte payload, against orjson plus the chain",
        _digest,
        of("loomfast", "orjson_sorted", "c_chain"),
        1.5,
    ),
    Case(
        "emit",
        "one live stamped emit, older states held, against immutables.Map.set at 50,000",
        _emit_peer,
        of("loomfast", "immutables"),
        0.5,
    ),
    Case("emit-flat", "the same at 50,000 against 1,000", _flat("emits"), _flatness, FLAT_LIMIT, gate=True),
    Case(
        "emit-flat-1m",
        "the same at 1,000,000 against 1,000",
        _emit_flat_1m,
        of("k=1000000", "k=1000"),
        1.5,
    ),
    Case(
        "emit-crowded",
        "the same at 50,000 digests that share a leaf of the record's trie, against spread ones",
        _emit_one_leaf,
        of("crowded", "spread"),
        1.5,
        gate=True,
    ),
    Case(
        "trie",
        "one bump of the trie alone at 50,000, against immutables.Map.set",
        _trie,
        of("loomfast_50000", "immutables"),
        0.5,
    ),
    Case(
        "trie-shapes",
        "one bump at 50,000 digests that agree in most bits, the worst, against random ones",
        _trie_shapes,
        _worst_shape,
        1.5,
    ),
    Case(
        "table",
        "one set of the table alone at 50,000 keys, against immutables.Map.set",
        _table,
        of("loomfast_50000", "immutables"),
        1.0,
    ),
    Case(
        "ctx-emit",
        "the whole of a live ctx.emit at 50,000 stamped ones, against 10 us",
        _live_emit,
        within(10e-6, "k=50000"),
        1.0,
    ),
    Case(
        "ctx-emit-flat",
        "the same against 1,000",
        _live_emit,
        of("k=50000", "k=1000"),
        1.5,
    ),
    Case("served-emit", "one served ctx.emit, against 5 us", _served, within(5e-6, "emit"), 1.0),
    Case("served-step", "one served ctx.run, against 10 us", _served, within(10e-6, "step"), 1.0),
    Case(
        "session-turn",
        "the latest turn of a session of 1,000 gates, without its served re-run, against turn 10",
        _session,
        _latest_turn,
        1.5,
    ),
    Case(
        "longest-bump",
        "longest bump of the trie alone from 1,000,000 on, collector on, against 100 us",
        _trie_longest,
        within(100e-6, "longest"),
        1.0,
    ),
    Case(
        "longest-emit",
        "longest of 20,000 live emits from 1,000,000 on, collector on, against 100 us",
        _longest,
        within(100e-6),
        1.0,
    ),
    Case(
        "steps-flat",
        "one live step at 50,000 against 1,000",
        _flat("steps"),
        _flatness,
        FLAT_LIMIT,
        gate=True,
    ),
    Case(
        "decisions-flat",
        "one live decision at 50,000 against 1,000",
        _flat("decisions"),
        _flatness,
        FLAT_LIMIT,
        gate=True,
    ),
    Case(
        "gates-flat",
        "one live gate at 50,000 against 1,000",
        _flat("gates"),
        _flatness,
        FLAT_LIMIT,
        gate=True,
    ),
    Case(
        "replay",
        "replay of mixed events in memory, per event, against the pure twin",
        _replay,
        of("native", "pure"),
        1 / 20,
    ),
    Case(
        "replay-sqlite",
        "replay of mixed events from SQLite, per event, against 1 us",
        _replay_rows,
        within(1e-6),
        1.0,
    ),
    Case(
        "flows-memory",
        "a one-step flow on the memory store, 100 at once, against 15,000 a second",
        _flows_memory,
        within(1 / 15_000),
        1.0,
    ),
    Case(
        "flows-sqlite",
        "a durable one-step flow on SQLite (FULL), 100 at once, against 6,000 a second",
        _flows_sqlite,
        within(1 / 6_000),
        1.0,
    ),
    Case(
        "flows-sqlite-bare",
        "the same against a bare loop that commits each of its four events by itself",
        _flows_sqlite,
        of("loomfast", "bare_loop"),
        1 / 3,
    ),
    Case(
        "flows-postgres",
        "a durable one-step flow on PostgreSQL, 100 at once, against 2,000 a second",
        _flows_postgres,
        within(1 / 2_000),
        1.0,
    ),
    Case(
        "flow-alone",
        "the median durable flow, one at a time, against two commits of a thread: its start, the rest",
        _flow_alone,
        of("minted", "two"),
        1.5,
    ),
    Case(
        "flow-alone-chosen",
        "the same with a chosen id, durable before its body, against three: its start, its step, its end",
        _flow_alone,
        of("chosen", "three"),
        1.5,
    ),
    Case(
        "sqlite-new",
        "one of the first 100 commits of a new database, against a log that grows as SQLite lets it",
        _new_on_sqlite,
        of("long_log", "as_it_grows"),
        1.0,
    ),
    Case(
        "loop-stall",
        "lateness of a timer at full load on SQLite, the 99.9th percentile, against 5 ms",
        _stall,
        within(5e-3, "p99.9"),
        1.0,
    ),
    Case(
        "parked-sqlite",
        "starting, listing and waking on SQLite with 100,000 parked, the worst, against 10,000",
        _parked_sqlite(100_000),
        _worst_growth,
        2.0,
    ),
    Case(
        "parked-sqlite-1m",
        "the same with 1,000,000 parked",
        _parked_sqlite(1_000_000),
        _worst_growth,
        2.0,
        long=True,
    ),
    Case(
        "parked-memory",
        "memory of a process that has parked 100,000 on SQLite and woken thousands, against 10,000",
        _parked_memory(100_000),
        _worst_growth,
        1.15,
        unit="B",
    ),
    Case(
        "parked-memory-1m",
        "the same with 1,000,000 parked",
        _parked_memory(1_000_000),
        _worst_growth,
        1.15,
        unit="B",
        long=True,
    ),
    Case(
        "parked-postgres",
        "starting, listing and waking on PostgreSQL with 50,000 parked, the worst, against 10,000",
        _parked_postgres(50_000),
        _worst_growth,
        2.0,
    ),
    Case(
        "parked-postgres-1m",
        "the same with 1,000,000 parked",
        _parked_postgres(1_000_000),
        _worst_growth,
        2.0,
        long=True,
    ),
    Case(
        "driver",
        "rows fetched and inserted by apsw, per row, against sqlite3",
        _drivers,
        _slower_driver,
        1.0,
    ),
    Case(
        "import",
        "import loomfast beyond import asyncio, against 60 ms",
        _import,
        within(60e-3, "beyond"),
        1.0,
    ),
    Case(
        "memory",
        "memory of one more held version at 50,000 stamps, against immutables",
        _memory,
        of("loomfast", "immutables"),
        1.0,
        unit="B",
    ),
)


def choose(names: Iterable[str]) -> list[Case]:
    """Return the cases of these names, all but the long ones for none.

    Raises `KeyError` for a name that is none.
    """
    by_name = {case.name: case for case in CASES}
    return [by_name[name] for name in names] or [case for case in CASES if not case.long]
