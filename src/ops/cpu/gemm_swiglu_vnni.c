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

#define SUMS_BYTES (VNNI_PRODUCT_ROWS * VNNI_PRODUCT_COLS * sizeof(float))

_Static_assert(VNNI_PANEL_BYTES + 2 * SUMS_BYTES <= CPU_SCRATCH_BYTES,
               "panel, sums of gate and of up");

static __m256 load_bias(const float *bias, int64_t col, __m256i mask)
{
    return bias == NULL ? _mm256_setzero_ps() : _mm256_maskload_ps(bias + col, mask);
}

static void store_sums(const struct gemm_swiglu_params *params, const float *gate_sums,
                       const float *up_sums, int64_t row, int32_t num_rows, int64_t col,
                       int32_t num_cols)
{
    for (int32_t first = 0; first < num_cols; first += VEC_LANES) {
        int32_t num_left = num_cols - first;
        __m256i mask = vec_mask_low(num_left < VEC_LANES ? num_left : VEC_LANES);
        __m256 gate_bias = load_bias(params->gate_bias, col + first, mask);
        __m256 up_bias = load_bias(params->up_bias, col + first, mask);
        for (int32_t r = 0; r < num_rows; r++) {
            int32_t at = r * VNNI_PRODUCT_COLS + first;
            __m256 gate = _mm256_add_ps(_mm256_load_ps(gate_sums + at), gate_bias);
            __m256 up = _mm256_add_ps(_mm256_load_ps(up_sums + at), up_bias);
            float *d = params->d + (row + r) * params->intermediate_size + col + first;
            _mm256_maskstore_ps(d, mask, _mm256_mul_ps(vec_silu(gate), up));
        }
    }
}

/* Few rows: one matrix is read for so many calls before it is the other one's turn, since memory
 * gives one stream faster than two that take turns often. */
#define RUN_CALLS 32
#define MAX_RUN_ROWS (VNNI_PRODUCT_ROWS / RUN_CALLS)

struct call {
    vnni_compute_fn *compute;
    unsigned char *panel;
    int64_t row, width;
    int32_t num_rows;
};

/* Floats that the sums of one call take. */
static int64_t call_sums(const struct call *call)
{
    return (int64_t)call->num_rows * VNNI_PRODUCT_COLS;
}

/* Columns [begin, end), the sums of each call behind those of the last. */
static void compute_run(const struct call *call, const struct vnni_product *product, int64_t begin,
                        int64_t end, float *sums)
{
    for (int64_t col = begin; col < end; col += call->width, sums += call_sums(call)) {
        int64_t num_left = end - col;
        call->compute(product, call->row, call->num_rows, col,
                      (int32_t)(num_left < call->width ? num_left : call->width), sums,
                      call->panel);
    }
}

void vnni_product_gemm_swiglu(vnni_compute_fn *compute, const struct gemm_swiglu_params *params,
                              const struct cpu_work *work, int64_t begin, int64_t end)
{
    struct vnni_product gate = vnni_product_of(params->gate, work->quant_rows, params->hidden_size);
    struct vnni_product up = vnni_product_of(params->up, work->quant_rows, params->hidden_size);
    unsigned char *panel = work->scratch;
    float *gate_sums = (float *)(void *)(work->scratch + VNNI_PANEL_BYTES);
    float *up_sums = gate_sums + SUMS_BYTES / sizeof(float);
    vnni_product_prefetch(&gate, params->num_tokens, begin, end - begin);
    vnni_product_prefetch(&up, params->num_tokens, begin, end - begin);
    for (int64_t row = 0; row < params->num_tokens; row += VNNI_PRODUCT_ROWS) {
        int64_t rows_left = params->num_tokens - row;
        int32_t num_rows = rows_left < VNNI_PRODUCT_ROWS ? (int32_t)rows_left : VNNI_PRODUCT_ROWS;
        struct call call = {.compute = compute,
                            .panel = panel,
                            .row = row,
                            .num_rows = num_rows,
                            .width = vnni_product_cols(num_rows)};
        /* Calls that share the memory of the sums. */
        int64_t run_cols = call.width * (num_rows <= MAX_RUN_ROWS ? RUN_CALLS : 1);
        for (int64_t col = begin; col < end; col += run_cols) {
            int64_t run_end = end - col < run_cols ? end : col + run_cols;
            compute_run(&call, &gate, col, run_end, gate_sums);
            compute_run(&call, &up, col, run_end, up_sums);
            for (int64_t at = col, idx = 0; at < run_end; at += call.width, idx++) {
                int64_t num_left = run_end - at;
                store_sums(params, gate_sums + idx * call_sums(&call),
                           up_sums + idx * call_sums(&call), row, num_rows, at,
                           (int32_t)(num_left < call.width ? num_left : call.width));
            }
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
