/* SPDX-License-Identifier: Apache-2.0 */
/* ggml's block formats: fp32 rows to blocks and back, and the dot product of a row of blocks with
 * quantised activations. Source of the layouts: ggml-common.h and the gguf Python package.
 *
 * Weights stay in their blocks; a dot product brings the activations into blocks too, so that the
 * inner sums are of small integers. Which form of activations a dtype meets is ggml's choice:
 * blocks of 32 for the 32-element formats (its Q8_0 and Q8_1), of 256 for the K formats (Q8_K). */
#ifndef IMBREX_OPS_QUANT_H
#define IMBREX_OPS_QUANT_H

#include <stdbool.h>
#include <stdint.h>

#include "ops/dtype.h"

/* num_elements (a multiple of the block) of any dtype, plain ones too, widened to fp32:
 * d[num_elements]. `blocks` may have any alignment. Rounds once, where scale * q + min does not
 * fit fp32: bit for bit what the gguf package gives. */
void quant_dequantize_row(enum dtype dtype, const void *blocks, float *d, int64_t num_elements);

/* Whether quant_quantize_row writes this dtype. */
bool quant_can_quantize(enum dtype dtype);
/* fp32 to blocks (or to a plain type, rounded to nearest even), any alignment. Values must be
 * finite. F16 and the 32-element formats are bit for bit what the gguf package writes: a value or
 * a scale that F16 does not hold becomes infinite. The K formats have a search of their own for
 * the scales; values beyond the largest scale are clipped to what it reaches. */
void quant_quantize_row(enum dtype dtype, const float *a, void *blocks, int64_t num_elements);

/* ---- activations ---- */

enum activation_form {
    ACTIVATION_FORM_PLAIN, /* fp32 as they are */
    ACTIVATION_FORM_Q8,    /* struct q8_activations */
    ACTIVATION_FORM_Q8_K,  /* struct q8_k_activations */
    ACTIVATION_FORM_COUNT
};

/* 32 values scale * q, of which the largest magnitude has q = 127. The scale is rounded to F16, as
 * ggml stores it, and kept widened. ggml's Q8_1 holds scale * sum in F16; here the sum is exact. */
struct q8_activations {
    float scale;
    int32_t sum; /* of q */
    int8_t q[32];
};

/* 256 values scale * q. */
struct q8_k_activations {
    float scale;
    int16_t sums[16]; /* of 16 q each */
    int8_t q[256];
};

enum activation_form quant_activation_form(enum dtype dtype);
/* Bytes of a row of num_elements, a multiple of 4; 0 for PLAIN and for a row that is no whole
 * number of blocks of this form. */
size_t quant_activation_row_bytes(enum activation_form form, int64_t num_elements);
/* `blocks` 4-byte aligned; form Q8 or Q8_K. A block with an infinite or NaN value becomes NaN as a
 * whole; of form Q8, a block with a value beyond 8.3e6 becomes infinite or NaN (its scale is an
 * F16), and one of values below 3.7e-6 zero. */
void quant_quantize_activations(enum activation_form form, const float *a, void *blocks,
                                int64_t num_elements);
/* What the dot products see. */
void quant_dequantize_activations(enum activation_form form, const void *blocks, float *d,
                                  int64_t num_elements);

/* Sum over k of weights[k] * activations[k], activations in the dtype's form. Integer sums inside a
 * block; its scales are applied in double and the result rounded to fp32 once; the blocks are added
 * in pairs, pairs of pairs and so on in fp32. So a row of up to 2^12 blocks comes within 1e-6 of
 * the exact sum, relative to the sum of magnitudes. */
float quant_dot(enum dtype dtype, const void *weights, const void *activations,
                int64_t num_elements);

#endif
