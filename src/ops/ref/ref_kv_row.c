/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "ops/ref/ref_kernels.h"

/* Of a group that has this scale: the sum of its squared errors. */
static float fp8_error(const float *x, int32_t count, float scale)
{
    float sums[KV_FP8_SUMS] = {0.0f};
    for (int32_t i = 0; i < count; i++) {
        float error = fp8_to_float(fp8_from_float(x[i] / scale)) * scale - x[i];
        sums[i % KV_FP8_SUMS] += error * error;
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* The first of the best. Where no error is finite, the least. */
static uint16_t choose_fp8_scale(const float *x, int32_t count, uint16_t least)
{
    uint16_t best = least;
    float smallest = INFINITY;
    for (int i = 0; i < KV_FP8_SCALES && bf16_to_float(least) > 0.0f; i++) {
        uint16_t scale = (uint16_t)(least + i * KV_FP8_SCALE_STEP);
        float error = fp8_error(x, count, bf16_to_float(scale));
        if (error < smallest) {
            smallest = error;
            best = scale;
        }
    }
    return best;
}

/* Elements [0, count) of a group. */
static void store_group(enum kv_dtype dtype, const float *x, int32_t count, uint8_t *elements,
                        uint16_t *scale)
{
    float largest = 0.0f;
    bool is_finite = true;
    for (int32_t i = 0; i < count; i++) {
        largest = fmaxf(largest, fabsf(x[i]));
        is_finite = is_finite && isfinite(x[i]);
    }
    *scale = bf16_from_float(
        is_finite ? largest / (dtype == KV_DTYPE_INT8 ? KV_INT8_LARGEST : KV_FP8_LARGEST) : NAN);
    if (dtype == KV_DTYPE_FP8 && is_finite) {
        *scale = choose_fp8_scale(x, count, *scale);
    }
    float divisor = bf16_to_float(*scale);
    for (int32_t i = 0; i < count; i++) {
        /* No scale: a group of zeros, or of what is too small for one. */
        float quotient = divisor > 0.0f ? x[i] / divisor : 0.0f;
        if (dtype == KV_DTYPE_FP8) {
            elements[i] = fp8_from_float(quotient);
            continue;
        }
        float q = fminf(fmaxf(rintf(quotient), -KV_INT8_LARGEST), KV_INT8_LARGEST);
        elements[i] = (uint8_t)(int8_t)q;
    }
}

void ref_kv_store(enum kv_dtype dtype, const float *x, int32_t head_dim, struct kv_row row)
{
    uint16_t *halves = (uint16_t *)(void *)row.elements;
    switch (dtype) {
    case KV_DTYPE_F32:
        memcpy(row.elements, x, (size_t)head_dim * sizeof(float));
        return;
    case KV_DTYPE_F16:
        for (int32_t i = 0; i < head_dim; i++) {
            halves[i] = f16_from_float(x[i]);
        }
        return;
    case KV_DTYPE_BF16:
        for (int32_t i = 0; i < head_dim; i++) {
            halves[i] = bf16_from_float(x[i]);
        }
        return;
    default:
        for (int32_t i = 0; i < head_dim; i += KV_GROUP_ELEMENTS) {
            int32_t num_left = head_dim - i;
            store_group(dtype, x + i, num_left < KV_GROUP_ELEMENTS ? num_left : KV_GROUP_ELEMENTS,
                        row.elements + i, &row.scales[i / KV_GROUP_ELEMENTS]);
        }
        return;
    }
}

void ref_kv_load(enum kv_dtype dtype, struct kv_row row, int32_t head_dim, float *x)
{
    const uint16_t *halves = (const uint16_t *)(void *)row.elements;
    switch (dtype) {
    case KV_DTYPE_F32:
        memcpy(x, row.elements, (size_t)head_dim * sizeof(float));
        return;
    case KV_DTYPE_F16:
        for (int32_t i = 0; i < head_dim; i++) {
            x[i] = f16_to_float(halves[i]);
        }
        return;
    case KV_DTYPE_BF16:
        for (int32_t i = 0; i < head_dim; i++) {
            x[i] = bf16_to_float(halves[i]);
        }
        return;
    case KV_DTYPE_INT8:
        for (int32_t i = 0; i < head_dim; i++) {
            x[i] =
                (float)(int8_t)row.elements[i] * bf16_to_float(row.scales[i / KV_GROUP_ELEMENTS]);
        }
        return;
    default:
        for (int32_t i = 0; i < head_dim; i++) {
            x[i] = fp8_to_float(row.elements[i]) * bf16_to_float(row.scales[i / KV_GROUP_ELEMENTS]);
        }
        return;
    }
}
