/* JSON strings of the compiled digest kernel, written; and JSON text looked over before it is read by a
 * foreign parser. Not here: numbers, and the order of names.
 *
 * Nothing here runs Python code, raises, or reads a locale. Functions that may need memory return 0, or -1
 * when there is none; the caller raises. Everything that wraps is unsigned.
 */
#ifndef LOOMFAST_DIGEST_STRING_H
#define LOOMFAST_DIGEST_STRING_H

#include "digest_buffer.h"

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#define LF_SSE2 1
#endif

static const char LF_HEX[] = "0123456789abcdef";

static inline uint8_t *lf_hex4(uint8_t *out, uint32_t unit) {
    *out++ = '\\';
    *out++ = 'u';
    *out++ = (uint8_t)LF_HEX[unit >> 12 & 15];
    *out++ = (uint8_t)LF_HEX[unit >> 8 & 15];
    *out++ = (uint8_t)LF_HEX[unit >> 4 & 15];
    *out++ = (uint8_t)LF_HEX[unit & 15];
    return out;
}

/* Write one ASCII character as it stands in a JSON string; at most 6 bytes. */
static inline uint8_t *lf_ascii(uint8_t *out, uint8_t c) {
    if (c >= 0x20 && c != '"' && c != '\\') {
        *out++ = c;
        return out;
    }
    uint8_t letter;
    switch (c) {
    case '"': case '\\': letter = c; break;
    case '\b': letter = 'b'; break;
    case '\t': letter = 't'; break;
    case '\n': letter = 'n'; break;
    case '\f': letter = 'f'; break;
    case '\r': letter = 'r'; break;
    default: return lf_hex4(out, c);
    }
    *out++ = '\\';
    *out++ = letter;
    return out;
}

/* True if one of the eight ASCII characters in `x` must be escaped. */
static inline int lf_escapes8(uint64_t x) {
    const uint64_t ones = UINT64_C(0x0101010101010101), tops = UINT64_C(0x8080808080808080);
    uint64_t quote = x ^ ones * '"', slash = x ^ ones * '\\';
    return (((x - ones * 0x20) & ~x) | ((quote - ones) & ~quote) | ((slash - ones) & ~slash)) & tops ? 1 : 0;
}

/* Copy `size` ASCII characters if none must be escaped; else return 0 (what was written is then void). Reads
 * and writes only within the two arrays: the last block overlaps the one before. */
static inline int lf_copy_clean(uint8_t *out, const uint8_t *in, size_t size) {
    uint64_t first, last;
    if (size >= 16) {
#ifdef LF_SSE2
        const __m128i control = _mm_set1_epi8(0x20), quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\');
        for (size_t at = 0;;) {
            __m128i x = _mm_loadu_si128((const __m128i *)(const void *)(in + at));
            __m128i bad = _mm_or_si128(_mm_cmplt_epi8(x, control),
                                       _mm_or_si128(_mm_cmpeq_epi8(x, quote), _mm_cmpeq_epi8(x, slash)));
            if (_mm_movemask_epi8(bad)) return 0;
            _mm_storeu_si128((__m128i *)(void *)(out + at), x);
            if (at + 16 == size) return 1;
            at = at + 32 <= size ? at + 16 : size - 16;
        }
#else
        for (size_t at = 0;;) {
            memcpy(&first, in + at, 8);
            if (lf_escapes8(first)) return 0;
            memcpy(out + at, &first, 8);
            if (at + 8 == size) return 1;
            at = at + 16 <= size ? at + 8 : size - 8;
        }
#endif
    }
    if (size >= 8) {
        memcpy(&first, in, 8);
        memcpy(&last, in + size - 8, 8);
        if (lf_escapes8(first) | lf_escapes8(last)) return 0;
        memcpy(out, &first, 8);
        memcpy(out + size - 8, &last, 8);
        return 1;
    }
    if (size >= 4) {
        uint32_t low, high;
        memcpy(&low, in, 4);
        memcpy(&high, in + size - 4, 4);
        if (lf_escapes8((uint64_t)high << 32 | low)) return 0;
        memcpy(out, &low, 4);
        memcpy(out + size - 4, &high, 4);
        return 1;
    }
    for (size_t at = 0; at < size; at++) {
        if (in[at] < 0x20 || in[at] == '"' || in[at] == '\\') return 0;
        out[at] = in[at];
    }
    return 1;
}

static inline uint8_t *lf_utf8(uint8_t *out, uint32_t c) {
    if (c < 0x800) {
        *out++ = (uint8_t)(0xC0 | c >> 6);
    } else {
        if (c < 0x10000) {
            *out++ = (uint8_t)(0xE0 | c >> 12);
        } else {
            *out++ = (uint8_t)(0xF0 | c >> 18);
            *out++ = (uint8_t)(0x80 | (c >> 12 & 0x3F));
        }
        *out++ = (uint8_t)(0x80 | (c >> 6 & 0x3F));
    }
    *out++ = (uint8_t)(0x80 | (c & 0x3F));
    return out;
}

/* Write the quoted text character by character; two adjacent halves of a surrogate pair become one. */
static int lf_text_slow(lf_buffer *buffer, int kind, const void *chars, size_t size) {
    if (size > SIZE_MAX / 64) return -1;
    for (size_t at = 0; at < size;) {
        /* In pieces, so that a long text does not reserve the six bytes per character it will not need. */
        size_t end = size - at > 4096 ? at + 4096 : size;
        if (lf_room(buffer, (end - at) * 6 + 8) < 0) return -1;
        uint8_t *out = buffer->data + buffer->size;
        if (at == 0) *out++ = '"';
        while (at < end) {
            uint32_t c = PyUnicode_READ(kind, chars, at);
            at++;
            if (c < 0x80) {
                out = lf_ascii(out, (uint8_t)c);
            } else if (c < 0xD800 || c > 0xDFFF) {
                out = lf_utf8(out, c);
            } else {
                uint32_t next = c < 0xDC00 && at < size ? PyUnicode_READ(kind, chars, at) : 0;
                if (next >= 0xDC00 && next <= 0xDFFF) {
                    at++;
                    out = lf_utf8(out, 0x10000 + ((c - 0xD800) << 10) + (next - 0xDC00));
                } else {
                    out = lf_hex4(out, c);
                }
            }
        }
        buffer->size = (size_t)(out - buffer->data);
    }
    return lf_put_byte(buffer, '"');
}

/* Write the quoted JSON text of an exact str. */
static inline int lf_text(lf_buffer *buffer, PyObject *text) {
    size_t size = (size_t)PyUnicode_GET_LENGTH(text);
    if (PyUnicode_IS_COMPACT_ASCII(text)) {
        if (lf_room(buffer, size + 2) < 0) return -1;
        uint8_t *out = buffer->data + buffer->size;
        if (lf_copy_clean(out + 1, (const uint8_t *)PyUnicode_1BYTE_DATA(text), size)) {
            out[0] = out[size + 1] = '"';
            buffer->size += size + 2;
            return 0;
        }
    }
    return lf_text_slow(buffer, (int)PyUnicode_KIND(text), PyUnicode_DATA(text), size);
}

/* Write the comma (if wanted), the quoted name and the colon of a member; `*clean` tells if the name is ASCII
 * and was written as it is. */
static inline int lf_name(lf_buffer *buffer, PyObject *name, int comma, int *clean) {
    size_t size = (size_t)PyUnicode_GET_LENGTH(name);
    if (PyUnicode_IS_COMPACT_ASCII(name)) {
        if (lf_room(buffer, size + 4) < 0) return -1;
        uint8_t *out = buffer->data + buffer->size;
        *out = ',';
        out += comma;
        if (lf_copy_clean(out + 1, (const uint8_t *)PyUnicode_1BYTE_DATA(name), size)) {
            out[0] = out[size + 1] = '"';
            out[size + 2] = ':';
            buffer->size += size + 3 + (size_t)comma;
            *clean = 1;
            return 0;
        }
    }
    *clean = 0;
    if (comma && lf_put_byte(buffer, ',') < 0) return -1;
    if (lf_text_slow(buffer, (int)PyUnicode_KIND(name), PyUnicode_DATA(name), size) < 0) return -1;
    return lf_put_byte(buffer, ':');
}

/* True if `text` holds two adjacent halves of a surrogate pair, which in JSON are one character. */
static int lf_has_pair(PyObject *text) {
    int kind = (int)PyUnicode_KIND(text);
    if (kind == PyUnicode_1BYTE_KIND) return 0;
    const void *chars = PyUnicode_DATA(text);
    Py_ssize_t size = PyUnicode_GET_LENGTH(text);
    for (Py_ssize_t at = 1; at < size; at++) {
        uint32_t low = PyUnicode_READ(kind, chars, at);
        if (low < 0xDC00 || low > 0xDFFF) continue;
        uint32_t high = PyUnicode_READ(kind, chars, at - 1);
        if (high >= 0xD800 && high <= 0xDBFF) return 1;
    }
    return 0;
}

/* The exact look: follows strings, counts levels, finds integers of 19 digits or more. */
static int lf_plain_to_read_slow(const uint8_t *text, size_t size, int max_depth) {
    int depth = 0;
    for (size_t at = 0; at < size; at++) {
        uint8_t c = text[at];
        if (c == '"') {
            for (at++; at < size && text[at] != '"'; at++) {
                if (text[at] != '\\') continue;
                if (at + 2 < size && text[at + 1] == 'u' && (text[at + 2] | 0x20) == 'd') return 0;
                at++;
            }
        } else if ((c | 0x20) == '{') {
            if (++depth > max_depth) return 0;
        } else if ((c | 0x20) == '}') {
            depth--;
        } else if (c >= '0' && c <= '9') {
            size_t from = at;
            while (at + 1 < size && text[at + 1] >= '0' && text[at + 1] <= '9') at++;
            if (at - from >= 18) return 0;
        }
    }
    return 1;
}

/* The length of the run of digits around `at`. */
static size_t lf_digit_run(const uint8_t *text, size_t size, size_t at) {
    size_t from = at, to = at;
    while (from > 0 && text[from - 1] >= '0' && text[from - 1] <= '9') from--;
    while (to < size && text[to] >= '0' && text[to] <= '9') to++;
    return to - from;
}

/* True if a 64-bit parser that refuses halves of surrogate pairs is known to read `text` exactly: no escape
 * of a surrogate, no integer of 19 digits or more, not too deep. Whether it is JSON at all is not asked. */
static int lf_plain_to_read(const uint8_t *text, size_t size, int max_depth) {
#ifdef LF_SSE2
    const __m128i slash = _mm_set1_epi8('\\'), open = _mm_set1_epi8('{'), lower = _mm_set1_epi8(0x20),
                  zero = _mm_set1_epi8('0'), nine = _mm_set1_epi8(9);
    int opened = 0;
    for (size_t at = 0; at < size; at += 16) {
        uint8_t tail[16] = {0};
        const uint8_t *from = text + at;
        if (size - at < 16) {
            memcpy(tail, from, size - at);
            from = tail;
        }
        __m128i x = _mm_loadu_si128((const __m128i *)(const void *)from);
        __m128i y = _mm_sub_epi8(x, zero);
        unsigned digits = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_min_epu8(y, nine), y));
        unsigned slashes = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(x, slash));
        unsigned opens = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_or_si128(x, lower), open));
        for (; opens; opens &= opens - 1) opened++;
        /* Nineteen digits in a row fill one of these halves. */
        int low = (digits & 0xFF) == 0xFF, high = (digits & 0xFF00) == 0xFF00;
        if (slashes || opened > max_depth || (low && lf_digit_run(text, size, at) > 18) ||
            (high && lf_digit_run(text, size, at + 8) > 18))
            return lf_plain_to_read_slow(text, size, max_depth);
    }
    return 1;
#else
    return lf_plain_to_read_slow(text, size, max_depth);
#endif
}

#endif
