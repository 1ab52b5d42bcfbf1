"""Benchmarks of the digest kernel: FNV-1a 64, the two texts of a value, reading one back.

`c_chain` is FNV-1a's xor-and-multiply chain alone, looped and timed in C: no implementation can be faster,
and nothing but the machine is in it. `orjson_sorted` writes sorted JSON, but neither RFC 8785's numbers nor
its order of names, so it is a limit and not an alternative.
"""

from __future__ import annotations

from collections.abc import Callable
from timeit import Timer
from typing import Any

import orjson

from loomfast._native import digest as native
from loomfast._pure import digest as pure
from loomfast.bench.timing import interleaved, interleaved_timers

EVENT_TYPE = "SURFACE_PATCH"
# Nested, unsorted, with text, integers, floats and all constants: what a flow emits.
PAYLOAD: dict[str, Any] = {
    "title": "Apply migration 0042",
    "table": "customers",
    "risk": {"score": 0.8125, "reasons": ["drops column", "locks table"], "rows": 1284553, "eta_s": 12.75},
    "author": "ada@example.com",
    "approved": False,
    "plan": [{"op": "drop", "column": "legacy_id"}, {"op": "add", "column": "region", "default": None}],
    "attempt": 3,
    "ratio": 0.3333333333333333,
}


def fnv1a64_314(rounds: int = 200) -> dict[str, float]:
    """FNV-1a 64 of 314 bytes: product, its limb and big-integer formulations, the chain in C."""
    data = bytes(at * 7 & 0xFF for at in range(314))
    if not pure.fnv1a64(data) == native.fnv1a64(data) == native.fnv1a64_limbs(data):
        raise AssertionError("the formulations of fnv1a64 disagree")
    timers: dict[str, Callable[[int], float]] = {
        "loomfast": Timer(lambda: native.fnv1a64(data)).timeit,
        "limbs": Timer(lambda: native.fnv1a64_limbs(data)).timeit,
        "c_chain": lambda number: native._chain_seconds(data, number),
    }
    best = interleaved_timers(timers, rounds, 300)
    return best | interleaved({"big_integers": lambda: pure.fnv1a64(data)}, max(rounds // 20, 3), 20)


def digest_300(rounds: int = 200) -> dict[str, float]:
    """Canonical form and digest of a payload of about 300 bytes, and the two limits whose sum it is held to.

    `loomfast` gives the digest alone, `loomfast_both` the persisted text too, from the same walk.
    """
    text = b"0|" + pure.canonical([EVENT_TYPE, PAYLOAD])
    both = (pure.encode(PAYLOAD), pure.fnv1a64(text))
    if (native.encode_digest(0, EVENT_TYPE, PAYLOAD), native.digest(0, EVENT_TYPE, PAYLOAD)) != (
        both,
        both[1],
    ):
        raise AssertionError("the kernels disagree on the payload")
    timers: dict[str, Callable[[int], float]] = {
        "loomfast": Timer(lambda: native.digest(0, EVENT_TYPE, PAYLOAD)).timeit,
        "loomfast_both": Timer(lambda: native.encode_digest(0, EVENT_TYPE, PAYLOAD)).timeit,
        "orjson_sorted": Timer(lambda: orjson.dumps(PAYLOAD, option=orjson.OPT_SORT_KEYS)).timeit,
        "c_chain": lambda number: native._chain_seconds(text, number),
    }
    best = interleaved_timers(timers, rounds, 300)
    slow: dict[str, Callable[[], object]] = {"pure": lambda: pure.digest(0, EVENT_TYPE, PAYLOAD)}
    try:
        import rfc8785
    except ImportError:
        pass
    else:
        if rfc8785.dumps(PAYLOAD) != native.canonical(PAYLOAD):
            raise AssertionError("rfc8785 writes another canonical form")
        slow["rfc8785"] = lambda: rfc8785.dumps(PAYLOAD)
    return best | interleaved(slow, max(rounds // 20, 3), 20)


def encode_300(rounds: int = 200) -> dict[str, float]:
    """The persisted text of the same payload, written."""
    if orjson.loads(native.encode(PAYLOAD)) != PAYLOAD:
        raise AssertionError("the persisted text does not read back")
    variants = {"loomfast": lambda: native.encode(PAYLOAD), "orjson": lambda: orjson.dumps(PAYLOAD)}
    return interleaved(variants, rounds, 300)


def decode_300(rounds: int = 200) -> dict[str, float]:
    """The persisted text of the same payload, read."""
    text = native.encode(PAYLOAD)
    if not native.decode(text) == orjson.loads(text) == PAYLOAD:
        raise AssertionError("the persisted text does not read back")
    variants = {"loomfast": lambda: native.decode(text), "orjson": lambda: orjson.loads(text)}
    return interleaved(variants, rounds, 300)
