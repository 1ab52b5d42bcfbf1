/* The order of members in the compiled digest kernel: finished members as spans of the text, compared by the
 * UTF-16 code units of their names (or, in a set, by their bytes), and moved into order. Not here: when.
 *
 * Nothing here runs Python code, raises, or reads a locale. Functions that may need memory return 0, or -1
 * when there is none; the caller raises. Everything that wraps is unsigned.
 */
#ifndef LOOMFAST_DIGEST_ORDER_H
#define LOOMFAST_DIGEST_ORDER_H

#include "digest_buffer.h"
#include <stdlib.h>

/* One finished member of an open container: its bytes are [start, end) of the canonical text. */
typedef struct {
    size_t start, end;
    union {
        struct {
            uint64_t prefix; /* the first 8 bytes of a clean ASCII name, as one number */
            size_t size;     /* its length; the name itself stands at start + 1 */
            PyObject *key;   /* any other name: a strong reference; else NULL */
        } name;
        struct {
            uint64_t start; /* an element of a set: its bytes in the persisted text */
            size_t end;
            PyObject *key;  /* NULL; the same place as name.key */
        } kept;
    } of;
} lf_span;

/* The first 8 of `size` bytes as a number that compares as they do; shorter names are padded with zeros. */
static inline uint64_t lf_prefix(const uint8_t *name, size_t size) {
    uint64_t prefix;
    memcpy(&prefix, name, 8); /* in a buffer, so the slack is there */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    prefix = __builtin_bswap64(prefix);
#elif !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_BIG_ENDIAN__
    prefix = 0;
    for (int at = 0; at < 8; at++) prefix = prefix << 8 | name[at];
#endif
    if (size >= 8) return prefix;
    return size ? prefix & ~UINT64_C(0) << (64 - 8 * size) : 0;
}

/* Fill in the name of the member that begins at `span->start`. */
static inline void lf_span_name(lf_span *span, const uint8_t *base, PyObject *key, int clean) {
    size_t size = (size_t)PyUnicode_GET_LENGTH(key);
    span->of.name.size = size;
    if (clean) {
        span->of.name.prefix = lf_prefix(base + span->start + 1, size);
        span->of.name.key = NULL;
    } else {
        Py_INCREF(key);
        span->of.name.key = key;
    }
}

typedef struct {
    const void *chars;
    size_t at, size;
    int kind;
    uint32_t low; /* the second unit of a character beyond U+FFFF, still to come */
} lf_units;

static lf_units lf_units_of(const uint8_t *base, const lf_span *span) {
    PyObject *key = span->of.name.key;
    lf_units units = {base + span->start + 1, 0, span->of.name.size, PyUnicode_1BYTE_KIND, 0};
    if (key != NULL) {
        units.chars = PyUnicode_DATA(key);
        units.kind = (int)PyUnicode_KIND(key);
    }
    return units;
}

/* The next UTF-16 code unit, or -1 at the end. */
static inline int32_t lf_unit(lf_units *units) {
    if (units->low) {
        int32_t low = (int32_t)units->low;
        units->low = 0;
        return low;
    }
    if (units->at == units->size) return -1;
    uint32_t c = PyUnicode_READ(units->kind, units->chars, units->at);
    units->at++;
    if (c < 0x10000) return (int32_t)c;
    units->low = 0xDC00 + ((c - 0x10000) & 0x3FF);
    return (int32_t)(0xD800 + ((c - 0x10000) >> 10));
}

/* Compare the names of two members by UTF-16 code units. */
static inline int lf_compare_names(const uint8_t *base, const lf_span *a, const lf_span *b) {
    if (a->of.name.key == NULL && b->of.name.key == NULL) {
        if (a->of.name.prefix != b->of.name.prefix) return a->of.name.prefix < b->of.name.prefix ? -1 : 1;
        size_t left = a->of.name.size, right = b->of.name.size, both = left < right ? left : right;
        if (both > 8) {
            int order = memcmp(base + a->start + 9, base + b->start + 9, both - 8);
            if (order) return order;
        }
        return left < right ? -1 : left > right;
    }
    lf_units one = lf_units_of(base, a), two = lf_units_of(base, b);
    for (;;) {
        int32_t left = lf_unit(&one), right = lf_unit(&two);
        if (left != right) return left < right ? -1 : 1;
        if (left < 0) return 0;
    }
}

static int lf_compare_bytes(const uint8_t *a, size_t a_size, const uint8_t *b, size_t b_size) {
    int order = memcmp(a, b, a_size < b_size ? a_size : b_size);
    return order ? order : (a_size > b_size) - (a_size < b_size);
}

/* What qsort's comparisons look at. Set for one call, which runs no Python code and keeps the GIL. */
static const uint8_t *lf_sort_canonical, *lf_sort_kept;

static int lf_by_name(const void *a, const void *b) {
    return lf_compare_names(lf_sort_canonical, (const lf_span *)a, (const lf_span *)b);
}

static int lf_by_text(const void *left, const void *right) {
    const lf_span *a = (const lf_span *)left, *b = (const lf_span *)right;
    int order = lf_compare_bytes(lf_sort_canonical + a->start, a->end - a->start,
                                 lf_sort_canonical + b->start, b->end - b->start);
    if (order || lf_sort_kept == NULL) return order;
    return lf_compare_bytes(lf_sort_kept + a->of.kept.start, a->of.kept.end - (size_t)a->of.kept.start,
                            lf_sort_kept + b->of.kept.start, b->of.kept.end - (size_t)b->of.kept.start);
}

static void lf_sort_names(const uint8_t *base, lf_span *spans, size_t count) {
    if (count > 32) {
        lf_sort_canonical = base;
        qsort(spans, count, sizeof(lf_span), lf_by_name);
        return;
    }
    for (size_t at = 1; at < count; at++) {
        if (lf_compare_names(base, &spans[at - 1], &spans[at]) <= 0) continue;
        lf_span moved = spans[at];
        size_t to = at;
        do {
            spans[to] = spans[to - 1];
            to--;
        } while (to > 0 && lf_compare_names(base, &spans[to - 1], &moved) > 0);
        spans[to] = moved;
    }
}

/* Rewrite the members at the end of `text`, from the byte `from` on, in the order of `spans`. */
static int lf_reorder(lf_buffer *text, lf_buffer *spare, size_t from, const lf_span *spans, size_t count,
                      int kept) {
    spare->size = 0;
    if (lf_put(spare, text->data + from, text->size - from) < 0) return -1;
    uint8_t *out = text->data + from;
    for (size_t at = 0; at < count; at++) {
        size_t start = kept ? (size_t)spans[at].of.kept.start : spans[at].start;
        size_t size = (kept ? spans[at].of.kept.end : spans[at].end) - start;
        if (at) *out++ = ',';
        lf_copy(out, spare->data + (start - from), size);
        out += size;
    }
    return 0;
}

/* Sort the elements of a set by their canonical bytes, then by their persisted ones (if written). */
static int lf_sort_set(lf_buffer *canonical, lf_buffer *kept, lf_buffer *spare, size_t from, size_t kept_from,
                       lf_span *spans, size_t count) {
    lf_sort_canonical = canonical->data;
    lf_sort_kept = kept ? kept->data : NULL;
    qsort(spans, count, sizeof(lf_span), lf_by_text);
    if (lf_reorder(canonical, spare, from, spans, count, 0) < 0) return -1;
    return kept ? lf_reorder(kept, spare, kept_from, spans, count, 1) : 0;
}

#endif
