/* SPDX-License-Identifier: Apache-2.0 */
/* Each tile takes gate rows and up rows of the same columns, so the activations are read once for
 * both; the sums of one tile of rows go through SiLU and the product while they are in L1. */
#include "ops/cpu/kernels_avx512.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/dot_columns_avx512.h"
#include "ops/cpu/kernels_avx2.h"
#include "ops/cpu/vec_avx512.h"

static __m512 add_bias(__m512 sum, const float *bias, int64_t col, __mmask16 mask)
{
    return bias == NULL ? sum : _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, bias + col));
}

static void store_swiglu(const void *arg, const struct dot_sums *sums)
{
    const struct gemm_swiglu_params *params = arg;
    for (int32_t row = 0; row < sums->num_rows; row++) {
        float *d = params->d + (sums->first_row + row) * params->intermediate_size;
        for (int32_t idx = 0; idx < sums->num_cols; idx += VEC_LANES) {
            int64_t col = sums->first_col + idx;
            __mmask16 mask = vec_mask_low(sums->num_cols - idx);
            __m512 gate = _mm512_load_ps(sums->at[0] + row * sums->stride + idx);
            __m512 up = _mm512_load_ps(sums->at[1] + row * sums->stride + idx);
            gate = add_bias(gate, params->gate_bias, col, mask);
            up = add_bias(up, params->up_bias, col, mask);
            _mm512_mask_storeu_ps(d + col, mask, _mm512_mul_ps(vec_silu(gate), up));
        }
    }
}

void avx512_gemm_swiglu_by(dot_walk_fn *walk, const void *a, int64_t a_stride_bytes,
                           const struct gemm_swiglu_params *params, const struct cpu_work *work,
                           int64_t begin, int64_t end)
{
    struct dot_job job = {.a = a,
                          .a_stride_bytes = a_stride_bytes,
                          .weights = {params->gate.elements, params->up.elements},
                          .num_matrices = 2,
                          .dtype = params->gate.dtype,
                          .num_tokens = params->num_tokens,
                          .num_elements = params->hidden_size,
                          .num_cols = params->intermediate_size,
                          .few_way = work->few_way,
                          .store = store_swiglu,
                          .params = params};
    walk(&job, work->scratch, begin, end);
}

void avx512_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                        int64_t begin, int64_t end)
{
    /* A tile has one dtype; no checkpoint known mixes plain ones. */
    if (params->gate.dtype != params->up.dtype || dtype_is_quantized(params->gate.dtype)) {
        avx2_gemm_swiglu(params, work, begin, end);
        return;
    }
    avx512_gemm_swiglu_by(avx512_dot_columns, params->a,
                          params->hidden_size * (int64_t)sizeof(float), params, work, begin, end);
}

#endif
