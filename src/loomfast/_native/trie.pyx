"""The trie kernel, compiled: `Trie` and `Table` as specified by `_pure/trie.py`, which see for what they mean.

What lives here: the two classes, argument checks, iteration and the persisted form. The structure they
share, and why a write to the newest version costs no copy, is explained in `lineage.pxd`; its nodes are in
`nodes.pxd`. The functions are inline in those files, so that each kernel's C compiler sees all of them.
"""

cimport cython
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject, PyObject_Hash
from cpython.unicode cimport PyUnicode_CheckExact
from libc.string cimport memset

from loomfast._native.lineage cimport (
    Bump,
    Lineage,
    Version,
    apply_all,
    bump_now,
    claim,
    defer,
    end_if_deserted,
    equal,
    leave,
    look,
    next_leaf,
    own_slot,
    settle,
    succeed,
    supersede,
    sweep,
)
from loomfast._native.nodes cimport (
    INLINE,
    BULK,
    PLAIN,
    Debris,
    Leaf,
    Py_INCREF,
    Py_REFCNT,
    Slot,
    inline_count,
    loom_as_u64,
    mix,
    release,
    seen_as_of,
    slot_at,
    sole_count,
    u32,
    u64,
    unmix,
)

import re

from loomfast._errors import BadInputError, BadSnapshotError

REVISION = 3

cdef enum:
    LARGE = 524288  # digests from which on a bulk load makes arenas

# Counts are persisted as JSON numbers; beyond this, kernels in other languages would round them.
MAX_COUNT = 2**53 - 1

cdef Py_ssize_t _WIDTH = 16
cdef object _HEX = re.compile(r"[0-9a-f]{16}", re.ASCII)


cdef u64 _checked_digest(object digest) except? 0:
    if not PyLong_CheckExact(digest):
        raise BadInputError(f"digest: must be an int, not {type(digest).__name__}")
    try:
        return loom_as_u64(digest)
    except OverflowError:
        raise BadInputError("digest: must be in 0 <= digest < 2**64") from None


cdef u64 _hash_of(object key) except? 0:
    if not PyUnicode_CheckExact(key) and not PyLong_CheckExact(key):
        raise BadInputError(f"key: must be a str or an int, not {type(key).__name__}")
    return mix(<u64>PyObject_Hash(key))


cdef object _give(Version* version, u64 hash, object key, object value):
    """Give a key its value in a version that may be written; return its value before, or None."""
    cdef Debris debris
    cdef bint fresh = False
    cdef Slot* slot
    cdef object before = None
    debris.size = 0
    try:
        slot = claim(version.line, hash, <PyObject*>key, &debris, NULL, 60, &fresh)
        if fresh:
            slot.word = <u64><PyObject*>value
            slot.number = version.number
            slot.key = <PyObject*>key
            Py_INCREF(slot.key)
            version.size += 1
            version.line.slots += 1
        else:
            before = <object><PyObject*>slot.word
            supersede(version.line, slot, <u64><PyObject*>value, version.number, version, &debris)
        Py_INCREF(<PyObject*>value)
        if version.line.sweeping:
            sweep(version.line, &debris)
    finally:
        release(&debris, True)
    return before


# --- iteration ------------------------------------------------------------------------------------


@cython.final
@cython.no_gc
@cython.auto_pickle(False)
cdef class _Entries:
    """Iterates over keys, or pairs, one leaf at a time; `source` may gain further versions meanwhile."""

    cdef object source
    cdef Version* version
    cdef u64 cursor
    cdef bint done
    cdef bint keyed
    cdef bint paired
    cdef list batch  # key, value, key, value, ...
    cdef Py_ssize_t position

    def __iter__(self):
        return self

    def __next__(self):
        while self.position == len(self.batch):
            if self.done:
                raise StopIteration
            self.refill()
        key, value = self.batch[self.position], self.batch[self.position + 1]
        self.position += 2
        return (key, value) if self.paired else key

    cdef int refill(self) except -1:
        # The list is made before the leaf is found: it is the one thing here that may run foreign code.
        cdef list batch = []
        cdef u32 index
        cdef u32 limit = 0
        cdef u64 word = 0
        cdef Slot* slot
        self.batch = batch
        self.position = 0
        cdef Leaf* leaf = next_leaf(self.version, &self.cursor, &self.done, &limit)
        if leaf == NULL:
            return 0
        for index in range(leaf.size):
            slot = slot_at(leaf, index, self.keyed)
            if seen_as_of(slot, limit, self.keyed, &word):
                batch.append(<object>slot.key if self.keyed else unmix(slot.hash))
                batch.append(<object><PyObject*>word if self.keyed else word)
        return 0


cdef _Entries _entries(object source, Version* version, bint keyed, bint paired):
    cdef _Entries entries = _Entries.__new__(_Entries)
    entries.source = source
    entries.version = version
    entries.keyed = keyed
    entries.paired = paired
    entries.batch = []
    return entries


# --- the classes ----------------------------------------------------------------------------------


@cython.final
@cython.no_gc
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class Trie:
    """An immutable count of stamped emits by digest (ADR 0102 D5)."""

    def __init__(self):
        pass  # so that arguments are refused

    def __dealloc__(self):
        leave(&self.at)

    cdef u64 count(self, u64 digest) except? 0:
        cdef u64 word = 0
        apply_all(&self.at)
        return word if look(&self.at, mix(digest), NULL, False, &word) else 0

    cdef Trie bumped(self, u64 digest):
        cdef Trie bumped = Trie.__new__(Trie)
        succeed(&bumped.at, &self.at, False)
        defer(&bumped.at, mix(digest))
        return bumped

    cdef Trie drafted(self):
        cdef Trie draft = Trie.__new__(Trie)
        apply_all(&self.at)
        equal(&draft.at, &self.at)
        return draft

    cdef int bump_drafted(self, u64 digest) except -1:
        cdef Lineage* left = settle(&self.at, False)
        try:
            defer(&self.at, mix(digest))
        finally:
            if left != NULL:
                end_if_deserted(left)
        return 0

    cdef int bump_all(self, u64* digests, size_t size, u64* scratch) except -1:
        """Bump `size` digests in a draft, sorted roughly into `scratch`, which has room for as many."""
        cdef size_t[4096] ends
        cdef size_t at
        cdef size_t below = 0
        cdef size_t count
        cdef Bump bump
        cdef Lineage* left = settle(&self.at, False)
        memset(ends, 0, sizeof(ends))
        for at in range(size):
            digests[at] = mix(digests[at])
            ends[digests[at] >> 52] += 1
        for at in range(4096):
            count = ends[at]
            ends[at] = below
            below += count
        for at in range(size):
            scratch[ends[digests[at] >> 52]] = digests[at]
            ends[digests[at] >> 52] += 1
        try:
            apply_all(&self.at)
            if self.at.size + size >= LARGE:
                self.at.line.memory = BULK
            bump.version = &self.at
            bump.number = self.at.number
            bump.ref = NULL
            bump.shift = 60
            for at in range(size):
                bump.hash = scratch[at]
                bump_now(self.at.line, &bump)
        finally:
            self.at.line.memory = PLAIN
            if left != NULL:
                end_if_deserted(left)
        return 0

    def get(self, digest):
        """Return how often `digest` was bumped, 0 if never. Raises `BadInputError`."""
        return self.count(_checked_digest(digest))

    def bump(self, digest):
        """Return a version in which `digest` counts one more; this one stays as it is.

        A count that has reached `MAX_COUNT` stays there. Raises `BadInputError` if `digest` is none.
        """
        return self.bumped(_checked_digest(digest))

    def draft(self):
        """Return an equal version that only the caller holds, to be written with `bump_in_place`."""
        return self.drafted()

    def bump_in_place(self, digest):
        """Count `digest` once more in this version. Only for a draft that nobody else has seen.

        Raises `BadInputError` as `bump` does.
        """
        self.bump_drafted(_checked_digest(digest))

    def items(self):
        """Iterate over `(digest, count)`, in an order of its own."""
        apply_all(&self.at)
        return _entries(self, &self.at, False, True)

    def to_json(self):
        """Return the persisted form: three levels of 16 slots, leaves `{digest: count}` sorted by digest."""
        root = [None] * _WIDTH
        for digest, count in sorted(self.items()):
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
    def from_json(cls, value):
        """Read what `to_json` writes. Leaves may be in any order; empty lists and leaves below the root,
        which no fold writes, are refused. Raises `BadSnapshotError` with the path of the offending part.
        """
        cdef Trie trie = Trie.__new__(Trie)
        cdef u64 hash
        cdef Debris debris
        cdef bint fresh = False
        cdef Slot* slot
        debris.size = 0
        for digest, count in _checked_leaves(value):
            settle(&trie.at, False)
            hash = mix(_checked_digest(digest))
            slot = claim(trie.at.line, hash, NULL, &debris, NULL, 60, &fresh)
            slot.word = inline_count(0, trie.at.number)  # in case of no memory for what it really is
            slot.word = sole_count(count, trie.at.number)
            trie.at.line.chained = trie.at.line.chained or not slot.word & INLINE
            trie.at.size += 1
            trie.at.line.size += 1
            trie.at.line.slots += 1
        return trie

    def __len__(self):
        apply_all(&self.at)
        return self.at.size

    def __iter__(self):
        apply_all(&self.at)
        return _entries(self, &self.at, False, False)

    def __eq__(self, other):
        if not isinstance(other, Trie):
            return NotImplemented
        cdef Trie trie = <Trie>other
        apply_all(&self.at)
        apply_all(&trie.at)
        if self.at.line == trie.at.line and self.at.number == trie.at.number:
            return True
        if self.at.size != trie.at.size:
            return False
        cdef u64 cursor = 0
        cdef u64 word = 0
        cdef u64 theirs = 0
        cdef u32 limit = 0
        cdef u32 index
        cdef bint done = False
        cdef Leaf* leaf
        cdef Slot* slot
        while True:
            leaf = next_leaf(&self.at, &cursor, &done, &limit)
            if leaf == NULL:
                return True
            for index in range(leaf.size):
                slot = slot_at(leaf, index, False)
                if seen_as_of(slot, limit, False, &word):
                    if not look(&trie.at, slot.hash, NULL, False, &theirs) or theirs != word:
                        return False

    def __repr__(self):
        return f"<Trie of {len(self)} digests>"


def _checked_leaves(value):
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


def _checked_slots(field, value, depth):
    if type(value) is not list or len(value) != _WIDTH:
        raise BadSnapshotError(field, "must be a list of 16 slots")
    filled = [(slot, below) for slot, below in enumerate(value) if below is not None]
    if depth and not filled:
        raise BadSnapshotError(field, "must have a slot that is not null")
    return iter(filled)


@cython.final
@cython.no_gc
@cython.freelist(64)
@cython.auto_pickle(False)
cdef class Table:
    """An immutable map from `str` or `int` keys (exactly these types) to objects.

    Values are held, never copied. They must not refer back to a table that holds them: the collector does
    not look inside.
    """

    def __init__(self):
        pass  # so that arguments are refused

    def __dealloc__(self):
        leave(&self.at)

    cdef Table drafted(self):
        cdef Table draft = Table.__new__(Table)
        equal(&draft.at, &self.at)
        return draft

    cdef object exchange(self, object key, object value):
        """Set `key` in place; return the value it had, or None."""
        cdef u64 hash = _hash_of(key)
        cdef Lineage* left = settle(&self.at, True)
        try:
            return _give(&self.at, hash, key, value)
        finally:
            if left != NULL:
                end_if_deserted(left)

    cdef PyObject* sole(self, object key) except? NULL:
        """Return the value of `key`, borrowed, if this version gave it and nobody else can see it, else NULL."""
        cdef Slot* slot = own_slot(&self.at, _hash_of(key), <PyObject*>key)
        return <PyObject*>slot.word if slot != NULL and Py_REFCNT(<PyObject*>slot.word) == 1 else NULL

    def get(self, key, default=None):
        """Return the value of `key`, or `default`. Raises `BadInputError` for a key of another type."""
        cdef u64 word = 0
        return <object><PyObject*>word if look(&self.at, _hash_of(key), <PyObject*>key, True, &word) else default

    def set(self, key, value):
        """Return a version in which `key` has `value`; this one stays as it is. Raises `BadInputError`."""
        cdef u64 hash = _hash_of(key)
        cdef Table changed = Table.__new__(Table)
        succeed(&changed.at, &self.at, True)
        _give(&changed.at, hash, key, value)
        return changed

    def draft(self):
        """Return an equal version that only the caller holds, to be written with `set_in_place`."""
        return self.drafted()

    def set_in_place(self, key, value):
        """Give `key` its value in this version. Only for a draft that nobody else has seen."""
        self.exchange(key, value)

    def items(self):
        """Iterate over `(key, value)`, in an order of its own."""
        return _entries(self, &self.at, True, True)

    def __len__(self):
        return self.at.size

    def __iter__(self):
        return _entries(self, &self.at, True, False)

    def __contains__(self, key):
        cdef u64 word = 0
        return look(&self.at, _hash_of(key), <PyObject*>key, True, &word)

    def __eq__(self, other):
        if not isinstance(other, Table):
            return NotImplemented
        cdef Table table = <Table>other
        if self.at.line == table.at.line and self.at.number == table.at.number:
            return True
        if self.at.size != table.at.size:
            return False
        missing = object()
        for key, value in self.items():
            theirs = table.get(key, missing)
            if theirs is not value and theirs != value:
                return False
        return True

    def __repr__(self):
        return f"<Table of {len(self)} keys>"
