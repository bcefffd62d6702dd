/* SPDX-License-Identifier: Apache-2.0 */
/* What a launch of the portable matrix kernels is told; compiled by gcc and by nvcc. Fused: D[M, I]
 * = act(A[M, K] · gateᵀ + gate_bias) * (A · upᵀ + up_bias). Plain: D[M, N] = A[M, K] · B[N, K]ᵀ +
 * bias, as bf16, as fp32 or added to fp32.
 *
 * Matrices are row-major. Of A and the weights every row begins at a multiple of 16 bytes (the unit
 * of cp.async); what lies between a row's last element and the next row is not read. M, N, K and I
 * are any numbers from 1 on. */
#ifndef IMBREX_OPS_CUDA_KERNELS_GEMM_MMA_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_GEMM_MMA_PARAMS_H

#include <stdint.h>

#include "ops/cuda/kernels/gating_params.h"

/* What becomes of a plain product. */
#define GEMM_MMA_STORE_BF16 0
#define GEMM_MMA_STORE_F32 1
#define GEMM_MMA_ADD_F32 2

struct gemm_mma_params {
    const void *a;        /* [m, k] bf16 */
    const void *b;        /* [n, k] bf16; gate in the fused kernels */
    const void *up;       /* likewise; NULL in the plain ones */
    const float *bias;    /* [n], of b; NULL: none */
    const float *up_bias; /* likewise of up */
    void *d;              /* [m, n] bf16 or fp32; rows of bf16 begin at multiples of 16 bytes */
    int64_t a_stride, b_stride, up_stride, d_stride; /* elements */
    int32_t m, n, k;
    int32_t group_m; /* tiles of rows that are walked before the next columns; at least 1 */
    int32_t end;     /* GEMM_MMA_*; plain only */
    /* Fused only, from here on. Row i of b and of up lies at row i / 8 * row_group_step + i % 8 of
     * its matrix, their biases' value i at i / 8 * bias_group_step + i % 8 * bias_step. */
    int32_t row_group_step; /* 8, or 16 where gate and up take turns by 8 rows */
    int32_t bias_step, bias_group_step;
    int32_t reserved;
    struct gating_params gating; /* with the biases, of the general kernels alone */
};

/* Launch rule. Threads: 32 * warps_m * warps_n. Grid: ceil(M / block_m) * ceil(N / columns of a
 * tile). Dynamic shared memory: GEMM_MMA_SHARED_BYTES. */
#define GEMM_MMA_SHARED_BYTES(block_m, block_n, block_k, num_stages) \
    (((block_m) + (block_n)) * (block_k)*2 * (num_stages))
/* Of a thread block of compute capability 8.6, 8.9 and 12.0, the least of all from 8.0 on. */
#define GEMM_MMA_SHARED_LIMIT 101376

#ifdef __cplusplus
static_assert(sizeof(struct gemm_mma_params) == 144, "gcc and nvcc must agree");
#else
_Static_assert(sizeof(struct gemm_mma_params) == 144, "gcc and nvcc must agree");
#endif

#endif
