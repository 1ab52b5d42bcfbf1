/* Memory of the leaves of large tries: arenas of 2 MB, each one huge page where the system has them.

   Why: at a million digests nearly every bump needs a page that the processor has no translation for, and in a
   virtual machine that costs more than all else a bump does. Why not always: the first touch of a huge page
   clears all of it: about 200 us, and milliseconds where a hypervisor has yet to find the memory. One live bump may
   not take that long, and a smaller trie does not gain what it costs. So only a large bulk load makes arenas; a
   leaf that replaces one of an arena takes what room is left in them, and is an ordinary block if none is.

   An arena holds blocks of one size and begins with its own header, so that a block's address tells its arena.
   Arenas with room are linked; one that has become empty is given back. Calls are made under the GIL, and by one
   extension module only: each that included this file would have arenas of its own. */

#ifndef LOOM_LEAF_ARENA_H
#define LOOM_LEAF_ARENA_H

#include <stddef.h>
#include <stdint.h>

#if defined(__SANITIZE_ADDRESS__)
  #define LOOM_ARENAS 0 /* a block of its own for every leaf, so that overruns are seen */
#elif defined(__linux__) && UINTPTR_MAX > 0xFFFFFFFFu
  #include <sys/mman.h>
  #define LOOM_ARENAS 1
#else
  #define LOOM_ARENAS 0
#endif

#if LOOM_ARENAS

#define LOOM_ARENA_BYTES ((size_t)2 << 20)
#define LOOM_ARENA_SIZES 3

typedef struct loom_block { struct loom_block *next; } loom_block;

typedef struct loom_arena {
    struct loom_arena *next, *previous; /* of those with room for this size */
    loom_block *released;
    char *untouched; /* from here on no block was ever given out */
    size_t used;
    size_t bytes; /* of a block */
    int at; /* in `loom_roomy` */
    char fill[12];
} loom_arena;

static loom_arena *loom_roomy[LOOM_ARENA_SIZES];

static inline void loom_link_arena(loom_arena *arena) {
    arena->previous = NULL;
    arena->next = loom_roomy[arena->at];
    if (arena->next) arena->next->previous = arena;
    loom_roomy[arena->at] = arena;
}

static inline void loom_unlink_arena(loom_arena *arena) {
    if (arena->next) arena->next->previous = arena->previous;
    if (arena->previous) arena->previous->next = arena->next;
    else loom_roomy[arena->at] = arena->next;
}

static inline int loom_is_full(const loom_arena *arena) {
    return !arena->released
        && arena->untouched + arena->bytes > (const char *)arena + LOOM_ARENA_BYTES;
}

static inline loom_arena *loom_new_arena(int at, size_t bytes) {
    /* Twice the size holds one aligned arena; the rest, which nobody has touched, goes back. */
    char *got = mmap(NULL, 2 * LOOM_ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED) return NULL;
    size_t before = (size_t)(-(uintptr_t)got & (LOOM_ARENA_BYTES - 1));
    loom_arena *arena = (loom_arena *)(got + before);
    if (before) munmap(got, before);
    munmap((char *)arena + LOOM_ARENA_BYTES, LOOM_ARENA_BYTES - before);
    (void)madvise(arena, LOOM_ARENA_BYTES, MADV_HUGEPAGE); /* a wish: small pages will do */
    arena->released = NULL;
    arena->untouched = (char *)arena + (sizeof(loom_arena) + 63) / 64 * 64;
    arena->used = 0;
    arena->bytes = bytes;
    arena->at = at;
    loom_link_arena(arena);
    return arena;
}

#endif

/* Return a block from an arena of size `at`, or NULL: there is no room and `grow` is false, or no memory. */
static inline void *loom_arena_take(int at, size_t bytes, int grow) {
#if LOOM_ARENAS
    loom_arena *arena = loom_roomy[at];
    if (!arena && !(grow && (arena = loom_new_arena(at, bytes)))) return NULL;
    void *block = arena->released;
    if (block) arena->released = arena->released->next;
    else {
        block = arena->untouched;
        arena->untouched += bytes;
    }
    arena->used++;
    if (loom_is_full(arena)) loom_unlink_arena(arena);
    return block;
#else
    (void)at; (void)bytes; (void)grow;
    return NULL;
#endif
}

static inline void loom_arena_return(void *given) {
#if LOOM_ARENAS
    loom_block *block = (loom_block *)given;
    loom_arena *arena = (loom_arena *)((uintptr_t)given & ~(uintptr_t)(LOOM_ARENA_BYTES - 1));
    int was_full = loom_is_full(arena);
    block->next = arena->released;
    arena->released = block;
    arena->used--;
    if (arena->used == 0) {
        if (!was_full) loom_unlink_arena(arena);
        munmap(arena, LOOM_ARENA_BYTES);
    } else if (was_full) loom_link_arena(arena);
#else
    (void)given;
#endif
}

#endif
