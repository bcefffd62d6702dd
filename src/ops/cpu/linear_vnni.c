/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised weights only; others go where the path below sends them. */
#include "ops/cpu/kernels_vnni.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <stddef.h>

#include "ops/cpu/kernels_avx512.h"
#include "ops/cpu/quant_product_vnni.h"

_Static_assert(VNNI_PANEL_BYTES + VNNI_PRODUCT_ROWS * VNNI_PRODUCT_COLS * sizeof(float) <=
                   CPU_SCRATCH_BYTES,
               "panel and sums");

/* Sums of columns [col, col + num_cols) of rows [row, row + num_rows) become outputs. */
static void store_sums(const struct linear_params *params, const float *sums, int64_t row,
                       int32_t num_rows, int64_t col, int32_t num_cols)
{
    for (int32_t first = 0; first < num_cols; first += 16) {
        int32_t num_left = num_cols - first;
        __mmask16 mask = (__mmask16)(num_left >= 16 ? 0xffff : (1 << num_left) - 1);
        __m512 bias = params->bias == NULL
                          ? _mm512_setzero_ps()
                          : _mm512_maskz_loadu_ps(mask, params->bias + col + first);
        for (int32_t r = 0; r < num_rows; r++) {
            int64_t d_idx = (row + r) * params->d_stride + col + first;
            __m512 sum = _mm512_add_ps(_mm512_load_ps(sums + r * VNNI_PRODUCT_COLS + first), bias);
            if (params->residual != NULL) {
                sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, params->residual + d_idx));
            }
            _mm512_mask_storeu_ps(params->d + d_idx, mask, sum);
        }
    }
}

void vnni_product_linear(vnni_compute_fn *compute, const struct linear_params *params,
                         const struct cpu_work *work, int64_t begin, int64_t end)
{
    struct vnni_product product =
        vnni_product_of(params->weight, work->quant_rows, params->in_features);
    unsigned char *panel = work->scratch;
    float *sums = (float *)(void *)(work->scratch + VNNI_PANEL_BYTES);
    vnni_product_prefetch(&product, params->num_tokens, begin, end - begin);
    for (int64_t row = 0; row < params->num_tokens; row += VNNI_PRODUCT_ROWS) {
        int64_t rows_left = params->num_tokens - row;
        int32_t num_rows = rows_left < VNNI_PRODUCT_ROWS ? (int32_t)rows_left : VNNI_PRODUCT_ROWS;
        int64_t width = vnni_product_cols(num_rows);
        for (int64_t col = begin; col < end; col += width) {
            int32_t num_cols = (int32_t)(end - col < width ? end - col : width);
            compute(&product, row, num_rows, col, num_cols, sums, panel);
            store_sums(params, sums, row, num_rows, col, num_cols);
        }
    }
}

void vnni_linear(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                 int64_t end)
{
    if (dtype_is_quantized(params->weight.dtype)) {
        vnni_product_linear(vnni_product_compute, params, work, begin, end);
    } else {
        avx512_linear(params, work, begin, end);
    }
}

#endif
