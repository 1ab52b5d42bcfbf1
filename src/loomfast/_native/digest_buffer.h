/* The bytes of the compiled digest kernel: growing buffers, and FNV-1a 64 over what is in them. Not here:
 * what is written.
 *
 * Nothing here runs Python code, raises, or reads a locale. Functions that may need memory return 0, or -1
 * when there is none; the caller raises. Everything that wraps is unsigned.
 */
#ifndef LOOMFAST_DIGEST_BUFFER_H
#define LOOMFAST_DIGEST_BUFFER_H

#include <Python.h>
#include <stdint.h>
#include <string.h>

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

/* Whatever has been written, this many bytes after it are allocated: short texts are copied in whole blocks,
 * and what a block holds too much is overwritten by what comes next, or never read. */
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

#endif
