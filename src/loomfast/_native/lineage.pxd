"""The multi-version radix trie under the native `Trie` and `Table`: C memory only, no Python class.

What lives here: nodes, versions, and how a version is read, written, continued and let go. What must not:
argument checks, the persisted form, anything that knows what a digest or a step is.

Theory of operation
-------------------
A textbook persistent map copies the path to a leaf at every write, about a microsecond however it is coded.
But nearly every write continues the *newest* version. So the versions of one linear history, a *lineage*,
share one mutable 16-way radix trie over a mixed 64-bit hash. A version is just (lineage, number). A slot
holds its newest value inline with the number of the version that wrote it; a value that an older version
still sees moves into the slot's chain of `Past` records. A reader takes the newest value that is not
younger than itself:

    a = {}          b = a.bump(x)     c = b.bump(y)     d = c.bump(x)        numbers a 1, b 2, c 3, d 4
    one leaf:       x: 2 by d(4) -> past: 1 by b(2)          y: 1 by c(3)
    d reads x=2 y=1;   c reads x=1 y=1 (4 is younger than 3);   b reads x=1, no y;   a reads nothing

The rest is what happens when history is not linear, or when versions are let go.

*Branches.* Writing to c again after d exists may not touch their leaf in place. The lineage is *frozen* for
good, and a new lineage begins whose root refers to the old root *as of 3*. Such a reference is *foreign*: its
target belongs to a frozen lineage and is read as of the limit kept beside the reference, for as long as it
lives. The first write through a foreign reference copies one node: a branch node's copy refers to the
same children, foreign in their turn; a leaf's copy keeps only what was visible at the limit, as version 0.
So a branch costs one path copy, never O(k); no read walks a chain of lineages; and nothing pins an origin:
nodes count the references to them, and what no root reaches is freed node by node.

*Small slots.* Nearly every digest is stamped once and never again. So the slot of a count is 16 bytes, the hash
and one word, which holds both the count and the number of its version. Only when an older version must keep
another count does the word become the address of a chain of `Past` records, of which the first is the newest
count. A `Table`'s slots hold object, number and chain side by side.

*Where leaves are.* At a million digests a bump of an arbitrary leaf costs what its cache lines and its page
cost to reach. A leaf's tags end the line that it begins with, and leaves that a large bulk load makes, and
those that replace them, come from huge pages: see `leaf_arena.h`, which says why others do not.

*Old values.* A `Past` record has a jump pointer in the skew-binary pattern of Myers (1983), so finding the
value as of an old version takes O(log n) steps of a chain of n. Records are only ever pushed and popped at the
top, so jump pointers never dangle. (For a count, the top is below its first record, which is chained anew.)

*Letting go.* A lineage links its living versions in order. Before a value is pushed, the records on top that
lie between two neighbours of that list, where no living version can see them, are popped: a
loop that keeps only the newest version keeps at most one old value per slot. What this misses (holders that
come and go in other orders, slots that only dropped versions saw) is counted in `litter`. When litter exceeds
twice the living data, the next write begins a new lineage as a branch does, and each write after it also
copies one further foreign leaf (`sweep`) until none is left. Work per write stays bounded: no pass ever stops
the world, and memory stays within a constant factor of what living versions could see.

*Deferred bumps.* At a million digests, finding a leaf means waiting for memory, longer than all else a bump
does. So a `Trie`'s bump only gives out the number and queues the digest; while further bumps come, the
queue asks for the branch, then for the leaf, and by the time the write is carried out both are in the cache.
Whatever reads, drafts or freezes the lineage carries out the queue first.

*Sorted bumps.* A replay bumps half a million digests in one version, and their order does not matter. They
are carried out by the leading digits of their hashes, so that each leaf is fetched once, not once per bump.

*Deferred release.* A write lets go of nodes and values in its middle. They are noted in a `Debris` and
released at its end, since releasing a value may run code that uses this very lineage.

Mixing is a bijection, so distinct digests always part within 16 levels, and an adversary gains at most those
levels. For a `Table` the hash is Python's; keys of equal hash share an overfull leaf at the last level.
"""

from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject

from loomfast._native.nodes cimport (
    FOREIGN,
    FROZEN,
    FULL,
    HIGHEST_COUNT,
    INLINE,
    LEAF,
    LEVELS,
    VALUE,
    Branch,
    Debris,
    Leaf,
    Memory,
    Past,
    Py_INCREF,
    Slot,
    append_slot,
    as_branch,
    as_leaf,
    capacity,
    chain,
    copy_node,
    discard,
    find_slot,
    fits,
    inline_count,
    grown_leaf,
    likely_slot,
    loom_prefetch,
    new_leaf,
    new_past,
    newest_count,
    references,
    release,
    release_node,
    seen_as_of,
    sole_count,
    split_leaf,
    u32,
    u64,
)

cdef enum:
    PATIENCE = 8  # how many living versions a write looks back over
    POPS = 4  # how many dead records a write pops at most
    STRIDES = 8  # how many ranges that need no copy a sweep skips per write
    GRACE = 1024  # litter that is never worth a new lineage
    QUEUE = 16  # how many bumps may be deferred, a power of two
    HOT_LEVELS = 4  # of branches: those above the last of them fit into a core's own cache
    LOOKAHEAD = 7  # how many bumps after its branch a leaf is asked for, and a slot after its leaf


cdef struct Bump:  # a write that is deferred
    u64 hash
    Version* version  # NULL once nobody holds it
    size_t* ref  # how far its path has been followed: this reference lies on it, in a node of this lineage,
    int shift  # and its branch parts by the digit here; both stay true while the lineage lives
    u32 number


cdef struct Lineage:
    size_t root
    u32 limit  # of a foreign root
    u32 newest  # number of the newest version, or FROZEN
    u64 living  # how many versions there are
    Version* tail  # the newest of them
    u64 slots  # how many slots its versions could see, all together
    u64 litter  # how many records and slots perhaps nobody sees
    u64 unswept  # the same, for what the sweep under way will clear
    u64 cursor  # where that sweep has got to
    u64 size  # of the newest version, without what is queued
    bint sweeping
    bint keyed
    Memory memory  # where leaves that replace none are made
    bint chained  # whether any slot may have a past
    u32 queued  # how many bumps have been queued
    u32 applied  # how many of them have been carried out
    Bump queue[16]  # by their number modulo QUEUE


cdef struct Version:
    Lineage* line  # NULL for a version that was empty from the start
    Version* older  # neighbours in the list of living versions
    Version* newer
    u64 size  # once the queue is carried out
    u32 number
    bint drafted  # whether nobody else has seen this number


# --- lineages and their versions ------------------------------------------------------------------


cdef inline void link(Version* version, Lineage* line, Version* after) noexcept:  # pointers: cannot raise
    """Enter `version` into the list of the living, after `after`, or first if that is NULL."""
    version.line = line
    version.older = after
    version.newer = after.newer if after != NULL else NULL
    if version.newer != NULL:
        version.newer.older = version
    else:
        line.tail = version
    if after != NULL:
        after.newer = version
    line.living += 1


cdef inline void unlink(Version* version) noexcept:  # pointers: cannot raise
    if version.newer != NULL:
        version.newer.older = version.older
    else:
        version.line.tail = version.older
    if version.older != NULL:
        version.older.newer = version.newer
    version.line.living -= 1


cdef inline void end_if_deserted(Lineage* line) noexcept:  # as free_leaf
    cdef size_t root
    cdef bint keyed
    cdef bint chained
    if line.living == 0:
        root = line.root
        keyed = line.keyed
        chained = line.chained
        PyMem_Free(line)
        release_node(root, keyed, chained)


cdef inline void leave(Version* version) noexcept:  # as free_leaf
    """End a version: the destructor of whatever holds it."""
    cdef Lineage* line = version.line
    cdef u32 at
    if line != NULL:
        at = line.queued
        while at != line.applied and line.queue[(at - 1) % QUEUE].number >= version.number:
            at -= 1
            if line.queue[at % QUEUE].version == version:
                line.queue[at % QUEUE].version = NULL
        unlink(version)
        version.line = NULL
        end_if_deserted(line)


cdef inline u64 tolerance(u64 size, u64 living) noexcept:  # arithmetic: cannot raise
    return GRACE + 2 * (size + living)


cdef inline Lineage* begin(Version* base, bint keyed) except NULL:
    """Begin a lineage whose version 0 equals `base`; the lineage of `base` is frozen."""
    cdef Lineage* origin = base.line
    cdef Lineage* line
    apply_all(base)
    line = <Lineage*>PyMem_Calloc(1, sizeof(Lineage))
    if line == NULL:
        raise MemoryError()
    line.keyed = keyed
    line.newest = 1
    line.slots = base.size
    line.size = base.size
    if origin != NULL:
        origin.newest = FROZEN
        line.chained = origin.chained
        line.root = origin.root
        line.limit = origin.limit if origin.root & FOREIGN else base.number
        if line.root:
            line.root |= FOREIGN
            references(line.root)[0] += 1
        line.litter = origin.litter + origin.unswept + (origin.slots - base.size)
        if line.litter > tolerance(base.size, 0):
            line.sweeping = True
            line.unswept = line.litter
            line.litter = 0
    return line


cdef inline bint continues(Version* base) noexcept:  # compares: cannot raise
    """Whether the next version after `base` may be written into its lineage."""
    cdef Lineage* line = base.line
    return (
        line != NULL
        and base.number == line.newest
        and base.number < FROZEN - 1
        and line.litter <= tolerance(base.size, line.living)
    )


cdef inline int succeed(Version* version, Version* base, bint keyed) except -1:
    """Make the unlinked `version` a writable successor of `base`."""
    cdef Lineage* line = base.line
    if continues(base):
        line.newest += 1
    else:
        line = begin(base, keyed)
    version.number = line.newest
    version.size = base.size
    version.drafted = True
    link(version, line, line.tail)
    return 0


cdef inline void equal(Version* version, Version* base) noexcept:  # pointers: cannot raise
    """Make the unlinked `version` another holder of the same number; neither may write under it now."""
    base.drafted = False
    version.number = base.number
    version.size = base.size
    if base.line != NULL:
        link(version, base.line, base)


cdef inline Lineage* settle(Version* version, bint keyed) except? NULL:
    """Give `version` a number of its own, newest in its lineage, unless it has that already.

    Returns a lineage that it has left for a new one, for `end_if_deserted` once the write is done, or NULL.
    """
    cdef Lineage* line = version.line
    cdef Lineage* fresh
    if version.drafted and line.newest == version.number:
        return NULL
    if continues(version):
        unlink(version)
        line.newest += 1
        version.number = line.newest
        link(version, line, line.tail)
        line = NULL
    else:
        fresh = begin(version, keyed)
        if line != NULL:
            unlink(version)
        version.number = fresh.newest
        link(version, fresh, NULL)
    version.drafted = True
    return line


# --- reading --------------------------------------------------------------------------------------


cdef inline bint look(Version* version, u64 hash, PyObject* key, bint keyed, u64* word) noexcept:  # follows pointers: cannot raise
    """Whether `version` has a value for a key, and which."""
    cdef u32 limit = version.number
    cdef size_t ref = 0
    cdef Branch* branch
    cdef Slot* slot
    cdef int shift = 60
    cdef u32 index
    if version.line != NULL:
        ref = version.line.root
        if ref & FOREIGN:
            limit = version.line.limit
    while ref and not ref & LEAF:
        branch = as_branch(ref)
        index = (hash >> shift) & 15
        ref = branch.child[index]
        if ref & FOREIGN:
            limit = branch.limit[index]
        shift -= 4
    if ref == 0:
        return False
    slot = find_slot(as_leaf(ref), hash, key, keyed)
    return slot != NULL and seen_as_of(slot, limit, keyed, word)


cdef inline Slot* own_slot(Version* version, u64 hash, PyObject* key) noexcept:  # as look
    """Return the slot of a keyed lineage that this version wrote and no other sees, or NULL."""
    cdef Bump bump
    cdef Slot* slot
    if not version.drafted or version.line.newest != version.number:
        return NULL
    bump.hash = hash
    bump.ref = &version.line.root
    bump.shift = 60
    approach(&bump, LEVELS)
    if not bump.ref[0] & LEAF or bump.ref[0] & FOREIGN:
        return NULL
    slot = find_slot(as_leaf(bump.ref[0]), hash, key, True)
    return slot if slot != NULL and slot.number == version.number else NULL


cdef inline Leaf* next_leaf(Version* version, u64* cursor, bint* done, u32* limit) noexcept:  # as look
    """Return the leaf at or after `cursor`, which moves behind it, or NULL after the last.

    Needs nothing but the cursor, so the trie may change its shape between two calls.
    """
    cdef size_t ref
    cdef Branch* branch
    cdef int shift
    cdef u32 index
    while not done[0]:
        limit[0] = version.number
        ref = version.line.root if version.line != NULL else 0
        if ref & FOREIGN:
            limit[0] = version.line.limit
        shift = 60
        while ref and not ref & LEAF:
            branch = as_branch(ref)
            index = (cursor[0] >> shift) & 15
            ref = branch.child[index]
            if ref & FOREIGN:
                limit[0] = branch.limit[index]
            shift -= 4
        advance(cursor, shift, done)
        if ref:
            return as_leaf(ref)
    return NULL


cdef inline void advance(u64* cursor, int shift, bint* done) noexcept:  # arithmetic: cannot raise
    """Move to the first hash behind the range of the node whose children would part by the digit at `shift`."""
    cdef int bits = shift + 4
    if bits < 64:
        cursor[0] = ((cursor[0] >> bits) + 1) << bits
    done[0] = bits == 64 or cursor[0] == 0


# --- writing --------------------------------------------------------------------------------------


cdef inline size_t* reach(Lineage* line, u64 hash, Debris* debris, size_t* ref, int* shift) except NULL:
    """Follow a path from `ref`, the root or an own node, on; return where its leaf is referred to.

    What is foreign on the way is copied. `shift` is that of the digit by which children of `ref` part.
    """
    cdef size_t copy
    cdef Branch* branch
    cdef u32 limit = line.limit
    cdef u32 index
    while True:
        if ref[0] & FOREIGN:
            copy = copy_node(ref[0], limit, line.keyed)
            discard(debris, ref[0])
            ref[0] = copy
        if ref[0] == 0 or ref[0] & LEAF:
            return ref
        branch = as_branch(ref[0])
        index = (hash >> shift[0]) & 15
        ref = &branch.child[index]
        if ref[0] & FOREIGN:
            limit = branch.limit[index]
        shift[0] -= 4


cdef inline Slot* claim(
    Lineage* line, u64 hash, PyObject* key, Debris* debris, size_t* ref, int shift, bint* fresh
) except NULL:
    """Return the slot of a key for writing. A fresh one still lacks its word, number and key.

    `ref` and `shift` are as for `reach`; NULL stands for the root.
    """
    cdef Leaf* leaf
    cdef Slot* slot
    fresh[0] = False
    if ref == NULL or ref[0] & FOREIGN:
        ref = &line.root
        shift = 60
    ref = reach(line, hash, debris, ref, &shift)
    if ref[0]:
        slot = find_slot(as_leaf(ref[0]), hash, key, line.keyed)
        if slot != NULL:
            return slot
    while ref[0] and as_leaf(ref[0]).size >= FULL and shift >= 0:
        ref[0] = <size_t>split_leaf(as_leaf(ref[0]), shift, line.keyed, line.memory)
        ref = &as_branch(ref[0]).child[(hash >> shift) & 15]
        shift -= 4
    if ref[0] == 0:
        ref[0] = <size_t>new_leaf(1, line.keyed, line.memory) | LEAF
    leaf = as_leaf(ref[0])
    if leaf.size and leaf.size == capacity(leaf.size):
        leaf = grown_leaf(leaf, line.keyed, line.memory)
        ref[0] = <size_t>leaf | LEAF
    fresh[0] = True
    return append_slot(leaf, hash, line.keyed)


cdef inline bint still_seen(Version** seer, u32 since, u32 number, int* patience) noexcept:  # pointers: cannot raise
    """Whether a version older than `number` perhaps sees what was written by `since`.

    The search begins at `seer`, and leaves it at the last living version before `number`.
    """
    while seer[0] != NULL and seer[0].number >= number and patience[0]:
        seer[0] = seer[0].older
        patience[0] -= 1
    return patience[0] == 0 or (seer[0] != NULL and seer[0].number >= since)


cdef inline void pop_unseen(
    Lineage* line, Past** top, Version* seer, u32 since, int patience, Debris* debris
) noexcept:  # pointers: cannot raise
    """Free records on `top` that no living version sees.

    They are older than a value written by `since`, and `seer` is the last living version that sees that value, if
    any does. `patience` is what `still_seen` has left.
    """
    cdef Past* past
    cdef int pops = POPS
    while top[0] != NULL and seer != NULL and seer.number >= since and patience:
        seer = seer.older
        patience -= 1
    # Now `seer` is the last living version before the slot's value came, unless patience ran out.
    while patience and pops and top[0] != NULL and (seer == NULL or top[0].number > seer.number):
        past = top[0]
        top[0] = past.older
        if line.keyed:
            discard(debris, <size_t>past.word | VALUE)
        PyMem_Free(past)
        line.litter -= 1
        pops -= 1


cdef inline int supersede(
    Lineage* line, Slot* slot, u64 word, u32 number, Version* writer, Debris* debris
) except -1:
    """Give a keyed slot the word that version `number` writes; keep the old one if an older version sees it."""
    cdef Version* seer = writer.older
    cdef Past* past
    cdef int patience = PATIENCE
    if slot.number != number and still_seen(&seer, slot.number, number, &patience):
        past = new_past(slot.word, slot.number)
        pop_unseen(line, &slot.past, seer, slot.number, patience, debris)
        chain(past, slot.past)
        slot.past = past
        line.chained = True
        line.litter += 1
    else:
        discard(debris, <size_t>slot.word | VALUE)
    slot.word = word
    slot.number = number
    return 0


cdef inline int count_on(Lineage* line, Slot* slot, u32 number, Version* writer) except -1:
    """Count once more in version `number`; keep the old count if an older version sees it.

    `writer` is that version, or NULL if nobody holds it any more.
    """
    cdef Version* seer = writer.older if writer != NULL else line.tail
    cdef u64 count = min(newest_count(slot) + 1, HIGHEST_COUNT)
    cdef bint alone = slot.word & INLINE
    cdef Past* past = NULL if alone else <Past*>slot.word
    cdef Past* next
    cdef u32 since = slot.word >> 32 if alone else past.number
    cdef int patience = PATIENCE
    if since != number and still_seen(&seer, since, number, &patience):
        next = new_past(count, number)
        if alone:
            try:
                past = new_past(newest_count(slot), since)
            except MemoryError:
                PyMem_Free(next)
                raise
            past.older = NULL
        else:
            pop_unseen(line, &past.older, seer, since, patience, NULL)
        chain(past, past.older)  # anew, since what its jump led to may be gone
        chain(next, past)
        slot.word = <u64>next
        line.chained = True
        line.litter += 1
    elif alone and fits(count):
        slot.word = inline_count(count, number)
    elif alone:
        slot.word = sole_count(count, number)
        line.chained = True
    else:
        past.word = count
        past.number = number
    return 0


cdef inline int sweep(Lineage* line, Debris* debris) except -1:
    """Copy the next foreign leaf, so that the litter in the old one can be let go."""
    cdef u32 before = debris.size
    cdef int shift
    cdef int stride
    cdef bint done = False
    for stride in range(STRIDES):
        shift = 60
        reach(line, line.cursor, debris, &line.root, &shift)
        advance(&line.cursor, shift, &done)
        if done:
            line.sweeping = False
            line.unswept = 0
        if done or debris.size > before:
            break
    return 0


# --- deferred bumps -------------------------------------------------------------------------------


cdef inline int bump_now(Lineage* line, Bump* bump) except -1:
    cdef Debris debris
    cdef bint fresh = False
    cdef Slot* slot
    debris.size = 0
    try:
        slot = claim(line, bump.hash, NULL, &debris, bump.ref, bump.shift, &fresh)
        if fresh:
            slot.word = inline_count(1, bump.number)
            line.size += 1
            line.slots += 1
        else:
            count_on(line, slot, bump.number, bump.version)
        if bump.version != NULL:
            bump.version.size = line.size
        if line.sweeping:
            sweep(line, &debris)
    finally:
        release(&debris, False)
    return 0


cdef inline int apply_next(Lineage* line) except -1:
    """Carry out the oldest bump in the queue. If that raises, it is still there."""
    bump_now(line, &line.queue[line.applied % QUEUE])
    line.applied += 1
    return 0


cdef inline int apply_all(Version* version) except -1:
    """Carry out every deferred bump in the lineage of `version`."""
    if version.line != NULL:
        while version.line.applied != version.line.queued:
            apply_next(version.line)
    return 0


cdef inline void approach(Bump* bump, int levels) noexcept:  # follows pointers: cannot raise
    """Follow the path of a bump further, up to `levels` levels or the leaf, the void or a foreign node."""
    while levels and bump.ref[0] and not bump.ref[0] & (LEAF | FOREIGN):
        bump.ref = &as_branch(bump.ref[0]).child[(bump.hash >> bump.shift) & 15]
        bump.shift -= 4
        levels -= 1


cdef inline void prefetch_leaf(Version* version, u64 hash) noexcept:  # as approach
    """Have the leaf of a key fetched, for a reader or writer that will come soon."""
    cdef Bump bump
    if version.line != NULL:
        bump.hash = hash
        bump.ref = &version.line.root
        bump.shift = 60
        approach(&bump, LEVELS)
        loom_prefetch(as_leaf(bump.ref[0]))
        loom_prefetch(<char*>as_leaf(bump.ref[0]) + sizeof(Leaf) - 1)


cdef inline int defer(Version* version, u64 hash) except -1:
    """Bump `hash` in a version that may be written, by and by."""
    cdef Lineage* line = version.line
    cdef Bump* bump
    cdef u32 waiting = line.queued - line.applied
    if waiting == QUEUE:
        apply_next(line)
    if waiting >= 2 * LOOKAHEAD:
        bump = &line.queue[(line.queued - 2 * LOOKAHEAD) % QUEUE]
        if bump.ref[0] & LEAF and not bump.ref[0] & FOREIGN:
            loom_prefetch(likely_slot(as_leaf(bump.ref[0]), bump.hash, False))
    if waiting >= LOOKAHEAD:
        bump = &line.queue[(line.queued - LOOKAHEAD) % QUEUE]
        approach(bump, LEVELS)
        loom_prefetch(as_leaf(bump.ref[0]))
        loom_prefetch(<char*>as_leaf(bump.ref[0]) + sizeof(Leaf) - 1)
    bump = &line.queue[line.queued % QUEUE]
    bump.hash = hash
    bump.version = version
    bump.number = version.number
    bump.ref = &line.root
    bump.shift = 60
    approach(bump, HOT_LEVELS)
    loom_prefetch(bump.ref)
    line.queued += 1
    return 0
