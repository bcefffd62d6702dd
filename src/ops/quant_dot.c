/* SPDX-License-Identifier: Apache-2.0 */
/* Activations in blocks, and the reference dot products of quantised weights with them. */
#include <assert.h>
#include <float.h>
#include <math.h>

#include "ops/quant.h"
#include "ops/quant_blocks.h"

/* ---- activations ------------------------------------------------------------------------------*/

enum activation_form quant_activation_form(enum dtype dtype)
{
    if (!dtype_is_quantized(dtype)) {
        return ACTIVATION_FORM_PLAIN;
    }
    return dtype_block_elements(dtype) == QUANT_K_BLOCK ? ACTIVATION_FORM_Q8_K : ACTIVATION_FORM_Q8;
}

size_t quant_activation_row_bytes(enum activation_form form, int64_t num_elements)
{
    if (form == ACTIVATION_FORM_Q8 && num_elements % QUANT_BLOCK == 0) {
        return (size_t)(num_elements / QUANT_BLOCK) * sizeof(struct q8_activations);
    }
    if (form == ACTIVATION_FORM_Q8_K && num_elements % QUANT_K_BLOCK == 0) {
        return (size_t)(num_elements / QUANT_K_BLOCK) * sizeof(struct q8_k_activations);
    }
    return 0;
}

/* The first value of the largest magnitude, with its sign; NaN if a value is not finite. */
static float signed_largest_of(const float *a, int count)
{
    float largest = 0.0f, signed_largest = 0.0f;
    bool is_finite = true;
    for (int i = 0; i < count; i++) {
        float magnitude = fabsf(a[i]);
        is_finite = is_finite && magnitude <= FLT_MAX;
        if (magnitude > largest) {
            largest = magnitude;
            signed_largest = a[i];
        }
    }
    return is_finite ? signed_largest : NAN;
}

static void quantize_q8(const float *a, struct q8_activations *block)
{
    float scale = fabsf(signed_largest_of(a, QUANT_BLOCK)) / 127.0f;
    float inverse = 1.0f / scale;
    *block = (struct q8_activations){.scale = f16_to_float(f16_from_float(scale))};
    if (!isfinite(inverse)) {
        return; /* zeros, values that an F16 scale does not reach, or NaN */
    }
    for (int i = 0; i < QUANT_BLOCK; i++) {
        float value = a[i] * inverse;
        /* To nearest, halves away from zero. */
        int32_t whole = (int32_t)value;
        float rest = value - (float)whole;
        whole += (rest >= 0.5f) - (rest <= -0.5f);
        block->q[i] = (int8_t)whole;
        block->sum += whole;
    }
}

/* The value of the largest magnitude becomes -127, whatever its sign, as in ggml. */
static void quantize_q8_k(const float *a, struct q8_k_activations *block)
{
    float signed_largest = signed_largest_of(a, QUANT_K_BLOCK);
    float inverse = -127.0f / signed_largest;
    *block = (struct q8_k_activations){.scale = 0.0f};
    if (!isfinite(inverse)) {
        block->scale = signed_largest * 0.0f; /* zeros, values below 127 / FLT_MAX, or NaN */
        return;
    }
    block->scale = 1.0f / inverse;
    for (int i = 0; i < QUANT_K_BLOCK; i++) {
        /* To nearest even: in [2^23, 2^24) the last place of fp32 is 1. */
        float value = a[i] * inverse + 0x1.8p23f;
        int32_t whole = (int32_t)value - (3 << 22);
        whole = whole > 127 ? 127 : whole;
        block->q[i] = (int8_t)whole;
        block->sums[i / 16] = (int16_t)(block->sums[i / 16] + whole);
    }
}

void quant_quantize_activations(enum activation_form form, const float *a, void *blocks,
                                int64_t num_elements)
{
    assert(form != ACTIVATION_FORM_PLAIN && (uintptr_t)blocks % 4 == 0);
    if (form == ACTIVATION_FORM_Q8) {
        struct q8_activations *block = blocks;
        for (int64_t first = 0; first < num_elements; first += QUANT_BLOCK) {
            quantize_q8(a + first, block++);
        }
    } else {
        struct q8_k_activations *block = blocks;
        for (int64_t first = 0; first < num_elements; first += QUANT_K_BLOCK) {
            quantize_q8_k(a + first, block++);
        }
    }
}

void quant_dequantize_activations(enum activation_form form, const void *blocks, float *d,
                                  int64_t num_elements)
{
    assert(form != ACTIVATION_FORM_PLAIN);
    for (int64_t i = 0; i < num_elements; i++) {
        if (form == ACTIVATION_FORM_Q8) {
            const struct q8_activations *block = blocks;
            block += i / QUANT_BLOCK;
            d[i] = block->scale * (float)block->q[i % QUANT_BLOCK];
        } else {
            const struct q8_k_activations *block = blocks;
            block += i / QUANT_K_BLOCK;
            d[i] = block->scale * (float)block->q[i % QUANT_K_BLOCK];
        }
    }
}

/* ---- dot products -----------------------------------------------------------------------------*/

/* A sum by pairs: level l holds the sum of 2^l terms where bit l of the number of terms is set. */
struct pairwise_sum {
    float levels[40];
    int64_t num_terms;
};

QUANT_INLINE void pairwise_add(struct pairwise_sum *sum, float term)
{
    int level = 0;
    for (; (sum->num_terms >> level & 1) != 0; level++) {
        term = sum->levels[level] + term;
    }
    sum->levels[level] = term;
    sum->num_terms++;
}

static float pairwise_total(const struct pairwise_sum *sum)
{
    float total = 0.0f;
    for (int level = 0; sum->num_terms >> level != 0; level++) {
        if ((sum->num_terms >> level & 1) != 0) {
            total = sum->levels[level] + total;
        }
    }
    return total;
}

QUANT_INLINE int32_t dot_int8(const int8_t *a, const int8_t *b, int count)
{
    int32_t sum = 0;
    for (int i = 0; i < count; i++) {
        sum += (int16_t)(a[i] * b[i]);
    }
    return sum;
}

/* Inlined with a constant dtype. In double, the products of scales and integers are exact. */
QUANT_INLINE float dot_blocks(enum dtype dtype, const unsigned char *weights,
                              const struct q8_activations *activations, int64_t num_blocks)
{
    struct pairwise_sum sum = {.num_terms = 0};
    int64_t block_bytes = (int64_t)dtype_block_bytes(dtype);
    for (int64_t block = 0; block < num_blocks; block++) {
        struct quant_opened opened;
        quant_open(dtype, weights + block * block_bytes, &opened);
        double term = (double)opened.scale * dot_int8(opened.q, activations[block].q, QUANT_BLOCK);
        if (quant_has_min(dtype)) {
            term += (double)opened.min * activations[block].sum;
        }
        pairwise_add(&sum, (float)(term * activations[block].scale));
    }
    return pairwise_total(&sum);
}

QUANT_INLINE float dot_k_blocks(enum dtype dtype, const unsigned char *weights,
                                const struct q8_k_activations *activations, int64_t num_blocks)
{
    struct pairwise_sum sum = {.num_terms = 0};
    int32_t group_elements = quant_k_group(dtype);
    int64_t block_bytes = (int64_t)dtype_block_bytes(dtype);
    for (int64_t block = 0; block < num_blocks; block++) {
        const struct q8_k_activations *a = &activations[block];
        struct quant_k_opened opened;
        quant_open_k(dtype, weights + block * block_bytes, &opened);
        int32_t dot = 0, min_dot = 0; /* below 2^28: 16 groups x 128 x (16 x 32 x 127) */
        for (int g = 0; g < QUANT_K_BLOCK / group_elements; g++) {
            dot += opened.scales[g] * dot_int8(opened.q + g * group_elements,
                                               a->q + g * group_elements, group_elements);
            if (quant_has_min(dtype)) {
                min_dot += opened.mins[g] * (a->sums[2 * g] + a->sums[2 * g + 1]);
            }
        }
        double term = (double)opened.scale * dot;
        if (quant_has_min(dtype)) {
            term -= (double)opened.min_scale * min_dot;
        }
        pairwise_add(&sum, (float)(term * a->scale));
    }
    return pairwise_total(&sum);
}

float quant_dot(enum dtype dtype, const void *weights, const void *activations,
                int64_t num_elements)
{
    int64_t num_blocks = num_elements / dtype_block_elements(dtype);
    assert(dtype_is_quantized(dtype) && num_elements % dtype_block_elements(dtype) == 0);
    switch (dtype) {
    case DTYPE_Q4_0:
        return dot_blocks(DTYPE_Q4_0, weights, activations, num_blocks);
    case DTYPE_Q4_1:
        return dot_blocks(DTYPE_Q4_1, weights, activations, num_blocks);
    case DTYPE_Q5_0:
        return dot_blocks(DTYPE_Q5_0, weights, activations, num_blocks);
    case DTYPE_Q5_1:
        return dot_blocks(DTYPE_Q5_1, weights, activations, num_blocks);
    case DTYPE_Q4_K:
        return dot_k_blocks(DTYPE_Q4_K, weights, activations, num_blocks);
    case DTYPE_Q5_K:
        return dot_k_blocks(DTYPE_Q5_K, weights, activations, num_blocks);
    case DTYPE_Q6_K:
        return dot_k_blocks(DTYPE_Q6_K, weights, activations, num_blocks);
    default:
        return dot_blocks(DTYPE_Q8_0, weights, activations, num_blocks);
    }
}
