/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised weights only; others go where the path below sends them. */
#include "ops/cpu/kernels_vnni.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <stddef.h>

#include "ops/cpu/kernels_avx512.h"
#include "ops/cpu/quant_product_vnni.h"

_Static_assert(VNNI_PANEL_BYTES + VNNI_SUMS * sizeof(float) <= CPU_SCRATCH_BYTES, "panel and sums");

static void store_sums(const struct linear_params *params, const struct vnni_run *run,
                       const float *sums)
{
    const int32_t stride = vnni_run_cols(run->num_rows);
    const int64_t col = run->col;
    for (int32_t first = 0; first < run->num_cols; first += 16) {
        int32_t num_left = run->num_cols - first;
        __mmask16 mask = (__mmask16)(num_left >= 16 ? 0xffff : (1 << num_left) - 1);
        __m512 bias = params->bias == NULL
                          ? _mm512_setzero_ps()
                          : _mm512_maskz_loadu_ps(mask, params->bias + col + first);
        for (int32_t r = 0; r < run->num_rows; r++) {
            int64_t d_idx = (run->row + r) * params->d_stride + col + first;
            __m512 sum = _mm512_add_ps(_mm512_load_ps(sums + r * stride + first), bias);
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
    product.in_order = work->few_way == FEW_WAY_ORDERED;
    float *sums = (float *)(void *)(work->scratch + VNNI_PANEL_BYTES);
    vnni_product_prefetch(&product, params->num_tokens, begin, end);
    for (int64_t row = 0; row < params->num_tokens; row += VNNI_PRODUCT_ROWS) {
        int64_t rows_left = params->num_tokens - row;
        struct vnni_run run = {.compute = compute, .row = row, .panel = work->scratch};
        run.num_rows = rows_left < VNNI_PRODUCT_ROWS ? (int32_t)rows_left : VNNI_PRODUCT_ROWS;
        int32_t run_cols = vnni_run_cols(run.num_rows);
        for (run.col = begin; run.col < end; run.col += run_cols) {
            run.num_cols = end - run.col < run_cols ? (int32_t)(end - run.col) : run_cols;
            run.next = vnni_address_of(&product, run.col + run.num_cols);
            vnni_run_compute(&run, &product, sums);
            store_sums(params, &run, sums);
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
