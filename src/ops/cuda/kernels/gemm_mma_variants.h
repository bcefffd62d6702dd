/* SPDX-License-Identifier: Apache-2.0 */
/* The portable matrix kernels that exist: a line is a symbol for nvcc and a row of the host's
 * table.
 *   X(block_m, block_n, block_k, num_stages, warps_m, warps_n)
 * block_n counts gate and up rows together in the fused kernels.
 *
 * What limits the tiles:
 *   a warp's part, block_m / warps_m x block_n / warps_n: multiples of 16, at most 64 x 64, 128
 *   fp32 accumulators of a thread's 255 registers
 *   block_k 32 or 64: 2 or 4 steps of the instruction, so that fragments alternate
 *   32 * warps_m * warps_n threads copy whole runs of 16 rows at a time
 *   GEMM_MMA_SHARED_BYTES at most GEMM_MMA_SHARED_LIMIT
 */
#ifndef IMBREX_OPS_CUDA_KERNELS_GEMM_MMA_VARIANTS_H
#define IMBREX_OPS_CUDA_KERNELS_GEMM_MMA_VARIANTS_H

#include "ops/cuda/kernels/gemm_mma_params.h"

/* Symbols: gemm_swiglu_bf16_sm80_multistage_<block_m>x<block_n> and gemm_bf16_sm80_..., in the
 * fatbin gemm_mma. */
#define GEMM_MMA_VARIANTS(X) \
    X(256, 128, 32, 4, 4, 2) \
    X(128, 128, 32, 4, 2, 2) \
    X(64, 128, 64, 3, 2, 2)  \
    X(64, 64, 64, 4, 2, 2)   \
    X(32, 64, 64, 5, 1, 4)   \
    X(16, 64, 64, 6, 1, 4)

/* gemm_swiglu_bf16_sm80_general_..., fatbin gemm_mma_general: with biases and any gating; few,
 * since these are rare. */
#define GEMM_MMA_GENERAL_VARIANTS(X) \
    X(128, 128, 32, 4, 2, 2)         \
    X(64, 128, 64, 3, 2, 2)          \
    X(64, 64, 64, 4, 2, 2)           \
    X(16, 64, 64, 6, 1, 4)

#endif
