"""The two persistent maps of the folded state, in plain Python: the specification of the trie kernel.

`Trie` counts stamped emits by 64-bit digest; `Table` holds what the fold knows by key (steps, decisions,
gates). Both are values: a write makes a new version, and whoever holds an older one sees no change. No
event, no JSON text and no I/O is known here.

Theory of operation. The persisted form of ADR 0102 D5 is also the form in memory: three levels of 16-slot
lists over the digest's last three hex digits, then a dict of about k/4096 entries. `bump` copies the path
from the root to one leaf and shares the rest:

    digest 0x00000000000001a7: root[1] -> [10] -> [7] -> {0x1a7: count}
    t1 = Trie().bump(0x1a7)       makes 3 lists and 1 leaf
    t2 = t1.bump(0x1a8)           copies root, root[1], root[1][10]; makes leaf [8]; shares leaf [7]

A `draft` is a version that one fold pass writes in place. It remembers by `id` the nodes it has made, which
nobody else can reach; a node it has not made is copied first, once. Handing out a further version of a
draft (`draft`, `bump`, `set`) ends its ownership of those nodes, so what was handed out stays as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar

from loomfast._errors import BadInputError, BadSnapshotError

REVISION = 3

# Counts are persisted as JSON numbers; beyond this, kernels in other languages would round them.
MAX_COUNT = 2**53 - 1

_WIDTH = 16
_HEX = re.compile(r"[0-9a-f]{16}", re.ASCII)

_Value = TypeVar("_Value")
_Node = list[Any]  # a level: 16 nodes of the next level, or leaves, or None


def _checked_digest(digest: object) -> int:
    if type(digest) is not int:
        raise BadInputError(f"digest: must be an int, not {type(digest).__name__}")
    if not 0 <= digest < 2**64:
        raise BadInputError("digest: must be in 0 <= digest < 2**64")
    return digest


def _checked_key(key: object) -> str | int:
    if type(key) is not str and type(key) is not int:
        raise BadInputError(f"key: must be a str or an int, not {type(key).__name__}")
    return key


class _Paths:
    """The 4,096 leaves under three levels, and the rule who may write which of their nodes."""

    __slots__ = ("_count", "_owned", "_root")

    def __init__(self) -> None:
        self._root: _Node | None = None
        self._count = 0
        self._owned: set[int] = set()

    def _leaf(self, position: int) -> dict[Any, Any] | None:
        node: Any = self._root
        for shift in (8, 4, 0):
            if node is None:
                return None
            node = node[position >> shift & 15]
        return node  # type: ignore[no-any-return]  # the third level holds leaves

    def _own_leaf(self, position: int) -> dict[Any, Any]:
        """Return the leaf at `position` for writing; nodes not owned on the way are copied, and now are."""
        owned = self._owned
        root = self._root
        if root is None or id(root) not in owned:
            self._root = root = [None] * _WIDTH if root is None else root.copy()
            owned.add(id(root))
        node = root
        for shift in (8, 4):
            slot = position >> shift & 15
            child = node[slot]
            if child is None or id(child) not in owned:
                node[slot] = child = [None] * _WIDTH if child is None else child.copy()
                owned.add(id(child))
            node = child
        leaf: dict[Any, Any] | None = node[position & 15]
        if leaf is None or id(leaf) not in owned:
            node[position & 15] = leaf = {} if leaf is None else leaf.copy()
            owned.add(id(leaf))
        return leaf

    def _share_with(self, other: _Paths) -> None:
        other._root = self._root
        other._count = self._count
        self._owned = set()

    def _items(self) -> Iterator[tuple[Any, Any]]:
        for first in self._root or ():
            for second in first or ():
                for leaf in second or ():
                    yield from (leaf or {}).items()

    def __len__(self) -> int:
        return self._count


class Trie(_Paths):
    """An immutable count of stamped emits by digest (ADR 0102 D5)."""

    __slots__ = ()

    def get(self, digest: int) -> int:
        """Return how often `digest` was bumped, 0 if never. Raises `BadInputError`."""
        leaf = self._leaf(_checked_digest(digest) & 0xFFF)
        return 0 if leaf is None else leaf.get(digest, 0)

    def bump(self, digest: int) -> Trie:
        """Return a version in which `digest` counts one more; this one stays as it is.

        A count that has reached `MAX_COUNT` stays there. Raises `BadInputError` if `digest` is none.
        """
        bumped = self.draft()
        bumped.bump_in_place(digest)
        bumped._owned = set()
        return bumped

    def draft(self) -> Trie:
        """Return an equal version that only the caller holds, to be written with `bump_in_place`."""
        draft = Trie()
        self._share_with(draft)
        return draft

    def bump_in_place(self, digest: int) -> None:
        """Count `digest` once more in this version. Only for a draft that nobody else has seen.

        Raises `BadInputError` as `bump` does.
        """
        count = self.get(digest)
        self._own_leaf(digest & 0xFFF)[digest] = min(count + 1, MAX_COUNT)
        self._count += count == 0

    def items(self) -> Iterator[tuple[int, int]]:
        """Iterate over `(digest, count)`, in an order of its own."""
        return self._items()

    def to_json(self) -> list[Any]:
        """Return the persisted form: three levels of 16 slots, leaves `{digest: count}` sorted by digest."""
        root: list[Any] = [None] * _WIDTH
        for digest, count in sorted(self._items()):
            node = root
            for shift in (8, 4):
                slot = digest >> shift & 15
                if node[slot] is None:
                    node[slot] = [None] * _WIDTH
                node = node[slot]
            if node[digest & 15] is None:
                node[digest & 15] = {}
            node[digest & 15][f"{digest:016x}"] = count
        return root

    @classmethod
    def from_json(cls, value: object) -> Trie:
        """Read what `to_json` writes. Leaves may be in any order; empty lists and leaves below the root,
        which no fold writes, are refused. Raises `BadSnapshotError` with the path of the offending part.
        """
        trie = cls()
        for digest, count in _checked_leaves(value):
            trie._own_leaf(digest & 0xFFF)[digest] = count
            trie._count += 1
        trie._owned = set()
        return trie

    def __iter__(self) -> Iterator[int]:
        return (digest for digest, _ in self._items())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trie):
            return NotImplemented
        if self._root is other._root:
            return True
        return len(self) == len(other) and all(other.get(digest) == count for digest, count in self._items())

    __hash__ = None  # type: ignore[assignment]  # a draft changes, so no version promises a hash

    def __repr__(self) -> str:
        return f"<Trie of {len(self)} digests>"


def _checked_leaves(value: object) -> Iterator[tuple[int, int]]:
    """Yield the `(digest, count)` of a persisted trie, refusing whatever `to_json` would not write."""
    for first, level in _checked_slots("_flowEmits", value, 0):
        for second, lower in _checked_slots(f"_flowEmits[{first}]", level, 1):
            for third, leaf in _checked_slots(f"_flowEmits[{first}][{second}]", lower, 2):
                field = f"_flowEmits[{first}][{second}][{third}]"
                if type(leaf) is not dict or not leaf:
                    raise BadSnapshotError(field, "must be a non-empty object of counts by digest")
                for name, count in leaf.items():
                    if type(name) is not str or not _HEX.fullmatch(name):
                        raise BadSnapshotError(field, "must name its counts by 16 lower-case hex digits")
                    digest = int(name, 16)
                    if digest & 0xFFF != first << 8 | second << 4 | third:
                        raise BadSnapshotError(field, f"digest {name} belongs to another leaf")
                    if type(count) is not int or not 1 <= count <= MAX_COUNT:
                        raise BadSnapshotError(f"{field}.{name}", f"must be a whole number, 1 to {MAX_COUNT}")
                    yield digest, count


def _checked_slots(field: str, value: object, depth: int) -> Iterator[tuple[int, object]]:
    if type(value) is not list or len(value) != _WIDTH:
        raise BadSnapshotError(field, "must be a list of 16 slots")
    filled = [(slot, below) for slot, below in enumerate(value) if below is not None]
    if depth and not filled:
        raise BadSnapshotError(field, "must have a slot that is not null")
    return iter(filled)


class Table(_Paths):
    """An immutable map from `str` or `int` keys (exactly these types) to objects.

    Values are held, never copied. They must not refer back to a table that holds them: the collector does
    not look inside.
    """

    __slots__ = ()

    def get(self, key: str | int, default: Any = None) -> Any:
        """Return the value of `key`, or `default`. Raises `BadInputError` for a key of another type."""
        leaf = self._leaf(hash(_checked_key(key)) & 0xFFF)
        return default if leaf is None else leaf.get(key, default)

    def set(self, key: str | int, value: object) -> Table:
        """Return a version in which `key` has `value`; this one stays as it is. Raises `BadInputError`."""
        changed = self.draft()
        changed.set_in_place(key, value)
        changed._owned = set()
        return changed

    def draft(self) -> Table:
        """Return an equal version that only the caller holds, to be written with `set_in_place`."""
        draft = Table()
        self._share_with(draft)
        return draft

    def set_in_place(self, key: str | int, value: object) -> None:
        """Give `key` its value in this version. Only for a draft that nobody else has seen."""
        leaf = self._own_leaf(hash(_checked_key(key)) & 0xFFF)
        self._count += key not in leaf
        leaf[key] = value

    def items(self) -> Iterator[tuple[str | int, Any]]:
        """Iterate over `(key, value)`, in an order of its own."""
        return self._items()

    def __iter__(self) -> Iterator[str | int]:
        return (key for key, _ in self._items())

    def __contains__(self, key: object) -> bool:
        leaf = self._leaf(hash(_checked_key(key)) & 0xFFF)
        return leaf is not None and key in leaf

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        if self._root is other._root:
            return True
        missing = object()
        return len(self) == len(other) and all(
            (theirs := other.get(key, missing)) is value or theirs == value for key, value in self._items()
        )

    __hash__ = None  # type: ignore[assignment]  # a draft changes, so no version promises a hash

    def __repr__(self) -> str:
        return f"<Table of {len(self)} keys>"
