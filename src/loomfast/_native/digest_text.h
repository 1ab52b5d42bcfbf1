/* The characters of the compiled digest kernel: buffers, strings, numbers, names in order, FNV-1a, and the
 * look ahead before a foreign JSON parser is trusted. Not here: walking Python values (digest.pyx).
 *
 * Nothing here runs Python code, raises, or reads a locale. Functions that may need memory return 0, or -1
 * when there is none; the caller raises. Everything that wraps is unsigned.
 *
 * Floats are written with the shortest digits that read back as the same float (Schubfach, R. Giulietti,
 * "The Schubfach way to render doubles"). In short: a double v = c * 2^q owns the interval half way to its
 * neighbours. Choose k so that the interval is wider than 10^k and not wider than ten of them: then it holds
 * at least one and at most ten multiples of 10^k, at most one of which is a multiple of 10^(k+1). Multiply c and both
 * ends by 10^-k from a table of 128-bit powers, keeping "something was lost" as a sticky last bit; compare
 * the neighbours s and s+1 with the ends. 0.3 = 5404319552844595 * 2^-54: k = -17, s = 29999999999999998, and
 * s/10 + 1 = 3000000000000000 * 10^-16 lies inside: the digits are 3, the exponent -1.
 */
#ifndef LOOMFAST_DIGEST_TEXT_H
#define LOOMFAST_DIGEST_TEXT_H

#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#define LF_SSE2 1
#endif
#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#endif

/* --- FNV-1a 64 -------------------------------------------------------------------------------------- */

#define LF_OFFSET UINT64_C(0xCBF29CE484222325)
#define LF_PRIME UINT64_C(0x100000001B3)

static uint64_t lf_fnv(const uint8_t *data, size_t size) {
    uint64_t value = LF_OFFSET;
    for (size_t at = 0; at < size; at++) value = (value ^ data[at]) * LF_PRIME;
    return value;
}

/* The record's formulation: four 16-bit limbs, the prime as 2^40 + 0x1b3. See fnv1a64_limbs in _pure. */
static uint64_t lf_fnv_limbs(const uint8_t *data, size_t size) {
    uint32_t a = 0x2325, b = 0x8422, c = 0x9CE4, d = 0xCBF2;
    for (size_t at = 0; at < size; at++) {
        a ^= data[at];
        uint32_t p = a * 0x1B3u;
        uint32_t q = b * 0x1B3u + (p >> 16);
        uint32_t r = c * 0x1B3u + (q >> 16) + ((a << 8) & 0xFFFFu);
        uint32_t s = d * 0x1B3u + (r >> 16) + (a >> 8) + ((b << 8) & 0xFFFFu);
        a = p & 0xFFFFu;
        b = q & 0xFFFFu;
        c = r & 0xFFFFu;
        d = s & 0xFFFFu;
    }
    return (uint64_t)a | (uint64_t)b << 16 | (uint64_t)c << 32 | (uint64_t)d << 48;
}

/* The floor under both: one xor and one multiplication per byte, each waiting for the last, `rounds` times.
 * Every round starts from the end of the one before, so that the compiler cannot drop any. */
static uint64_t lf_chain(const uint8_t *data, size_t size, size_t rounds) {
    uint64_t value = LF_OFFSET;
    for (size_t round = 0; round < rounds; round++)
        for (size_t at = 0; at < size; at++) value = (value ^ data[at]) * LF_PRIME;
    return value;
}

/* --- buffers ---------------------------------------------------------------------------------------- */

/* Whatever has been written, this many bytes after it are allocated: short texts are copied in whole blocks, and
 * what a block holds too much is overwritten by what comes next, or never read. */
#define LF_SLACK 64

typedef struct {
    uint8_t *data;
    size_t size, room;
} lf_buffer;

static int lf_grow(lf_buffer *buffer, size_t more) {
    if (more > SIZE_MAX / 4 || buffer->size > SIZE_MAX / 4) return -1;
    size_t room = buffer->room + buffer->room / 2;
    if (room < buffer->size + more + LF_SLACK) room = buffer->size + more + LF_SLACK;
    if (room < 1024) room = 1024;
    uint8_t *data = (uint8_t *)PyMem_RawRealloc(buffer->data, room);
    if (data == NULL) return -1;
    buffer->data = data;
    buffer->room = room;
    return 0;
}

/* Make sure that `more` bytes can be written. */
static inline int lf_room(lf_buffer *buffer, size_t more) {
    return buffer->room - buffer->size >= more + LF_SLACK ? 0 : lf_grow(buffer, more);
}

/* Copy between two places that both have LF_SLACK after them. */
static inline void lf_copy(uint8_t *out, const uint8_t *in, size_t size) {
    if (size <= 32)
        memcpy(out, in, 32);
    else
        memcpy(out, in, size);
}

/* Append `size` bytes from a place that has LF_SLACK after it. */
static inline int lf_put(lf_buffer *buffer, const uint8_t *bytes, size_t size) {
    if (lf_room(buffer, size) < 0) return -1;
    lf_copy(buffer->data + buffer->size, bytes, size);
    buffer->size += size;
    return 0;
}

static int lf_put_long(lf_buffer *buffer, const void *bytes, size_t size) {
    if (lf_room(buffer, size) < 0) return -1;
    memcpy(buffer->data + buffer->size, bytes, size);
    buffer->size += size;
    return 0;
}

/* Append the first `size` of the 8 bytes at `word`. */
static inline int lf_put_word(lf_buffer *buffer, const char *word, size_t size) {
    if (lf_room(buffer, 8) < 0) return -1;
    memcpy(buffer->data + buffer->size, word, 8);
    buffer->size += size;
    return 0;
}

static inline int lf_put_byte(lf_buffer *buffer, uint8_t byte) {
    if (lf_room(buffer, 1) < 0) return -1;
    buffer->data[buffer->size++] = byte;
    return 0;
}

/* --- strings ---------------------------------------------------------------------------------------- */

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

/* Write the quoted text character by character; two adjacent halves of a surrogate pair become one character. */
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

/* Write the comma (if wanted), the quoted name and the colon of a member; `*clean` tells if the name is ASCII and
 * was written as it is. */
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

/* --- numbers ---------------------------------------------------------------------------------------- */

static const char LF_PAIRS[] =
    "00010203040506070809101112131415161718192021222324252627282930313233343536373839404142434445464748495051"
    "525354555657585960616263646566676869707172737475767778798081828384858687888990919293949596979899";

/* Write the digits of `value` so that they end before `end`; return where they begin. */
static inline uint8_t *lf_digits(uint8_t *end, uint64_t value) {
    while (value >= 100000000) { /* eight digits whose halves do not wait for each other */
        uint32_t eight = (uint32_t)(value % 100000000), high = eight / 10000, low = eight % 10000;
        value /= 100000000;
        end -= 8;
        memcpy(end, LF_PAIRS + 2 * (high / 100), 2);
        memcpy(end + 2, LF_PAIRS + 2 * (high % 100), 2);
        memcpy(end + 4, LF_PAIRS + 2 * (low / 100), 2);
        memcpy(end + 6, LF_PAIRS + 2 * (low % 100), 2);
    }
    uint32_t rest = (uint32_t)value;
    while (rest >= 100) {
        memcpy(end -= 2, LF_PAIRS + 2 * (rest % 100), 2);
        rest /= 100;
    }
    if (rest >= 10)
        memcpy(end -= 2, LF_PAIRS + 2 * rest, 2);
    else
        *--end = (uint8_t)('0' + rest);
    return end;
}

static inline int lf_uint(lf_buffer *buffer, uint64_t value, int negative) {
    uint8_t text[24 + LF_SLACK], *end = text + 24, *begin = lf_digits(end, value);
    *--begin = '-';
    begin += !negative;
    return lf_put(buffer, begin, (size_t)(end - begin));
}

static inline int lf_int(lf_buffer *buffer, int64_t value) {
    return value < 0 ? lf_uint(buffer, 0 - (uint64_t)value, 1) : lf_uint(buffer, (uint64_t)value, 0);
}

/* 10^k for k from -292 to 324, each rounded up to 128 bits of which the highest is set; filled at import. */
#define LF_POWER_LOW (-292)
#define LF_POWER_HIGH 324
typedef struct {
    uint64_t high, low;
} lf_power;
static lf_power lf_powers[LF_POWER_HIGH - LF_POWER_LOW + 1];

static inline uint64_t lf_mul(uint64_t a, uint64_t b, uint64_t *high) {
#if defined(__SIZEOF_INT128__)
    unsigned __int128 product = (unsigned __int128)a * b;
    *high = (uint64_t)(product >> 64);
    return (uint64_t)product;
#elif defined(_MSC_VER) && defined(_M_X64)
    return _umul128(a, b, high);
#else
    uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    uint64_t low = a0 * b0, mid = a1 * b0 + (low >> 32), other = a0 * b1 + (uint32_t)mid;
    *high = a1 * b1 + (mid >> 32) + (other >> 32);
    return other << 32 | (uint32_t)low;
#endif
}

/* The high part of g * c, its last bit set if anything below it was lost. */
static inline uint64_t lf_round_to_odd(lf_power g, uint64_t c) {
    uint64_t carry, high;
    lf_mul(g.low, c, &carry);
    uint64_t low = lf_mul(g.high, c, &high);
    low += carry;
    high += low < carry;
    return high | (low > 1);
}

/* Divide by 2^bits, rounding down: a right shift of a negative number is the compiler's choice in C. */
static inline int32_t lf_floor_shift(int32_t value, int bits) {
    return value >= 0 ? value >> bits : -((-value + ((1 << bits) - 1)) >> bits);
}

/* The shortest decimal of a positive finite double: returns the digits, `*exponent` their power of ten. */
static uint64_t lf_shortest(double value, int32_t *exponent) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    uint64_t fraction = bits & UINT64_C(0xFFFFFFFFFFFFF);
    int32_t biased = (int32_t)(bits >> 52);
    uint64_t c = biased ? fraction | UINT64_C(0x10000000000000) : fraction;
    int32_t q = (biased ? biased : 1) - 1075;
    uint64_t odd = c & 1; /* an even double owns the ends of its interval */
    uint64_t closer = fraction == 0 && biased > 1;
    uint64_t left = 4 * c - 2 + closer, right = 4 * c + 2;
    int32_t k = lf_floor_shift(q * 1262611 - (closer ? 524031 : 0), 22);
    int h = (int)(q + lf_floor_shift(-k * 1741647, 19) + 1);
    lf_power g = lf_powers[-k - LF_POWER_LOW];
    uint64_t lower = lf_round_to_odd(g, left << h) + odd;
    uint64_t middle = lf_round_to_odd(g, 4 * c << h);
    uint64_t upper = lf_round_to_odd(g, right << h) - odd;
    uint64_t s = middle / 4;
    if (s >= 10) {
        uint64_t tens = s / 10;
        int down = lower <= 40 * tens, up = 40 * tens + 40 <= upper;
        if (down != up) {
            *exponent = k + 1;
            return tens + (uint64_t)up;
        }
    }
    *exponent = k;
    int down = lower <= 4 * s, up = 4 * s + 4 <= upper;
    if (down != up) return s + (uint64_t)up;
    uint64_t half = 4 * s + 2;
    return s + (uint64_t)(middle > half || (middle == half && (s & 1)));
}

/* Write a float as ECMAScript does to `canonical`, and to `kept` so that it reads back as a float of the same sign;
 * either may be NULL. */
static int lf_float(lf_buffer *canonical, lf_buffer *kept, double value) {
    lf_buffer *buffer = canonical ? canonical : kept;
    if (!isfinite(value)) {
        if (canonical && lf_put_word(canonical, "null\0\0\0", 4) < 0) return -1;
        return kept ? lf_put_word(kept, "null\0\0\0", 4) : 0;
    }
    if (lf_room(buffer, 40) < 0) return -1;
    size_t from = buffer->size;
    uint8_t *out = buffer->data + buffer->size, text[24 + LF_SLACK], *end = text + 24;
    int whole = 1;
    if (signbit(value)) {
        if (value != 0) {
            *out++ = '-';
        } else if (canonical == NULL || kept != NULL) {
            if (lf_put_word(kept, "-0.0\0\0\0", 4) < 0) return -1;
            return canonical ? lf_put_byte(canonical, '0') : 0;
        }
        value = -value;
    }
    if (value < 9007199254740992.0 && value == (double)(int64_t)value) {
        uint8_t *begin = lf_digits(end, (uint64_t)value);
        lf_copy(out, begin, (size_t)(end - begin));
        out += end - begin;
    } else {
        int32_t exponent;
        uint64_t digits = lf_shortest(value, &exponent);
        if (digits % 100000000 == 0) {
            digits /= 100000000;
            exponent += 8;
        }
        if (digits % 10000 == 0) {
            digits /= 10000;
            exponent += 4;
        }
        while (digits % 10 == 0) {
            digits /= 10;
            exponent++;
        }
        uint8_t *begin = lf_digits(end, digits);
        int32_t count = (int32_t)(end - begin), point = count + exponent; /* value = 0.DIGITS * 10^point */
        if (count <= point && point <= 21) {
            lf_copy(out, begin, (size_t)count);
            memset(out + count, '0', (size_t)(point - count));
            out += point;
        } else if (0 < point && point <= 21) {
            lf_copy(out, begin, (size_t)point);
            out[point] = '.';
            lf_copy(out + point + 1, begin + point, (size_t)(count - point));
            out += count + 1;
            whole = 0;
        } else if (-6 < point && point <= 0) {
            memcpy(out, "0.000000", 8);
            out += 2 - point;
            lf_copy(out, begin, (size_t)count);
            out += count;
            whole = 0;
        } else {
            *out++ = *begin;
            if (count > 1) {
                *out++ = '.';
                lf_copy(out, begin + 1, (size_t)(count - 1));
                out += count - 1;
            }
            *out++ = 'e';
            *out++ = point > 0 ? '+' : '-';
            uint8_t *power = lf_digits(end, (uint64_t)(point > 0 ? point - 1 : 1 - point));
            lf_copy(out, power, (size_t)(end - power));
            out += end - power;
            whole = 0;
        }
    }
    buffer->size = (size_t)(out - buffer->data);
    if (kept == NULL) return 0;
    if (canonical && lf_put(kept, canonical->data + from, canonical->size - from) < 0) return -1;
    if (whole) {
        /* The slack has room for two more. */
        kept->data[kept->size++] = '.';
        kept->data[kept->size++] = '0';
    }
    return 0;
}

/* --- the order of members --------------------------------------------------------------------------- */

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

/* --- looking ahead before reading ------------------------------------------------------------------- */

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

/* True if a 64-bit parser that refuses halves of surrogate pairs is known to read `text` exactly: no escape of
 * a surrogate, no integer of 19 digits or more, not too deep. Whether it is JSON at all is not asked. */
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
