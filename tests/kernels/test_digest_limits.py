"""What must not crash, hang or leak: depth, cycles, small stacks, failing calls, memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from textwrap import dedent

import pytest

from loomfast._errors import BadInputError, CircularValueError, JsonFormError, JsonTextError, TooDeepError

# Run in a process of its own, so that a crash is an exit code: on a thread with the smallest stack the
# platform allows, after the recursion limit was lifted.
DEEP = dedent(
    """
    import importlib, sys, threading
    from loomfast._errors import CircularValueError, TooDeepError

    kernel = importlib.import_module(sys.argv[1])
    # The very first call of the process, with every buffer still empty.
    assert kernel.encode(set()) == b"[]"
    assert kernel.encode([{1}, set()]) == b"[[1],[]]"
    sys.setrecursionlimit(10**8)

    def wrap(make, depth=100_000):
        value = 1
        for _ in range(depth):
            value = make(value)
        return value

    class Pair(tuple):
        pass

    class Hooked:
        def __init__(self, inner):
            self.inner = inner
        def __json__(self):
            return [self.inner]

    values = [
        wrap(lambda value: [value]),
        wrap(lambda value: (value,)),
        wrap(lambda value: {"a": value}),
        wrap(lambda value: {1: value}),
        wrap(lambda value: frozenset([value])),
        wrap(lambda value: Pair([value])),
        wrap(lambda value: Hooked(value)),
        wrap(lambda value: [{"k": frozenset([1, 2]), "a": (value,)}]),
    ]
    loop = []
    loop.append(loop)
    table = {}
    table["a"] = [table]
    texts = [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000, b'[{"a":' * 50_000]
    done = []

    def refuses(error, function, *arguments):
        try:
            function(*arguments)
        except error:
            return
        raise AssertionError((function, error))

    def check():
        for value in values:
            refuses(TooDeepError, kernel.encode, value)
            refuses(TooDeepError, kernel.canonical, value)
            refuses(TooDeepError, kernel.digest, 0, "NOTE", value)
            refuses(TooDeepError, kernel.encode_digest, 0, "NOTE", value)
        for value in (loop, table):
            refuses(CircularValueError, kernel.encode, value)
            refuses(CircularValueError, kernel.encode_digest, 0, "NOTE", value)
        for text in texts:
            refuses(TooDeepError, kernel.decode, text)
        deepest = wrap(lambda value: frozenset([value]), 256)
        assert kernel.encode(deepest) == b"[" * 256 + b"1" + b"]" * 256
        done.append(True)

    def on_small_stack():
        for size in (32 * 1024, 64 * 1024, 256 * 1024):
            try:
                threading.stack_size(size)
            except ValueError:
                continue
            thread = threading.Thread(target=check)
            thread.start()
            thread.join()
            return size

    check()
    size = on_small_stack()
    assert len(done) == 2, (done, size)
    # Taken apart from the top: freeing a chain this long is not what is tested here.
    print("whole", size)
    """
)


def test_f32_depth_and_cycles_never_crash_even_on_a_small_stack(digest_kernel):
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", DEEP, digest_kernel.__name__],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.startswith("whole"), ended.stdout


class Raising:
    def __json__(self) -> object:
        raise ValueError("no")


def failing_calls(kernel):
    """Calls that fail on every path out of the walk, with inputs that are kept."""
    loop: list[object] = [None, True, 5]
    loop.append(loop)
    deep: object = [None, True]
    for _ in range(300):
        deep = [deep]
    inputs = [
        (CircularValueError, loop),
        (TooDeepError, deep),
        (JsonFormError, {"z": [None, True, 5, "text"], "\u00e9": {"b": 1.5, "a": object()}}),
        (JsonFormError, [None, {"b": 1, "a": {1: 0, "1": 1}}, True]),
        (JsonFormError, [{"k": {2, 3}, "hook": Raising(), "a": None}]),
        (JsonFormError, {"s": {1, 2, (5, Raising)}}),
        (JsonFormError, {"\U0001f600": {"\ue000": 1, "a": {"y": [None], "x": 1j}}}),
    ]
    calls = [
        (error, function, value)
        for error, value in inputs
        for function in (
            kernel.encode,
            kernel.canonical,
            lambda value: kernel.encode_digest(0, "NOTE", value),
        )
    ]
    calls += [
        (JsonTextError, kernel.decode, text) for text in (b'[null,true,{"a":[5,}', b'"\xff"', b"[1e400]")
    ]
    calls.append((BadInputError, lambda value: kernel.digest(value, "NOTE", None), -1))
    return calls, inputs


def run_failing(calls, count):
    for at in range(count):
        error, function, value = calls[at % len(calls)]
        try:
            function(value)
        except error:
            continue
        raise AssertionError(value)


def test_f37_100000_failing_digests_leave_reference_counts_and_memory_alone(digest_kernel):
    slow = digest_kernel.__name__.startswith("loomfast._pure")
    count = len(failing_calls(digest_kernel)[0]) * (400 if slow else 4000)
    assert slow or count >= 100_000
    calls, inputs = failing_calls(digest_kernel)
    watched = [None, True, False, 1, 2, 5, "text", *(value for _, value in inputs)]
    run_failing(calls, len(calls) * 20)
    gc.collect()
    before = [sys.getrefcount(value) for value in watched]
    tracemalloc.start()
    try:
        run_failing(calls, len(calls) * 2)
        gc.collect()
        start = tracemalloc.get_traced_memory()[0]
        run_failing(calls, len(calls) * 100)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    run_failing(calls, count)
    gc.collect()
    after = [sys.getrefcount(value) for value in watched]
    for value, first, last in zip(watched, before, after, strict=True):
        # A leak of one reference per failure would be thousands.
        assert abs(last - first) < 20, (repr(value)[:80], first, last)
    assert grown < 20_000


def test_f37_succeeding_calls_leave_reference_counts_and_memory_alone(digest_kernel):
    class Hooked:
        def __json__(self) -> object:
            return {"b": [None], "a": {1, 2}}

    value = {
        "z": [1.5, None, True, "text"],
        "\u00e9": {"b": 1, "a": (2,)},
        "hook": Hooked(),
        "set": {"x", "y"},
        "n": 10**700,
    }
    text = digest_kernel.encode(value)

    def run(count):
        for _ in range(count):
            digest_kernel.encode(value)
            digest_kernel.canonical(value)
            digest_kernel.encode_digest(0, "NOTE", value)
            digest_kernel.decode(text)

    run(50)
    gc.collect()
    watched = [
        None,
        True,
        "text",
        value,
        value["z"],
        value["\u00e9"],
        value["hook"],
        value["set"],
        value["n"],
        text,
    ]
    before = [sys.getrefcount(item) for item in watched]
    tracemalloc.start()
    try:
        run(20)
        start = tracemalloc.get_traced_memory()[0]
        run(500)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    after = [sys.getrefcount(item) for item in watched]
    assert max(abs(last - first) for first, last in zip(before, after, strict=True)) < 20
    assert grown < 20_000


def test_a_huge_value_does_not_stay_in_memory_after_the_call(digest_kernel):
    value = {"blob": ["x" * 1000] * 10_000, **{f"n{at}": at for at in range(50_000)}}
    digest_kernel.encode_digest(0, "NOTE", {"a": 1})
    tracemalloc.start()
    try:
        # Both texts; hashing as much would take the pure twin half a minute.
        digest_kernel.encode(value)
        digest_kernel.canonical(value)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [100, 100_000])
def test_wide_containers_are_whole(digest_kernel, size):
    value = {
        "list": list(range(size)),
        "object": {f"name {at * 7919 % size:06}": at for at in range(size)},
        "set": {f"{at}" for at in range(size)},
    }
    back = digest_kernel.decode(digest_kernel.encode(value))
    assert back["list"] == value["list"]
    assert list(back["object"].items()) == list(value["object"].items())
    assert back["set"] == sorted(value["set"], key=lambda name: f'"{name}"')
    assert list(digest_kernel.decode(digest_kernel.canonical(value))["object"]) == sorted(value["object"])
