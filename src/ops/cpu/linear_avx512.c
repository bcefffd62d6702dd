/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/kernels_avx512.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/dot_columns_avx512.h"
#include "ops/cpu/kernels_avx2.h"
#include "ops/cpu/vec_avx512.h"

static void store_linear(const void *arg, const struct dot_sums *sums)
{
    const struct linear_params *params = arg;
    for (int32_t row = 0; row < sums->num_rows; row++) {
        int64_t d_idx = (sums->first_row + row) * params->d_stride + sums->first_col;
        for (int32_t col = 0; col < sums->num_cols; col += VEC_LANES) {
            __mmask16 mask = vec_mask_low(sums->num_cols - col);
            __m512 sum = _mm512_load_ps(sums->at[0] + row * sums->stride + col);
            if (params->bias != NULL) {
                const float *bias = params->bias + sums->first_col + col;
                sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, bias));
            }
            if (params->residual != NULL) {
                sum =
                    _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, params->residual + d_idx + col));
            }
            _mm512_mask_storeu_ps(params->d + d_idx + col, mask, sum);
        }
    }
}

void avx512_linear_by(dot_walk_fn *walk, const void *a, int64_t a_stride_bytes,
                      const struct linear_params *params, const struct cpu_work *work,
                      int64_t begin, int64_t end)
{
    struct dot_job job = {.a = a,
                          .a_stride_bytes = a_stride_bytes,
                          .weights = {params->weight.elements},
                          .num_matrices = 1,
                          .dtype = params->weight.dtype,
                          .num_tokens = params->num_tokens,
                          .num_elements = params->in_features,
                          .num_cols = params->out_features,
                          .few_way = work->few_way,
                          .store = store_linear,
                          .params = params};
    walk(&job, work->scratch, begin, end);
}

void avx512_linear(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                   int64_t end)
{
    if (dtype_is_quantized(params->weight.dtype)) {
        avx2_linear(params, work, begin, end);
        return;
    }
    avx512_linear_by(avx512_dot_columns, params->a, params->a_stride * (int64_t)sizeof(float),
                     params, work, begin, end);
}

#endif
