/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/ref/ref_kernels.h"

#include <assert.h>
#include <stddef.h>

/* Inlined with a constant dtype, so that the loop has no switch in it. */
static inline __attribute__((always_inline)) float dot_as(enum dtype dtype, const float *a,
                                                          const void *elements, int32_t count)
{
    struct weight_view row = {elements, dtype};
    float sum_0 = 0.0f, sum_1 = 0.0f, sum_2 = 0.0f, sum_3 = 0.0f;
    int32_t k = 0;
    for (; k + 4 <= count; k += 4) {
        sum_0 += a[k] * weight_load(row, k);
        sum_1 += a[k + 1] * weight_load(row, k + 1);
        sum_2 += a[k + 2] * weight_load(row, k + 2);
        sum_3 += a[k + 3] * weight_load(row, k + 3);
    }
    if (k < count) {
        sum_0 += a[k] * weight_load(row, k);
    }
    if (k + 1 < count) {
        sum_1 += a[k + 1] * weight_load(row, k + 1);
    }
    if (k + 2 < count) {
        sum_2 += a[k + 2] * weight_load(row, k + 2);
    }
    return (sum_0 + sum_1) + (sum_2 + sum_3);
}

float ref_dot(const float *a, struct weight_view weight, int64_t row_idx, int32_t row_elements)
{
    const unsigned char *row = (const unsigned char *)weight.elements +
                               row_idx * row_elements * (int64_t)dtype_block_bytes(weight.dtype);
    switch (weight.dtype) {
    case DTYPE_BF16:
        return dot_as(DTYPE_BF16, a, row, row_elements);
    case DTYPE_F16:
        return dot_as(DTYPE_F16, a, row, row_elements);
    default:
        return dot_as(DTYPE_F32, a, row, row_elements);
    }
}

float ref_product(const float *a, int64_t a_stride, const struct quant_rows *quant_rows,
                  int64_t token, struct weight_view weight, int64_t row_idx, int32_t row_elements)
{
    enum activation_form form = quant_activation_form(weight.dtype);
    if (form == ACTIVATION_FORM_PLAIN) {
        return ref_dot(a + token * a_stride, weight, row_idx, row_elements);
    }
    assert(quant_rows->rows[form] != NULL);
    const unsigned char *row = (const unsigned char *)weight.elements +
                               row_idx * (int64_t)dtype_row_bytes(weight.dtype, row_elements);
    return quant_dot(weight.dtype, row,
                     quant_rows->rows[form] + token * (int64_t)quant_rows->row_bytes[form],
                     row_elements);
}
