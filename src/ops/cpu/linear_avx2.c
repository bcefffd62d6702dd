/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/dot_columns_avx2.h"
#include "ops/cpu/vec_avx2.h"

static void store_linear(const void *arg, const struct dot_sums *sums)
{
    const struct linear_params *params = arg;
    for (int32_t row = 0; row < sums->num_rows; row++) {
        int64_t d_idx = (sums->first_row + row) * params->d_stride + sums->first_col;
        for (int32_t col = 0; col < sums->num_cols; col += VEC_LANES) {
            __m256i mask = vec_mask_low(sums->num_cols - col);
            __m256 sum = _mm256_load_ps(sums->at[0] + row * sums->stride + col);
            if (params->bias != NULL) {
                const float *bias = params->bias + sums->first_col + col;
                sum = _mm256_add_ps(sum, _mm256_maskload_ps(bias, mask));
            }
            if (params->residual != NULL) {
                sum = _mm256_add_ps(sum, _mm256_maskload_ps(params->residual + d_idx + col, mask));
            }
            vec_store_first(params->d + d_idx + col, sum, sums->num_cols - col);
        }
    }
}

void avx2_linear(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                 int64_t end)
{
    if (dtype_is_quantized(params->weight.dtype)) {
        avx2_quant_linear(params, work, begin, end);
        return;
    }
    struct dot_job job = {.a = params->a,
                          .a_stride_bytes = params->a_stride * (int64_t)sizeof(float),
                          .weights = {params->weight.elements},
                          .num_matrices = 1,
                          .dtype = params->weight.dtype,
                          .num_tokens = params->num_tokens,
                          .num_elements = params->in_features,
                          .num_cols = params->out_features,
                          .few_way = work->few_way,
                          .store = store_linear,
                          .params = params};
    avx2_dot_columns(&job, work->scratch, begin, end);
}

#endif
