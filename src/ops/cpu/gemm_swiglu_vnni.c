/* SPDX-License-Identifier: Apache-2.0 */
/* The products of the same columns of gate and up, whatever the format of each, then SiLU and the
 * product while both are in L2. */
#include "ops/cpu/kernels_vnni.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/kernels_avx512.h"
#include "ops/cpu/quant_product_vnni.h"
#include "ops/cpu/vec_avx2.h"
#include "ops/ref/ref_kernels.h"

_Static_assert(VNNI_PANEL_BYTES + 2 * VNNI_SUMS * sizeof(float) <= CPU_SCRATCH_BYTES,
               "panel, sums of gate and of up");

static __m256 load_bias(const float *bias, int64_t col, __m256i mask)
{
    return bias == NULL ? _mm256_setzero_ps() : _mm256_maskload_ps(bias + col, mask);
}

static void store_sums(const struct gemm_swiglu_params *params, const struct vnni_run *run,
                       const float *gate_sums, const float *up_sums)
{
    const int32_t stride = vnni_run_cols(run->num_rows);
    for (int32_t first = 0; first < run->num_cols; first += VEC_LANES) {
        int32_t num_left = run->num_cols - first;
        __m256i mask = vec_mask_low(num_left < VEC_LANES ? num_left : VEC_LANES);
        __m256 gate_bias = load_bias(params->gate_bias, run->col + first, mask);
        __m256 up_bias = load_bias(params->up_bias, run->col + first, mask);
        for (int32_t r = 0; r < run->num_rows; r++) {
            int32_t at = r * stride + first;
            __m256 gate = _mm256_add_ps(_mm256_load_ps(gate_sums + at), gate_bias);
            __m256 up = _mm256_add_ps(_mm256_load_ps(up_sums + at), up_bias);
            float *d = params->d + (run->row + r) * params->intermediate_size + run->col + first;
            _mm256_maskstore_ps(d, mask, _mm256_mul_ps(vec_silu(gate), up));
        }
    }
}

void vnni_product_gemm_swiglu(vnni_compute_fn *compute, const struct gemm_swiglu_params *params,
                              const struct cpu_work *work, int64_t begin, int64_t end)
{
    struct vnni_product gate = vnni_product_of(params->gate, work->quant_rows, params->hidden_size);
    struct vnni_product up = vnni_product_of(params->up, work->quant_rows, params->hidden_size);
    gate.in_order = up.in_order = work->few_way == FEW_WAY_ORDERED;
    float *gate_sums = (float *)(void *)(work->scratch + VNNI_PANEL_BYTES);
    float *up_sums = gate_sums + VNNI_SUMS;
    vnni_product_prefetch(&gate, params->num_tokens, begin, end);
    for (int64_t row = 0; row < params->num_tokens; row += VNNI_PRODUCT_ROWS) {
        int64_t rows_left = params->num_tokens - row;
        struct vnni_run run = {.compute = compute, .row = row, .panel = work->scratch};
        run.num_rows = rows_left < VNNI_PRODUCT_ROWS ? (int32_t)rows_left : VNNI_PRODUCT_ROWS;
        int32_t run_cols = vnni_run_cols(run.num_rows);
        for (run.col = begin; run.col < end; run.col += run_cols) {
            run.num_cols = end - run.col < run_cols ? (int32_t)(end - run.col) : run_cols;
            run.next = vnni_address_of(&up, run.col);
            vnni_run_compute(&run, &gate, gate_sums);
            run.next = vnni_address_of(&gate, run.col + run.num_cols);
            vnni_run_compute(&run, &up, up_sums);
            store_sums(params, &run, gate_sums, up_sums);
        }
    }
}

void vnni_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                      int64_t begin, int64_t end)
{
    bool gate_is_quantized = dtype_is_quantized(params->gate.dtype);
    if (gate_is_quantized != dtype_is_quantized(params->up.dtype)) {
        ref_gemm_swiglu(params, work, begin, end); /* no checkpoint known does this */
    } else if (gate_is_quantized) {
        vnni_product_gemm_swiglu(vnni_product_compute, params, work, begin, end);
    } else {
        avx512_gemm_swiglu(params, work, begin, end);
    }
}

#endif
