/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of every dtype to fp32, and fp32 to the plain types and the 32-element blocks. The latter
 * have no choice to make: the largest magnitude, or the range, sets the scale. */
#include "ops/quant.h"

#include <assert.h>
#include <math.h>

#include "ops/quant_blocks.h"

/* ---- to fp32 ----------------------------------------------------------------------------------*/

/* Inlined with a constant dtype. Nothing is rounded but the sum with min: scale and q have 11 + 8
 * bits at most. */
QUANT_INLINE void widen_blocks(enum dtype dtype, const unsigned char *blocks, float *d,
                               int64_t num_elements)
{
    for (int64_t first = 0; first < num_elements; first += QUANT_BLOCK) {
        struct quant_opened opened;
        quant_open(dtype, blocks, &opened);
        for (int i = 0; i < QUANT_BLOCK; i++) {
            float value = opened.scale * (float)opened.q[i];
            d[first + i] = quant_has_min(dtype) ? value + opened.min : value;
        }
        blocks += dtype_block_bytes(dtype);
    }
}

QUANT_INLINE void widen_k_blocks(enum dtype dtype, const unsigned char *blocks, float *d,
                                 int64_t num_elements)
{
    int32_t group_elements = quant_k_group(dtype);
    for (int64_t first = 0; first < num_elements; first += QUANT_K_BLOCK) {
        struct quant_k_opened opened;
        quant_open_k(dtype, blocks, &opened);
        for (int i = 0; i < QUANT_K_BLOCK; i++) {
            int g = i / group_elements;
            float value = opened.scale * (float)opened.scales[g] * (float)opened.q[i];
            d[first + i] =
                quant_has_min(dtype) ? value - opened.min_scale * (float)opened.mins[g] : value;
        }
        blocks += dtype_block_bytes(dtype);
    }
}

void quant_dequantize_row(enum dtype dtype, const void *blocks, float *d, int64_t num_elements)
{
    assert(num_elements >= 0 && num_elements % dtype_block_elements(dtype) == 0);
    switch (dtype) {
    case DTYPE_Q8_0:
        widen_blocks(DTYPE_Q8_0, blocks, d, num_elements);
        break;
    case DTYPE_Q4_0:
        widen_blocks(DTYPE_Q4_0, blocks, d, num_elements);
        break;
    case DTYPE_Q4_1:
        widen_blocks(DTYPE_Q4_1, blocks, d, num_elements);
        break;
    case DTYPE_Q5_0:
        widen_blocks(DTYPE_Q5_0, blocks, d, num_elements);
        break;
    case DTYPE_Q5_1:
        widen_blocks(DTYPE_Q5_1, blocks, d, num_elements);
        break;
    case DTYPE_Q4_K:
        widen_k_blocks(DTYPE_Q4_K, blocks, d, num_elements);
        break;
    case DTYPE_Q5_K:
        widen_k_blocks(DTYPE_Q5_K, blocks, d, num_elements);
        break;
    case DTYPE_Q6_K:
        widen_k_blocks(DTYPE_Q6_K, blocks, d, num_elements);
        break;
    default:
        for (int64_t i = 0; i < num_elements; i++) {
            d[i] = weight_load((struct weight_view){blocks, dtype}, i);
        }
        break;
    }
}

/* ---- from fp32 --------------------------------------------------------------------------------*/

/* 0 for 0, and where the quotient would not be finite: then every scale that F16 can hold is 0. */
static float inverse_of(float scale)
{
    float inverse = 1.0f / scale;
    return isfinite(inverse) ? inverse : 0.0f;
}

/* Cut to an integer in [0, max]; NaN becomes 0. */
static uint8_t cut(float value, int max)
{
    return value >= (float)max ? (uint8_t)max : value > 0.0f ? (uint8_t)value : 0;
}

/* To nearest, halves away from zero; |value| <= 127 and a rounding error. NaN becomes 0. */
static int8_t round_away(float value)
{
    float magnitude = fabsf(value);
    int32_t whole = magnitude < 128.0f ? (int32_t)magnitude : 0;
    whole += magnitude - (float)whole >= 0.5f;
    return (int8_t)(value < 0.0f ? -whole : whole);
}

static void quantize_q8_0(const float *a, struct q8_0_block *block)
{
    float largest = 0.0f;
    for (int i = 0; i < QUANT_BLOCK; i++) {
        largest = fabsf(a[i]) > largest ? fabsf(a[i]) : largest;
    }
    float scale = largest / 127.0f, inverse = inverse_of(scale);
    quant_store_scale(block->scale, scale);
    for (int i = 0; i < QUANT_BLOCK; i++) {
        block->q[i] = round_away(a[i] * inverse);
    }
}

/* Q4_0 and Q5_0: the value of the largest magnitude, with its sign, becomes -half. */
static void quantize_symmetric(const float *a, int half, uint8_t scale_bytes[2], uint8_t q[32])
{
    float largest = 0.0f, signed_largest = 0.0f;
    for (int i = 0; i < QUANT_BLOCK; i++) {
        if (fabsf(a[i]) > largest) {
            largest = fabsf(a[i]);
            signed_largest = a[i];
        }
    }
    float scale = signed_largest / (float)-half, inverse = inverse_of(scale);
    quant_store_scale(scale_bytes, scale);
    for (int i = 0; i < QUANT_BLOCK; i++) {
        q[i] = cut(a[i] * inverse + ((float)half + 0.5f), 2 * half - 1);
    }
}

/* Q4_1 and Q5_1: the range is divided evenly. */
static void quantize_range(const float *a, int max, uint8_t scale_bytes[2], uint8_t min_bytes[2],
                           uint8_t q[32])
{
    float low = a[0], high = a[0];
    for (int i = 1; i < QUANT_BLOCK; i++) {
        low = a[i] < low ? a[i] : low;
        high = a[i] > high ? a[i] : high;
    }
    float scale = (high - low) / (float)max, inverse = inverse_of(scale);
    quant_store_scale(scale_bytes, scale);
    quant_store_scale(min_bytes, low);
    for (int i = 0; i < QUANT_BLOCK; i++) {
        q[i] = cut((a[i] - low) * inverse + 0.5f, max);
    }
}

static void pack_nibbles(const uint8_t q[32], uint8_t nibbles[16])
{
    for (int i = 0; i < 16; i++) {
        nibbles[i] = (uint8_t)((q[i] & 15) | (q[16 + i] & 15) << 4);
    }
}

static void pack_high_bits(const uint8_t q[32], uint8_t high_bits[4])
{
    memset(high_bits, 0, 4);
    for (int i = 0; i < QUANT_BLOCK; i++) {
        high_bits[i / 8] = (uint8_t)(high_bits[i / 8] | q[i] >> 4 << i % 8);
    }
}

static void quantize_block(enum dtype dtype, const float *a, void *at)
{
    uint8_t q[QUANT_BLOCK];
    switch (dtype) {
    case DTYPE_Q4_0: {
        struct q4_0_block *block = at;
        quantize_symmetric(a, 8, block->scale, q);
        pack_nibbles(q, block->nibbles);
        break;
    }
    case DTYPE_Q4_1: {
        struct q4_1_block *block = at;
        quantize_range(a, 15, block->scale, block->min, q);
        pack_nibbles(q, block->nibbles);
        break;
    }
    case DTYPE_Q5_0: {
        struct q5_0_block *block = at;
        quantize_symmetric(a, 16, block->scale, q);
        pack_nibbles(q, block->nibbles);
        pack_high_bits(q, block->high_bits);
        break;
    }
    case DTYPE_Q5_1: {
        struct q5_1_block *block = at;
        quantize_range(a, 31, block->scale, block->min, q);
        pack_nibbles(q, block->nibbles);
        pack_high_bits(q, block->high_bits);
        break;
    }
    default:
        quantize_q8_0(a, at);
        break;
    }
}

bool quant_can_quantize(enum dtype dtype)
{
    return (unsigned)dtype < DTYPE_COUNT;
}

void quant_quantize_row(enum dtype dtype, const float *a, void *blocks, int64_t num_elements)
{
    unsigned char *at = blocks;
    assert(num_elements >= 0 && num_elements % dtype_block_elements(dtype) == 0);
    switch (dtype) {
    case DTYPE_F32:
        memcpy(blocks, a, (size_t)num_elements * sizeof(float));
        break;
    case DTYPE_F16:
    case DTYPE_BF16:
        for (int64_t i = 0; i < num_elements; i++) {
            uint16_t bits = dtype == DTYPE_F16 ? f16_from_float(a[i]) : bf16_from_float(a[i]);
            memcpy(at + 2 * i, &bits, sizeof(bits));
        }
        break;
    case DTYPE_Q4_K:
    case DTYPE_Q5_K:
    case DTYPE_Q6_K:
        quant_k_quantize_row(dtype, a, blocks, num_elements);
        break;
    default:
        for (int64_t first = 0; first < num_elements; first += QUANT_BLOCK) {
            quantize_block(dtype, a + first, at);
            at += dtype_block_bytes(dtype);
        }
        break;
    }
}
