/* SPDX-License-Identifier: Apache-2.0 */
/* What a launch of the GEMM with an fp32 result is told, and the kernels that exist. Compiled by
 * gcc and by nvcc.
 *
 *   D[M, N] += A[M, K] · B[N, K]ᵀ + bias      adds = 1: the residual stream
 *   D[M, N]  = A[M, K] · B[N, K]ᵀ + bias      adds = 0: logits
 *   D[split, row, N] = A · Bᵀ over the split's share of K
 *
 * A launch is that of gemm_swiglu_params.h in the plain form but for the maps of D and for splits.
 *
 *   map     dims, innermost first  box                   swizzle
 *   d       columns, rows of D     32, 16 fp32           128B
 *   d_rest  columns, rows of D     block_n mod 32 or 16  64B; both widths of tile: it is 16 or 0
 *
 * The columns of D are a multiple of 4 (the copy engine stores whole pieces of 16 bytes).
 *
 * Splits of K: rows of tiles count through all of them, tiles_of_split to a split (a multiple of
 * cluster_m), and so do the rows of D: with more than one split D is [num_splits * tiles_of_split *
 * block_m, N], rows beyond M undefined, and adds = 0, bias = NULL. Split s takes the k-blocks
 * [s * num_k_blocks / num_splits, (s + 1) * num_k_blocks / num_splits), num_splits <= num_k_blocks.
 * tile.num_blocks_m counts all splits. */
#ifndef IMBREX_OPS_CUDA_KERNELS_GEMM_RESIDUAL_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_GEMM_RESIDUAL_PARAMS_H

#include "ops/cuda/kernels/gemm_swiglu_params.h"

struct gemm_residual_params {
    struct gemm_tile_params tile; /* up and d_rest_narrow are not used */
    int32_t num_splits;
    int32_t tiles_of_split; /* along m */
    int32_t adds;
    int32_t reserved[29];
};

#ifdef __cplusplus
static_assert(sizeof(struct gemm_residual_params) == 8 * 128, "gcc and nvcc must agree");
#else
_Static_assert(sizeof(struct gemm_residual_params) == 8 * 128, "gcc and nvcc must agree");
#endif

#define GEMM_RESIDUAL_CHUNK_COLUMNS 32 /* of fp32, in a row of 128 bytes */

/* X(with, schedule, block_m, block_n, num_stages, num_slots): lines of GEMM_VARIANTS, whose costs
 * these kernels have. */
#define GEMM_RESIDUAL_VARIANTS(X, with)  \
    X(with, pingpong, 64, 64, 8, 2)      \
    X(with, pingpong, 64, 96, 8, 2)      \
    X(with, pingpong, 64, 128, 8, 2)     \
    X(with, pingpong, 64, 192, 6, 2)     \
    X(with, pingpong, 128, 112, 6, 2)    \
    X(with, pingpong, 128, 128, 6, 2)    \
    X(with, pingpong, 128, 144, 5, 2)    \
    X(with, pingpong, 128, 160, 5, 2)    \
    X(with, pingpong, 128, 176, 5, 2)    \
    X(with, pingpong, 128, 192, 4, 2)    \
    X(with, cooperative, 128, 64, 8, 2)  \
    X(with, cooperative, 128, 96, 6, 2)  \
    X(with, cooperative, 128, 112, 6, 2) \
    X(with, cooperative, 128, 128, 6, 2) \
    X(with, cooperative, 128, 192, 4, 2) \
    X(with, cooperative, 128, 224, 4, 2) \
    X(with, cooperative, 128, 256, 4, 2) \
    X(with, cooperative, 256, 128, 4, 2)

/* X(symbol, image, params type, most dynamic shared bytes) */
#define GEMM_RESIDUAL_ROW(X, schedule, block_m, block_n, num_stages, num_slots)  \
    X(gemm_residual_bf16_sm90_##schedule##_##block_m##x##block_n, gemm_residual, \
      struct gemm_residual_params,                                               \
      GEMM_TILE_SHARED_BYTES(block_m, block_n, num_stages, num_slots))
#define GEMM_RESIDUAL_KERNELS(X) GEMM_RESIDUAL_VARIANTS(GEMM_RESIDUAL_ROW, X)

#endif
