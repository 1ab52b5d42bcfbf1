"""Values that are not plain JSON: the table of docs/values.md, keys, paths, hooks, and hostile objects."""

from __future__ import annotations

import gc
import sys
from collections import ChainMap, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from types import MappingProxyType
from typing import Any
from uuid import UUID

import msgspec
import numpy
import pydantic
import pytest

from loomfast._errors import (
    CircularValueError,
    JsonFormError,
    KeyCollisionError,
    TooDeepError,
    UnsupportedTypeError,
)


class Text(str):
    def __str__(self) -> str:
        return "a lie"

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        return 1


class Whole(int):
    def __repr__(self) -> str:
        return "a lie"

    def __int__(self) -> int:
        return 0


class Real(float):
    def __repr__(self) -> str:
        return "a lie"

    def __float__(self) -> float:
        return 0.0


class Colour(Enum):
    RED = "red"
    DEEP = ("a", 1)


class Level(IntEnum):
    HIGH = 3


class Mode(StrEnum):
    FAST = "fast"


class Things(list):
    def __iter__(self) -> Any:
        raise RuntimeError("iterated")


Point = namedtuple("Point", "x y")


@dataclass
class Job:
    name: str
    tries: int = 0
    inner: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Tag:
    name: str
    weight: float


class Model(pydantic.BaseModel):
    when: datetime
    amount: Decimal
    names: set[str]


class Struct(msgspec.Struct):
    when: datetime
    amount: Decimal
    raw: bytes


class Hooked:
    def __init__(self, result: object) -> None:
        self.result = result

    def __json__(self) -> object:
        return self.result() if callable(self.result) else self.result


WHEN = datetime(2024, 2, 29, 23, 59, 59, 123456, timezone(timedelta(hours=5, minutes=30)))
WHEN_TEXT = "2024-02-29T23:59:59.123456+05:30"
UUID_TEXT = "12345678-1234-5678-1234-567812345678"

# value, persisted text, canonical text
TABLE = [
    (Text("é\n"), '"é\\n"', '"é\\n"'),
    (Whole(7), "7", "7"),
    (Real(2.0), "2.0", "2"),
    (Colour.RED, '"red"', '"red"'),
    (Colour.DEEP, '["a",1]', '["a",1]'),
    (Level.HIGH, "3", "3"),
    (Mode.FAST, '"fast"', '"fast"'),
    (Point(1, 2.0), "[1,2.0]", "[1,2]"),
    (Things([1, [2]]), "[1,[2]]", "[1,[2]]"),
    (OrderedDict(b=1, a=2), '{"b":1,"a":2}', '{"a":2,"b":1}'),
    (defaultdict(int, b=1, a=2), '{"b":1,"a":2}', '{"a":2,"b":1}'),
    (MappingProxyType({"b": 1, "a": 2}), '{"b":1,"a":2}', '{"a":2,"b":1}'),
    (UserDict({"b": 1}), '{"b":1}', '{"b":1}'),
    (ChainMap({"b": 1}), '{"b":1}', '{"b":1}'),
    (
        Job("x", 2, Job("y")),
        '{"name":"x","tries":2,"inner":{"name":"y","tries":0,"inner":null}}',
        '{"inner":{"inner":null,"name":"y","tries":0},"name":"x","tries":2}',
    ),
    (WHEN, f'"{WHEN_TEXT}"', f'"{WHEN_TEXT}"'),
    (datetime(2024, 1, 1), '"2024-01-01T00:00:00"', '"2024-01-01T00:00:00"'),
    (date(2024, 1, 31), '"2024-01-31"', '"2024-01-31"'),
    (time(1, 2, 3, 4, UTC), '"01:02:03.000004+00:00"', '"01:02:03.000004+00:00"'),
    (UUID(UUID_TEXT), f'"{UUID_TEXT}"', f'"{UUID_TEXT}"'),
    (Decimal("1.10"), '"1.10"', '"1.10"'),
    (Decimal("1E+400"), '"1E+400"', '"1E+400"'),
    (b"\x00\xff", '"AP8="', '"AP8="'),
    (bytearray(b"ab"), '"YWI="', '"YWI="'),
    (memoryview(b"a-b-")[::2], '"YWI="', '"YWI="'),
    ({3, 1, 20}, "[1,20,3]", "[1,20,3]"),
    (frozenset({1.0, "a", None, (2.0,)}), '["a",1.0,[2.0],null]', '["a",1,[2],null]'),
    ({frozenset({2, 1}), frozenset({"b", "a", 0.0})}, '[["a","b",0.0],[1,2]]', '[["a","b",0],[1,2]]'),
    (
        {Tag("b", 1.0), Tag("a", 2.0)},
        '[{"name":"a","weight":2.0},{"name":"b","weight":1.0}]',
        '[{"name":"a","weight":2},{"name":"b","weight":1}]',
    ),
    (set(), "[]", "[]"),
    (
        Model(when=WHEN, amount=Decimal("1.10"), names={"n"}),
        f'{{"when":"{WHEN_TEXT}","amount":"1.10","names":["n"]}}',
        f'{{"amount":"1.10","names":["n"],"when":"{WHEN_TEXT}"}}',
    ),
    (
        Struct(WHEN, Decimal("1.10"), b"ab"),
        f'{{"when":"{WHEN_TEXT}","amount":"1.10","raw":"YWI="}}',
        f'{{"amount":"1.10","raw":"YWI=","when":"{WHEN_TEXT}"}}',
    ),
    (numpy.int64(2**62), str(2**62), str(2**62)),
    (numpy.float64(1.0), "1.0", "1"),
    (numpy.float32(0.5), "0.5", "0.5"),
    (numpy.bool_(True), "true", "true"),
    (numpy.str_("s"), '"s"', '"s"'),
    (Hooked({"b": Hooked(1), "a": {2}}), '{"b":1,"a":[2]}', '{"a":[2],"b":1}'),
    (Hooked(Hooked(Hooked(None))), "null", "null"),
]


@pytest.mark.parametrize(("value", "persisted", "canonical"), TABLE, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("place", ["alone", "in a list", "in an object", "in a tuple after a hook"])
def test_f31_each_type_has_the_form_of_the_table_in_every_place(
    digest_kernel, value, persisted, canonical, place
):
    wrap = {
        "alone": (lambda inner: inner, "{}"),
        "in a list": (lambda inner: [1, inner], "[1,{}]"),
        "in an object": (lambda inner: {"k": inner, "l": [inner]}, '{{"k":{0},"l":[{0}]}}'),
        "in a tuple after a hook": (
            lambda inner: (Hooked("h"), inner, {"z": Hooked(inner)}),
            '["h",{0},{{"z":{0}}}]',
        ),
    }[place]
    value = wrap[0](value)
    persisted, canonical = wrap[1].format(persisted), wrap[1].format(canonical)
    assert digest_kernel.encode(value).decode() == persisted
    assert digest_kernel.canonical(value).decode() == canonical
    text, stamp = digest_kernel.encode_digest(0, "NOTE", value)
    assert text.decode() == persisted
    assert (
        stamp
        == digest_kernel.digest(0, "NOTE", value)
        == digest_kernel.digest(0, "NOTE", digest_kernel.decode(text))
    )


def test_sets_have_one_digest_whatever_their_order_and_number_types(digest_kernel):
    for first, second in [
        ({0, 1, 10}, {10.0, -0.0, 1.0}),
        ({"b", "a", "\U0001f600", "\uffff"}, {"\uffff", "a", "\U0001f600", "b"}),
    ]:
        assert digest_kernel.digest(0, "N", [first]) == digest_kernel.digest(0, "N", [second])
    many = {f"n{at}" for at in range(500)}
    assert digest_kernel.decode(digest_kernel.encode({"s": many})) == {"s": sorted(many)}


class Unlisted:
    pass


@pytest.mark.parametrize(
    "value",
    [
        Unlisted(),
        Unlisted,
        len,
        lambda: 0,
        timedelta(1),
        1j,
        Fraction(1, 2),
        numpy.zeros(2),
        numpy.longdouble(1),
        numpy.complex128(1),
        numpy.timedelta64(1, "s"),
        range(3),
        iter([]),
        Job,
        Colour,
        NotImplemented,
        ...,
        sys,
    ],
    ids=repr,
)
def test_f31_everything_else_is_refused_with_path_and_type(digest_kernels, value):
    seen = set()
    for kernel in digest_kernels:
        for function in (
            kernel.encode,
            kernel.canonical,
            lambda value, k=kernel: k.encode_digest(0, "N", value),
        ):
            with pytest.raises(UnsupportedTypeError, match="has no JSON form") as caught:
                function({"ok": 1, "a b": [0, {"x": value}]})
            assert caught.value.path == '$["a b"][1].x'
            seen.add((str(caught.value), caught.value.type_name))
    assert len(seen) == 1


def test_keys_are_written_as_the_stdlib_writes_them(digest_kernel):
    value = {
        1: 0,
        -1.5: 1,
        1e16: 2,
        float("nan"): 3,
        float("-inf"): 4,
        True + 1: 5,
        None: 6,
        False: 7,
        10**5000: 8,
        1e-7: 9,
    }
    names = ["1", "-1.5", "1e+16", "NaN", "-Infinity", "2", "null", "false", "1" + "0" * 5000, "1e-07"]
    assert list(digest_kernel.decode(digest_kernel.encode(value))) == names
    subclasses = {
        Text("t"): 0,
        Whole(5): 1,
        Real(2.5): 2,
        Level.HIGH: 3,
        Mode.FAST: 4,
        Colour.RED: 5,
        numpy.int64(9): 6,
    }
    assert list(digest_kernel.decode(digest_kernel.encode(subclasses))) == [
        "t",
        "5",
        "2.5",
        "3",
        "fast",
        "red",
        "9",
    ]
    assert digest_kernel.encode({True: 1}) == b'{"true":1}'


@pytest.mark.parametrize(
    ("value", "path", "type_name"),
    [
        ({1: 0, "1": 1}, '$.k["1"]', "str"),
        ({"1": 0, 1: 1}, '$.k["1"]', "int"),
        ({True: 0, "true": 1}, "$.k.true", "str"),
        ({None: 0, "null": 1}, "$.k.null", "str"),
        ({1.5: 0, "1.5": 1}, '$.k["1.5"]', "str"),
        ({Text("a"): 0, "a": 1}, "$.k.a", "str"),
        ({Colour.RED: 0, "red": 1}, "$.k.red", "str"),
        ({"\ud83d" + "\ude00": 0, "\U0001f600": 1}, '$.k["\\ud83d\\ude00"]', "str"),
        (OrderedDict([(1, 0), ("1", 1)]), '$.k["1"]', "str"),
    ],
    ids=ascii,
)
def test_f31_keys_that_become_one_name_are_an_error(digest_kernel, value, path, type_name):
    for function in (digest_kernel.encode, digest_kernel.canonical):
        with pytest.raises(KeyCollisionError) as caught:
            function({"k": value})
        assert (caught.value.path, caught.value.type_name) == (path, type_name)


@pytest.mark.parametrize(
    "key", [(1, 2), frozenset(), b"a", date(2024, 1, 1), Unlisted(), Colour.DEEP, 1j], ids=repr
)
def test_f31_keys_without_a_name_are_an_error(digest_kernel, key):
    with pytest.raises(UnsupportedTypeError, match="has no JSON name") as caught:
        digest_kernel.encode([{"a": Unlisted(), key: 1}])
    assert (caught.value.path, caught.value.type_name) == ("$[0]", type(key).__name__)


class LyingDict(dict):
    def __init__(self, items: object) -> None:
        super().__init__(real=1)
        self.lie = items

    def items(self) -> Any:
        return self.lie() if callable(self.lie) else self.lie


class BadMapping(Mapping):
    def __getitem__(self, key: object) -> object:
        raise OSError("no")

    def __iter__(self) -> Any:
        return iter(["a"])

    def __len__(self) -> int:
        return 10**9


def fail() -> Any:
    raise ValueError("from the hook")


class FakeClass:
    __class__ = property(lambda self: fail())  # type: ignore[assignment]


class RaisingMeta(type):
    __name__ = property(lambda cls: fail())  # type: ignore[assignment]


class Nameless(metaclass=RaisingMeta):
    pass


class UnhashableMeta(type):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("compared")


class Unhashable(metaclass=UnhashableMeta):
    pass


class UnhashableHooked(metaclass=UnhashableMeta):
    def __json__(self) -> object:
        return [1]


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (Hooked(fail), ValueError),
        (LyingDict(fail), ValueError),
        (LyingDict([1, 2]), TypeError),
        (LyingDict(None), TypeError),
        (LyingDict([("a", 1, 2)]), ValueError),
        (BadMapping(), OSError),
        (LyingDict([(Text("a"), 1), 5]), TypeError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_conversion_that_raises_is_an_unsupported_type_and_keeps_its_cause(digest_kernel, value, cause):
    with pytest.raises(
        UnsupportedTypeError, match=f"converting a {type(value).__name__} raised {cause.__name__}"
    ) as caught:
        digest_kernel.encode({"a": [value]})
    assert caught.value.path == "$.a[0]"
    assert isinstance(caught.value.__cause__, cause)


def test_liars_get_a_correct_answer_or_a_typed_error(digest_kernel):
    assert digest_kernel.encode(LyingDict([(Text("b"), 1), ("a", 2)])) == b'{"b":1,"a":2}'
    assert digest_kernel.encode([UnhashableHooked()]) == b"[[1]]"
    for value in (FakeClass(), Nameless(), Nameless, Unhashable(), Unhashable, {Nameless: 1}):
        with pytest.raises(UnsupportedTypeError):
            digest_kernel.encode([value])
    with pytest.raises(KeyCollisionError):
        digest_kernel.encode(LyingDict([("a", 1), (Text("a"), 2)]))


def test_signals_pass_through_a_hook(digest_kernel):
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        digest_kernel.encode([Hooked(interrupt)])
    assert digest_kernel.encode([1]) == b"[1]"


class Itself:
    def __json__(self) -> object:
        return self


class Ever:
    def __json__(self) -> object:
        return Ever()


class EverDeeper:
    def __json__(self) -> object:
        return [EverDeeper()]


class InItself:
    def __json__(self) -> object:
        return {"me": self}


def test_f32_conversions_without_end_are_errors(digest_kernel):
    for value in (Itself(), Ever()):
        with pytest.raises(TooDeepError, match="never ends") as caught:
            digest_kernel.encode([value])
        assert caught.value.path == "$[0]"
    with pytest.raises(TooDeepError, match="nested deeper"):
        digest_kernel.encode(EverDeeper())
    with pytest.raises(CircularValueError) as caught:
        digest_kernel.encode([InItself()])
    assert caught.value.path == "$[0].me"


def test_f32_cycles_are_reported_where_they_close_and_sharing_is_no_cycle(digest_kernel):
    loop: list[Any] = [0]
    loop.append(loop)
    table: dict[str, Any] = {"a": {"b": [1]}}
    table["a"]["b"].append({"c": table})
    hidden: OrderedDict[str, Any] = OrderedDict()
    hidden["self"] = (hidden,)
    for value, path in [
        (loop, "$[1]"),
        (table, "$.a.b[1].c"),
        (hidden, "$.self[0]"),
        ([[loop]], "$[0][0][1]"),
    ]:
        for function in (digest_kernel.encode, digest_kernel.canonical):
            with pytest.raises(CircularValueError, match="the value contains itself") as caught:
                function(value)
            assert caught.value.path == path
    shared = {"x": [1]}
    assert digest_kernel.encode([shared, shared, [shared]]) == b'[{"x":[1]},{"x":[1]},[{"x":[1]}]]'


def test_f31_a_hook_that_changes_its_containers_changes_nothing(digest_kernel):
    for change in ("clear", "grow"):
        items: list[Any] = ["first", None, "last", [1.5]]
        table: dict[str, Any] = {"z": 1, "hook": None, "a": items, "m": {"y": 1, "x": 2}}

        def mutate(change: str = change, items: list[Any] = items, table: dict[str, Any] = table) -> str:
            if change == "clear":
                items.clear()
                table["m"].clear()
                table.clear()
            else:
                items.extend(range(1000))
                table.update({f"n{at}": at for at in range(1000)})
            return "changed"

        items[1] = Hooked(mutate)
        table["hook"] = Hooked(mutate)
        outer = [table, items]
        text, _ = digest_kernel.encode_digest(0, "N", outer)
        head = b'[{"z":1,"hook":"changed","a":['
        # What had been reached when the hook ran is fixed; what had not is as the hook left it.
        assert text.startswith(head)
        assert digest_kernel.decode(text)


def test_both_kernels_see_the_same_when_hooks_change_things(digest_kernels):
    def build() -> Any:
        log: list[int] = []
        inner: dict[str, Any] = {"b": 1, "a": [1, 2, 3]}
        outer: list[Any] = [0, None, inner, {"k": inner}, 5]

        def change() -> object:
            log.append(1)
            outer.append(len(log))
            inner[f"n{len(log)}"] = len(log)
            inner.pop("b", None)
            return {"calls": len(log), "set": {3, 1, 2}}

        outer[1] = Hooked(change)
        inner["hook"] = Hooked(change)
        return outer, log

    results = set()
    for kernel in digest_kernels:
        value, log = build()
        results.add((kernel.encode_digest(0, "N", value), len(log)))
        value, _ = build()
        results.add((kernel.encode(value), kernel.__name__ and 0))
        value, _ = build()
        results.add((kernel.canonical(value), kernel.__name__ and 1))
    assert len(results) == 3


def test_finalizers_that_run_in_the_middle_of_a_walk_change_nothing(digest_kernel):
    class Bomb:
        def __init__(self, targets: list[Any]) -> None:
            self.me = self
            self.targets = targets

        def __del__(self) -> None:
            for target in self.targets:
                target.clear()

    # Names and values that nothing but their containers holds.
    inner = {f"inner {at}": [f"value {at}"] for at in range(50)}
    inner["hook"] = Hooked(lambda: [object() and {} for _ in range(50)] and "h")  # type: ignore[assignment]
    items: list[Any] = [f"item {at}" for at in range(50)]
    items[3] = 2**200
    outer = {f"outer {at}": at for at in range(50)} | {"inner": inner, "items": items, "last": Hooked("l")}
    expected = digest_kernel.encode(outer)
    threshold = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        bomb: Any = Bomb([inner, items, outer])
        del bomb
        # Every new container collects: whatever the walk makes is a chance for the finalizer.
        gc.set_threshold(1, 1, 1)
        value = [outer]
        gc.enable()
        text = digest_kernel.encode(value)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    # The collector may come before the walk, in it, or after it; there is always an answer.
    digest_kernel.decode(text)
    assert len(text) <= len(expected) + 2


def test_a_hook_is_called_once_and_in_the_order_of_the_members(digest_kernel):
    calls: list[str] = []

    def named(name: str) -> Hooked:
        return Hooked(lambda: calls.append(name) or name)

    value = {"z": named("z"), "a": [named("a0"), named("a1")], "m": {"y": named("y"), "b": named("b")}}
    for function in (
        digest_kernel.encode,
        digest_kernel.canonical,
        lambda value: digest_kernel.encode_digest(0, "N", value),
    ):
        calls.clear()
        function(value)
        assert calls == ["z", "a0", "a1", "y", "b"]


def test_a_hook_may_call_the_kernel(digest_kernel):
    def again() -> list[object]:
        inner = digest_kernel.encode({"b": [1.5, {"d": 1, "c": 2}], "a": Hooked("deep")}).decode()
        with pytest.raises(JsonFormError):
            digest_kernel.canonical([1j])
        return [inner, digest_kernel.digest(0, "N", {"b": 1, "a": 2})]

    expected = again()
    value = {"y": [1, Hooked(again), 2], "x": Hooked(again)}
    text, _ = digest_kernel.encode_digest(0, "N", value)
    assert digest_kernel.decode(text) == {"y": [1, expected, 2], "x": expected}
