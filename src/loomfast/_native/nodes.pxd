"""The nodes of the multi-version trie in `lineage.pxd`, which explains them: C memory only.

What lives here: slots, leaves and branches; finding, copying, splitting and releasing them. What must not:
which version may write what. Invariant: a node is referred to by tagged addresses, and counts them.
"""

from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from cpython.object cimport Py_EQ, PyObject
from libc.string cimport memcpy, memset

ctypedef unsigned long long u64
ctypedef unsigned int u32

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject* value) noexcept  # reads a field
    void Py_INCREF(PyObject* value) noexcept  # counts: cannot raise
    void Py_DECREF(PyObject* value) noexcept  # a destructor's error is reported, not raised
    bint PyObject_RichCompareBool(PyObject* left, PyObject* right, int operator) noexcept  # see same_key

cdef extern from *:
    """
    #if defined(_MSC_VER)
      #include <intrin.h>
      static __inline int loom_lowest_bit(unsigned long long word) {
          unsigned long at; _BitScanForward64(&at, word); return (int)at; }
      #define loom_prefetch(p) ((void)(p))
    #else
      #define loom_lowest_bit(word) __builtin_ctzll(word)
      /* The empty statement keeps GCC from dropping functions that do nothing but prefetch. */
      #define loom_prefetch(p) do { __builtin_prefetch(p); __asm__ volatile (""); } while (0)
    #endif
    #define loom_as_u64(value) \
        (sizeof(size_t) == 8 ? PyLong_AsSize_t(value) : PyLong_AsUnsignedLongLong(value))
    #define LOOM_FROZEN 0xFFFFFFFFu
    #define LOOM_MAX_COUNT 0x1FFFFFFFFFFFFFULL
    #define LOOM_ONES 0x0101010101010101ULL
    #define LOOM_HIGHS 0x8080808080808080ULL
    """
    const u32 FROZEN "LOOM_FROZEN"  # as `Lineage.newest`: equals no version's number
    const u64 HIGHEST_COUNT "LOOM_MAX_COUNT"  # 2^53 - 1: beyond it, kernels in other languages would round
    const u64 ONES "LOOM_ONES"
    const u64 HIGHS "LOOM_HIGHS"
    u64 loom_as_u64(object value) except? 0xFFFFFFFFFFFFFFFFULL  # the faster of two functions that do this
    int loom_lowest_bit(unsigned long long word) noexcept nogil  # a macro or an instruction: cannot raise
    void loom_prefetch(const void* address) noexcept nogil  # a hint: cannot raise

cdef extern from "leaf_arena.h":
    void* loom_arena_take(int at, size_t bytes, bint grow) noexcept nogil  # C: returns NULL instead
    void loom_arena_return(void* block) noexcept nogil  # frees: cannot raise

# A reference to a node is its address with these bits set; 0 is the empty reference.
cdef enum:
    LEAF = 1
    FOREIGN = 2  # belongs to a frozen lineage; read as of the limit beside this reference
    VALUE = 4  # in a Debris only: a Python object

# A count is the last record of its history, or, if it has none, inline: this bit, the count below 2^31 above
# it, and above that the number of the version that wrote it.
cdef enum:
    INLINE = 1

cdef enum Memory:  # where a new leaf is to be
    PLAIN
    POOLED  # in an arena that has room
    BULK  # in an arena, a new one if need be

cdef enum:
    FULL = 48  # a leaf of so many slots is split, unless no hash bits are left; a leaf up to its slots: 64 bytes
    LEVELS = 16  # of branches, at most: one for each hex digit of a hash


cdef struct Past:  # a value that a slot had before, or a count that it has now
    Past* older
    Past* jump
    u64 word
    u32 number  # of the version that wrote it
    u32 length  # of the chain from here


cdef struct Slot:
    u64 hash
    u64 word  # a count (see INLINE), or a PyObject* that is owned
    PyObject* key  # owned; this and what follows only slots of a keyed lineage have (see `slot_size`)
    Past* past
    u32 number  # of the version that wrote `word`
    u32 spare


cdef struct Leaf:
    u32 references
    u32 size  # the capacity follows from it: see `capacity`
    u32 pooled  # whether its memory is from `leaf_arena.h`
    u32 spare
    u64 tags[6]  # the low byte of each of the first FULL hashes; slots follow


cdef struct Branch:
    u32 references
    u32 spare
    size_t child[16]
    u32 limit[16]  # only copies have this member: a branch that a split made has no foreign children


cdef struct Debris:  # released when the write that made it is done
    u32 size
    size_t refs[64]  # two paths of at most 17 nodes, POPS + 2 values


# --- slots and leaves -----------------------------------------------------------------------------


cdef inline u64 mix(u64 word) noexcept:  # arithmetic: cannot raise
    """A bijection that spreads any regular set of words over all bits."""
    word = (word ^ (word >> 32)) * 0xD6E8FEB86659FD93ULL
    word = (word ^ (word >> 32)) * 0xD6E8FEB86659FD93ULL
    return word ^ (word >> 32)


cdef inline u64 unmix(u64 word) noexcept:  # arithmetic: cannot raise
    word = (word ^ (word >> 32)) * 0xCFEE444D8B59A89BULL
    word = (word ^ (word >> 32)) * 0xCFEE444D8B59A89BULL
    return word ^ (word >> 32)


cdef inline size_t slot_size(bint keyed) noexcept:  # arithmetic: cannot raise
    return sizeof(Slot) if keyed else 2 * sizeof(u64)


cdef inline Slot* slot_at(Leaf* leaf, u32 index, bint keyed) noexcept:  # arithmetic: cannot raise
    return <Slot*>(<char*>leaf + sizeof(Leaf) + index * slot_size(keyed))


cdef inline Leaf* as_leaf(size_t ref) noexcept:  # a cast: cannot raise
    return <Leaf*>(ref & ~<size_t>(LEAF | FOREIGN))


cdef inline Branch* as_branch(size_t ref) noexcept:  # a cast: cannot raise
    return <Branch*>(ref & ~<size_t>(LEAF | FOREIGN))


cdef inline u32* references(size_t ref) noexcept:  # a cast: cannot raise; both kinds of node begin with it
    return <u32*>(ref & ~<size_t>(LEAF | FOREIGN))


cdef inline u32 capacity(u32 size) noexcept:  # arithmetic: cannot raise
    """How many slots a leaf of `size` has room for: the fewer steps, the less is copied on growing."""
    cdef u32 slots = FULL
    if size <= 8:
        return 8
    if size <= 24:
        return 24
    while slots < size:
        slots *= 2
    return slots


cdef inline size_t leaf_bytes(u32 slots, bint keyed) noexcept:  # arithmetic: cannot raise
    return sizeof(Leaf) + slots * slot_size(keyed)


cdef inline Leaf* new_leaf(u32 size, bint keyed, Memory memory) except NULL:
    cdef Leaf* leaf = NULL
    cdef size_t bytes = leaf_bytes(capacity(size), keyed)
    if memory != PLAIN and not keyed and size <= FULL:
        leaf = <Leaf*>loom_arena_take(0 if size <= 8 else 1 if size <= 24 else 2, bytes, memory == BULK)
    cdef bint pooled = leaf != NULL
    if not pooled:
        leaf = <Leaf*>PyMem_Malloc(bytes)
        if leaf == NULL:
            raise MemoryError()
    memset(leaf, 0, sizeof(Leaf))
    leaf.references = 1
    leaf.pooled = pooled
    return leaf


cdef inline void drop_leaf(Leaf* leaf) noexcept:  # frees: cannot raise
    """Free the memory of a leaf, not what it owns."""
    if leaf.pooled:
        loom_arena_return(leaf)
    else:
        PyMem_Free(leaf)


cdef inline Memory memory_like(Leaf* leaf, Memory memory) noexcept:  # compares: cannot raise
    """Where a leaf is to be that replaces `leaf`: in an arena too, unless there is no room."""
    return POOLED if memory == PLAIN and leaf.pooled else memory


cdef inline Leaf* grown_leaf(Leaf* leaf, bint keyed, Memory memory) except NULL:
    """Return a leaf with room for one slot more; the old one is freed."""
    cdef Leaf* grown = new_leaf(leaf.size + 1, keyed, memory_like(leaf, memory))
    cdef u32 pooled = grown.pooled
    memcpy(grown, leaf, leaf_bytes(leaf.size, keyed))
    grown.pooled = pooled
    drop_leaf(leaf)
    return grown


cdef inline Slot* append_slot(Leaf* leaf, u64 hash, bint keyed) noexcept:  # the caller made room: cannot raise
    cdef u32 index = leaf.size
    if index < FULL:
        leaf.tags[index >> 3] |= (hash & 0xFF) << ((index & 7) * 8)
    leaf.size = index + 1
    cdef Slot* slot = slot_at(leaf, index, keyed)
    slot.hash = hash
    if keyed:
        slot.past = NULL
        slot.spare = 0
    return slot


cdef inline bint same_key(PyObject* left, PyObject* right) noexcept:  # exact str and int only: cannot raise
    return left == right or PyObject_RichCompareBool(left, right, Py_EQ)


cdef inline Slot* find_slot(Leaf* leaf, u64 hash, PyObject* key, bint keyed) noexcept:  # compares: cannot raise
    cdef u64 matches
    cdef u64 wanted = (hash & 0xFF) * ONES
    cdef u32 group = 0
    cdef u32 index
    cdef Slot* slot
    while group < leaf.size and group < FULL:
        # A byte that equals the tag becomes 0 and sets its high bit; bytes above it may do so by mistake.
        matches = leaf.tags[group >> 3] ^ wanted
        matches = (matches - ONES) & ~matches & HIGHS
        while matches:
            index = group + (loom_lowest_bit(matches) >> 3)
            if index >= leaf.size:
                break
            slot = slot_at(leaf, index, keyed)
            if slot.hash == hash and (not keyed or same_key(slot.key, key)):
                return slot
            matches &= matches - 1
        group += 8
    for index in range(FULL, leaf.size):
        slot = slot_at(leaf, index, keyed)
        if slot.hash == hash and (not keyed or same_key(slot.key, key)):
            return slot
    return NULL


cdef inline Slot* likely_slot(Leaf* leaf, u64 hash, bint keyed) noexcept:  # arithmetic: cannot raise
    """Return the first slot whose tag fits, else the one to be appended, without looking at either."""
    cdef u64 matches
    cdef u64 wanted = (hash & 0xFF) * ONES
    cdef u32 group
    for group in range(0, FULL, 8):
        matches = leaf.tags[group >> 3] ^ wanted
        matches = (matches - ONES) & ~matches & HIGHS
        if matches:
            return slot_at(leaf, group + (loom_lowest_bit(matches) >> 3), keyed)
    return slot_at(leaf, leaf.size, keyed)


cdef inline Past* new_past(u64 word, u32 number) except NULL:
    cdef Past* past = <Past*>PyMem_Malloc(sizeof(Past))
    if past == NULL:
        raise MemoryError()
    past.word = word
    past.number = number
    return past


cdef inline void chain(Past* past, Past* older) noexcept:  # pointers: cannot raise
    """Put `past` on top of a chain: its jump is as long as two equal jumps below it together, or 1."""
    cdef Past* jump = older.jump if older != NULL else NULL
    cdef u32 at = jump.length if jump != NULL else 0
    cdef Past* further = jump.jump if jump != NULL else NULL
    past.older = older
    past.jump = older
    past.length = 1
    if older != NULL:
        past.length = older.length + 1
        if older.length - at == at - (further.length if further != NULL else 0):
            past.jump = further


cdef inline bint fits(u64 count) noexcept:  # compares: cannot raise
    """Whether a count without a history needs no record."""
    return count < 1U << 31


cdef inline u64 inline_count(u64 count, u32 number) noexcept:  # arithmetic: cannot raise
    return <u64>number << 32 | count << 1 | INLINE


cdef inline u64 sole_count(u64 count, u32 number) except 0:
    """Return the word of a count without a history."""
    cdef Past* past
    if fits(count):
        return inline_count(count, number)
    past = new_past(count, number)
    chain(past, NULL)
    return <u64>past


cdef inline u64 newest_count(Slot* slot) noexcept:  # follows a pointer: cannot raise
    return (slot.word & 0xFFFFFFFFU) >> 1 if slot.word & INLINE else (<Past*>slot.word).word


cdef inline bint seen_as_of(Slot* slot, u32 number, bint keyed, u64* word) noexcept:  # follows pointers: cannot raise
    """Whether the slot had a value when `number` was the newest version, and which."""
    cdef Past* past
    if keyed:
        if slot.number <= number:
            word[0] = slot.word
            return True
        past = slot.past
    elif slot.word & INLINE:
        word[0] = newest_count(slot)
        return slot.word >> 32 <= number
    else:
        past = <Past*>slot.word
    while past != NULL and past.number > number:
        past = past.jump if past.jump != NULL and past.jump.number > number else past.older
    if past == NULL:
        return False
    word[0] = past.word
    return True


cdef inline size_t copy_leaf(Leaf* leaf, u32 limit, bint keyed) except? 0:
    """Return a reference to a leaf of what was visible as of `limit`, or the empty reference if nothing was."""
    cdef u32 index
    cdef u32 visible = 0
    cdef u64 word = 0
    cdef Slot* slot
    cdef Slot* copied
    for index in range(leaf.size):
        visible += seen_as_of(slot_at(leaf, index, keyed), limit, keyed, &word)
    if visible == 0:
        return 0
    cdef Leaf* copy = new_leaf(visible, keyed, memory_like(leaf, PLAIN))
    for index in range(leaf.size):
        slot = slot_at(leaf, index, keyed)
        if seen_as_of(slot, limit, keyed, &word):
            copied = append_slot(copy, slot.hash, keyed)
            if keyed:
                copied.word = word
                copied.number = 0
                copied.key = slot.key
                Py_INCREF(slot.key)
                Py_INCREF(<PyObject*>word)
            else:
                try:
                    copied.word = sole_count(word, 0)
                except MemoryError:
                    copied.word = INLINE
                    free_leaf(copy, False, True)
                    raise
    return <size_t>copy | LEAF


cdef inline size_t copy_branch(Branch* branch, u32 limit) except? 0:
    cdef Branch* copy = <Branch*>PyMem_Malloc(sizeof(Branch))
    if copy == NULL:
        raise MemoryError()
    copy.references = 1
    copy.spare = 0
    cdef int index
    cdef size_t ref
    for index in range(16):
        ref = branch.child[index]
        copy.child[index] = ref
        copy.limit[index] = limit
        if ref:
            references(ref)[0] += 1
            copy.child[index] |= FOREIGN
            if ref & FOREIGN:
                copy.limit[index] = branch.limit[index]
    return <size_t>copy


cdef inline size_t copy_node(size_t ref, u32 limit, bint keyed) except? 0:
    return copy_leaf(as_leaf(ref), limit, keyed) if ref & LEAF else copy_branch(as_branch(ref), limit)


cdef inline Branch* split_leaf(Leaf* leaf, int shift, bint keyed, Memory memory) except NULL:
    """Return a branch that holds the slots of `leaf` by the hex digit at `shift`; the leaf itself is freed."""
    cdef size_t size = sizeof(Branch) - sizeof(u32[16])
    cdef Branch* branch = <Branch*>PyMem_Calloc(1, size)
    cdef u32[16] counts
    cdef u32 index
    cdef Slot* slot
    cdef Slot* moved
    if branch == NULL:
        raise MemoryError()
    memset(counts, 0, sizeof(counts))
    for index in range(leaf.size):
        counts[(slot_at(leaf, index, keyed).hash >> shift) & 15] += 1
    try:
        for index in range(16):
            if counts[index]:
                branch.child[index] = <size_t>new_leaf(counts[index], keyed, memory_like(leaf, memory)) | LEAF
    except MemoryError:
        for index in range(16):
            if branch.child[index]:
                drop_leaf(as_leaf(branch.child[index]))
        PyMem_Free(branch)
        raise
    branch.references = 1
    for index in range(leaf.size):
        slot = slot_at(leaf, index, keyed)
        moved = append_slot(as_leaf(branch.child[(slot.hash >> shift) & 15]), slot.hash, keyed)
        memcpy(moved, slot, slot_size(keyed))
    drop_leaf(leaf)
    return branch


# --- letting go -----------------------------------------------------------------------------------


cdef inline void free_leaf(Leaf* leaf, bint keyed, bint chained) noexcept:  # a destructor's error is reported
    """Free a leaf and what it owns. If it is neither keyed nor `chained`, its slots own nothing."""
    cdef u32 index
    cdef Slot* slot
    cdef Past* past
    cdef Past* older
    for index in range(leaf.size if keyed or chained else 0):
        slot = slot_at(leaf, index, keyed)
        if keyed:
            older = slot.past
        else:
            older = NULL if slot.word & INLINE else <Past*>slot.word
        while older != NULL:
            past = older
            older = past.older
            if keyed:
                Py_DECREF(<PyObject*>past.word)
            PyMem_Free(past)
        if keyed:
            Py_DECREF(<PyObject*>slot.word)
            Py_DECREF(slot.key)
    drop_leaf(leaf)


cdef inline void release_node(size_t ref, bint keyed, bint chained) noexcept:  # as free_leaf
    """Drop one reference to a node; free what nothing else refers to. At most 17 nodes deep."""
    # An explicit stack, since an inline function cannot call itself: one partly visited branch per level.
    cdef Branch* path[17]
    cdef u32 visited[17]
    cdef int depth = -1
    while True:
        if ref:
            references(ref)[0] -= 1
            if references(ref)[0] == 0:
                if ref & LEAF:
                    free_leaf(as_leaf(ref), keyed, chained)
                else:
                    depth += 1
                    path[depth] = as_branch(ref)
                    visited[depth] = 0
        while depth >= 0 and visited[depth] == 16:
            PyMem_Free(path[depth])
            depth -= 1
        if depth < 0:
            return
        ref = path[depth].child[visited[depth]]
        visited[depth] += 1


cdef inline void discard(Debris* debris, size_t ref) noexcept:  # stores a word: cannot raise
    debris.refs[debris.size] = ref
    debris.size += 1


cdef inline void release(Debris* debris, bint keyed) noexcept:  # as free_leaf
    cdef u32 index
    for index in range(debris.size):
        if debris.refs[index] & VALUE:
            Py_DECREF(<PyObject*>(debris.refs[index] & ~<size_t>VALUE))
        else:
            release_node(debris.refs[index], keyed, True)


