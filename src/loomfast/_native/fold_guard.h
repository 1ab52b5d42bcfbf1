/* The guard of a row and its checksum: what `row_guard` and `row_checksum` in `_pure/fold.py` specify. A CRC-32 with zlib's polynomial, eight
 * bytes at a time; most rows are 24 bytes, for which a call of zlib's would cost more than the checksum.
 *
 * Plain C, called with the interpreter lock held. Nothing here can fail. */
#ifndef LOOM_FOLD_GUARD_H
#define LOOM_FOLD_GUARD_H

#include <stddef.h>
#include <stdint.h>

/* loom_crc_table[k][b] is what byte b contributes when k more bytes follow it. */
static uint32_t loom_crc_table[8][256];

static void loom_guard_prepare(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        }
        loom_crc_table[0][byte] = crc;
    }
    for (int more = 1; more < 8; more++) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t before = loom_crc_table[more - 1][byte];
            loom_crc_table[more][byte] = before >> 8 ^ loom_crc_table[0][before & 0xFF];
        }
    }
}

static inline uint32_t loom_crc_word(uint32_t crc, uint64_t word) {
    word ^= crc;
    return loom_crc_table[7][word & 0xFF] ^ loom_crc_table[6][word >> 8 & 0xFF] ^
           loom_crc_table[5][word >> 16 & 0xFF] ^ loom_crc_table[4][word >> 24 & 0xFF] ^
           loom_crc_table[3][word >> 32 & 0xFF] ^ loom_crc_table[2][word >> 40 & 0xFF] ^
           loom_crc_table[1][word >> 48 & 0xFF] ^ loom_crc_table[0][word >> 56];
}

static inline uint32_t loom_crc_bytes(uint32_t crc, const unsigned char* data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word = (uint64_t)data[0] | (uint64_t)data[1] << 8 | (uint64_t)data[2] << 16 |
                        (uint64_t)data[3] << 24 | (uint64_t)data[4] << 32 | (uint64_t)data[5] << 40 |
                        (uint64_t)data[6] << 48 | (uint64_t)data[7] << 56;
        crc = loom_crc_word(crc, word);
    }
    for (; size; data++, size--) {
        crc = crc >> 8 ^ loom_crc_table[0][(crc ^ *data) & 0xFF];
    }
    return crc;
}

/* The guard over the three words that begin it, and over the texts of a row that steers the fold. */
static inline uint32_t loom_guard_words(uint64_t row_id, uint64_t kind_and_shape, uint64_t stamp) {
    uint32_t crc = loom_crc_word(0xFFFFFFFFu, row_id);
    return loom_crc_word(loom_crc_word(crc, kind_and_shape), stamp);
}

/* Write a number in decimal, at most 20 bytes, and return what follows it. */
static inline char* loom_decimal(char* at, long long value) {
    char digits[20];
    int size = 0;
    unsigned long long left = value < 0 ? 0ULL - (unsigned long long)value : (unsigned long long)value;
    if (value < 0) {
        *at++ = '-';
    }
    do {
        digits[size++] = (char)('0' + left % 10);
        left /= 10;
    } while (left);
    while (size) {
        *at++ = digits[--size];
    }
    return at;
}

#endif
