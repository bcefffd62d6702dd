/* SPDX-License-Identifier: Apache-2.0 */
/* Block layouts and how a block opens into small integers and their scales, which is all that
 * dequantising and dot products need to know. Structs of bytes: no padding, any alignment. Scales
 * are F16, little-endian as the host. */
#ifndef IMBREX_OPS_QUANT_BLOCKS_H
#define IMBREX_OPS_QUANT_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "ops/dtype.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "scales and bit masks of blocks are read as little-endian numbers"
#endif

#define QUANT_BLOCK 32    /* elements */
#define QUANT_K_BLOCK 256 /* elements of a K block: 8 groups of 32, or 16 of 16 in Q6_K */

/* value = scale * q, q in [-128, 127] */
struct q8_0_block {
    uint8_t scale[2];
    int8_t q[32];
};

/* value = scale * (q - 8). A byte holds elements i (low nibble) and i + 16. */
struct q4_0_block {
    uint8_t scale[2];
    uint8_t nibbles[16];
};

/* value = scale * q + min */
struct q4_1_block {
    uint8_t scale[2], min[2];
    uint8_t nibbles[16];
};

/* value = scale * (q - 16). Bit i of high_bits is bit 4 of element i. */
struct q5_0_block {
    uint8_t scale[2];
    uint8_t high_bits[4];
    uint8_t nibbles[16];
};

/* value = scale * q + min */
struct q5_1_block {
    uint8_t scale[2], min[2];
    uint8_t high_bits[4];
    uint8_t nibbles[16];
};

/* value = scale * scales[g] * q - min_scale * mins[g] in group g of 32 elements; scales and mins
 * have 6 bits, packed as k_scales_unpack says. 32 bytes of nibbles hold two groups: even ones in
 * the low nibbles. */
struct q4_k_block {
    uint8_t scale[2], min_scale[2];
    uint8_t packed_scales[12];
    uint8_t nibbles[128];
};

/* As Q4_K; bit g of high_bits[i] is bit 4 of element i of group g. */
struct q5_k_block {
    uint8_t scale[2], min_scale[2];
    uint8_t packed_scales[12];
    uint8_t high_bits[32];
    uint8_t nibbles[128];
};

/* value = scale * scales[g] * (q - 32) in group g of 16 elements. Each half of 128 elements is four
 * quarters of 32: quarter p has its low four bits in nibble p / 2 of nibbles[32 * (p % 2) + i], its
 * high two in bits 2p and 2p + 1 of high_pairs[i]. */
struct q6_k_block {
    uint8_t nibbles[128];
    uint8_t high_pairs[64];
    int8_t scales[16];
    uint8_t scale[2];
};

_Static_assert(sizeof(struct q8_0_block) == 34, "ggml's size");
_Static_assert(sizeof(struct q4_0_block) == 18, "ggml's size");
_Static_assert(sizeof(struct q4_1_block) == 20, "ggml's size");
_Static_assert(sizeof(struct q5_0_block) == 22, "ggml's size");
_Static_assert(sizeof(struct q5_1_block) == 24, "ggml's size");
_Static_assert(sizeof(struct q4_k_block) == 144, "ggml's size");
_Static_assert(sizeof(struct q5_k_block) == 176, "ggml's size");
_Static_assert(sizeof(struct q6_k_block) == 210, "ggml's size");

static inline float quant_load_scale(const uint8_t bytes[2])
{
    uint16_t bits;
    memcpy(&bits, bytes, sizeof(bits));
    return f16_to_float(bits);
}

static inline void quant_store_scale(uint8_t bytes[2], float scale)
{
    uint16_t bits = f16_from_float(scale);
    memcpy(bytes, &bits, sizeof(bits));
}

/* A 32-element block: value = scale * q, plus min where quant_has_min. */
struct quant_opened {
    float scale, min;
    int8_t q[QUANT_BLOCK];
};

/* A 256-element block: value = scale * scales[g] * q, minus min_scale * mins[g] where
 * quant_has_min. */
struct quant_k_opened {
    float scale, min_scale;
    int8_t scales[16];
    int8_t mins[8];
    int8_t q[QUANT_K_BLOCK];
};

static inline bool quant_has_min(enum dtype dtype)
{
    return dtype == DTYPE_Q4_1 || dtype == DTYPE_Q5_1 || dtype == DTYPE_Q4_K || dtype == DTYPE_Q5_K;
}

/* Elements that share a scale in a K block. */
static inline int32_t quant_k_group(enum dtype dtype)
{
    return dtype == DTYPE_Q6_K ? 16 : 32;
}

#define QUANT_INLINE static inline __attribute__((always_inline))

QUANT_INLINE void quant_open_nibbles(const uint8_t nibbles[16], int8_t q[32])
{
    for (int i = 0; i < 16; i++) {
        q[i] = (int8_t)(nibbles[i] & 15);
        q[16 + i] = (int8_t)(nibbles[i] >> 4);
    }
}

/* Eight bits at a time: a copy of their byte in each byte of a word, of which byte i keeps bit i;
 * adding 0x7f moves it to bit 7, whichever it was. */
QUANT_INLINE void quant_open_high_bits(const uint8_t high_bits[4], int8_t q[32])
{
    for (int i = 0; i < 4; i++) {
        uint64_t spread = high_bits[i] * 0x0101010101010101u & 0x8040201008040201u, eight;
        memcpy(&eight, q + 8 * i, sizeof(eight));
        eight |= (spread + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
        memcpy(q + 8 * i, &eight, sizeof(eight));
    }
}

/* `dtype` is a constant where this is called, so one case remains. */
QUANT_INLINE void quant_open(enum dtype dtype, const void *at, struct quant_opened *opened)
{
    int offset = 0;
    opened->min = 0.0f;
    switch (dtype) {
    case DTYPE_Q4_0: {
        const struct q4_0_block *block = at;
        opened->scale = quant_load_scale(block->scale);
        quant_open_nibbles(block->nibbles, opened->q);
        offset = 8;
        break;
    }
    case DTYPE_Q4_1: {
        const struct q4_1_block *block = at;
        opened->scale = quant_load_scale(block->scale);
        opened->min = quant_load_scale(block->min);
        quant_open_nibbles(block->nibbles, opened->q);
        break;
    }
    case DTYPE_Q5_0: {
        const struct q5_0_block *block = at;
        opened->scale = quant_load_scale(block->scale);
        quant_open_nibbles(block->nibbles, opened->q);
        quant_open_high_bits(block->high_bits, opened->q);
        offset = 16;
        break;
    }
    case DTYPE_Q5_1: {
        const struct q5_1_block *block = at;
        opened->scale = quant_load_scale(block->scale);
        opened->min = quant_load_scale(block->min);
        quant_open_nibbles(block->nibbles, opened->q);
        quant_open_high_bits(block->high_bits, opened->q);
        break;
    }
    default: {
        const struct q8_0_block *block = at;
        opened->scale = quant_load_scale(block->scale);
        memcpy(opened->q, block->q, sizeof(opened->q));
        break;
    }
    }
    for (int i = 0; offset != 0 && i < QUANT_BLOCK; i++) {
        opened->q[i] = (int8_t)(opened->q[i] - offset);
    }
}

/* Scale and min of groups 0 to 3 fill the low six bits of bytes 0 to 3 and 4 to 7; of groups 4 to
 * 7, the low four bits are the nibbles of bytes 8 to 11 and the high two the free bits of bytes 0
 * to 3 and 4 to 7. */
QUANT_INLINE void k_scales_unpack(const uint8_t packed[12], int8_t *scales, int8_t *mins)
{
    for (int g = 0; g < 4; g++) {
        scales[g] = (int8_t)(packed[g] & 63);
        mins[g] = (int8_t)(packed[4 + g] & 63);
        scales[4 + g] = (int8_t)((packed[8 + g] & 15) | (packed[g] >> 6) << 4);
        mins[4 + g] = (int8_t)(packed[8 + g] >> 4 | (packed[4 + g] >> 6) << 4);
    }
}

QUANT_INLINE void quant_open_k_nibbles(const uint8_t nibbles[128], int8_t q[256])
{
    for (int pair = 0; pair < 4; pair++) {
        for (int i = 0; i < 32; i++) {
            q[64 * pair + i] = (int8_t)(nibbles[32 * pair + i] & 15);
            q[64 * pair + 32 + i] = (int8_t)(nibbles[32 * pair + i] >> 4);
        }
    }
}

QUANT_INLINE void quant_open_k(enum dtype dtype, const void *at, struct quant_k_opened *opened)
{
    if (dtype == DTYPE_Q6_K) {
        const struct q6_k_block *block = at;
        opened->scale = quant_load_scale(block->scale);
        opened->min_scale = 0.0f;
        memcpy(opened->scales, block->scales, sizeof(opened->scales));
        for (int quarter = 0; quarter < 8; quarter++) {
            int half = quarter / 4, p = quarter % 4;
            const uint8_t *nibbles = block->nibbles + 64 * half + 32 * (p % 2);
            const uint8_t *pairs = block->high_pairs + 32 * half;
            for (int i = 0; i < 32; i++) {
                int low = nibbles[i] >> 4 * (p / 2) & 15, high = pairs[i] >> 2 * p & 3;
                opened->q[32 * quarter + i] = (int8_t)((low | high << 4) - 32);
            }
        }
        return;
    }
    /* Q4_K and Q5_K begin alike. */
    const struct q4_k_block *block = at;
    opened->scale = quant_load_scale(block->scale);
    opened->min_scale = quant_load_scale(block->min_scale);
    k_scales_unpack(block->packed_scales, opened->scales, opened->mins);
    if (dtype == DTYPE_Q4_K) {
        quant_open_k_nibbles(block->nibbles, opened->q);
        return;
    }
    const struct q5_k_block *block_5 = at;
    quant_open_k_nibbles(block_5->nibbles, opened->q);
    for (int g = 0; g < 8; g++) {
        for (int i = 0; i < 32; i++) {
            int8_t *q = &opened->q[32 * g + i];
            *q = (int8_t)(*q | (block_5->high_bits[i] >> g & 1) << 4);
        }
    }
}

/* fp32 to K blocks, in quant_k.c. */
void quant_k_quantize_row(enum dtype dtype, const float *a, void *blocks, int64_t num_elements);

#endif
