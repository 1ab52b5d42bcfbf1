/* JSON numbers of the compiled digest kernel, written.
 *
 * Nothing here runs Python code, raises, or reads a locale. Functions that may need memory return 0, or -1
 * when there is none; the caller raises. Everything that wraps is unsigned.
 *
 * Floats are written with the shortest digits that read back as the same float (Schubfach, R. Giulietti,
 * "The Schubfach way to render doubles"). In short: a double v = c * 2^q owns the interval half way to its
 * neighbours. Choose k so that the interval is wider than 10^k and not wider than ten of them: then it holds
 * at least one and at most ten multiples of 10^k, at most one of which is a multiple of 10^(k+1). Multiply c
 * and both ends by 10^-k from a table of 128-bit powers, keeping "something was lost" as a sticky last bit;
 * compare the neighbours s and s+1 with the ends.
 *
 * 0.3 = 5404319552844595 * 2^-54: k = -17, s = 29999999999999998, and s/10 + 1 = 3000000000000000 * 10^-16
 * lies inside. Without its zeros: digits 3, exponent -1.
 */
#ifndef LOOMFAST_DIGEST_NUMBER_H
#define LOOMFAST_DIGEST_NUMBER_H

#include "digest_buffer.h"
#include <math.h>

#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#endif

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

/* Write a float as ECMAScript does. Return 1 if the text would read back as an integer, else 0. */
static inline int lf_float(lf_buffer *buffer, double value) {
    if (!isfinite(value)) return lf_put_word(buffer, "null\0\0\0", 4);
    if (lf_room(buffer, 40) < 0) return -1;
    uint8_t *out = buffer->data + buffer->size, text[24 + LF_SLACK], *end = text + 24;
    int whole = 1;
    if (value < 0) {
        *out++ = '-';
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
    return whole;
}

#endif
