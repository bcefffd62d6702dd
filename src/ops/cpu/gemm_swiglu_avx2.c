/* SPDX-License-Identifier: Apache-2.0 */
/* Each tile takes gate rows and up rows of the same columns, so the activations are read once for
 * both; the sums of one tile of rows go through SiLU and the product while they are in L1. */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/dot_columns_avx2.h"
#include "ops/cpu/vec_avx2.h"
#include "ops/ref/ref_kernels.h"

static __m256 add_bias(__m256 sum, const float *bias, int64_t col, __m256i mask)
{
    return bias == NULL ? sum : _mm256_add_ps(sum, _mm256_maskload_ps(bias + col, mask));
}

static void store_swiglu(const void *arg, const struct dot_sums *sums)
{
    const struct gemm_swiglu_params *params = arg;
    for (int32_t row = 0; row < sums->num_rows; row++) {
        float *d = params->d + (sums->first_row + row) * params->intermediate_size;
        for (int32_t idx = 0; idx < sums->num_cols; idx += VEC_LANES) {
            int64_t col = sums->first_col + idx;
            __m256i mask = vec_mask_low(sums->num_cols - idx);
            __m256 gate = _mm256_load_ps(sums->at[0] + row * sums->stride + idx);
            __m256 up = _mm256_load_ps(sums->at[1] + row * sums->stride + idx);
            gate = add_bias(gate, params->gate_bias, col, mask);
            up = add_bias(up, params->up_bias, col, mask);
            vec_store_first(d + col, _mm256_mul_ps(vec_silu(gate), up), sums->num_cols - idx);
        }
    }
}

void avx2_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                      int64_t begin, int64_t end)
{
    if (dtype_is_quantized(params->gate.dtype) || dtype_is_quantized(params->up.dtype)) {
        avx2_quant_gemm_swiglu(params, work, begin, end);
        return;
    }
    /* A tile has one dtype; no checkpoint known mixes plain ones. */
    if (params->gate.dtype != params->up.dtype) {
        ref_gemm_swiglu(params, work, begin, end);
        return;
    }
    struct dot_job job = {.a = params->a,
                          .a_stride_bytes = params->hidden_size * (int64_t)sizeof(float),
                          .weights = {params->gate.elements, params->up.elements},
                          .num_matrices = 2,
                          .dtype = params->gate.dtype,
                          .num_tokens = params->num_tokens,
                          .num_elements = params->hidden_size,
                          .num_cols = params->intermediate_size,
                          .few_way = work->few_way,
                          .store = store_swiglu,
                          .params = params};
    avx2_dot_columns(&job, work->scratch, begin, end);
}

#endif
