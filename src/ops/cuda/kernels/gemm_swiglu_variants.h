/* SPDX-License-Identifier: Apache-2.0 */
/* The Hopper GEMM kernels that exist: a line is a symbol for nvcc and a row of the host's table.
 *   X(schedule, block_m, block_n, num_stages, num_slots)
 * block_n counts gate and up columns together in the fused kernels: a tile of D has block_n / 2
 * columns there, block_n in the plain ones. Each kernel also computes tiles 16 narrower, which a
 * launch may mix with the wide ones (num_wide). num_slots: output chunks in flight per warpgroup.
 *
 * What limits the tiles:
 *   block_n <= 256, in steps of 16    wgmma; gate and up columns come in pairs of 8
 *   block_m a multiple of 64          wgmma, one warpgroup; of 128 where two share a tile
 *   block_m * block_n                 pingpong <= 128 * 192, cooperative <= 256 * 192: 192 fp32
 *                                     accumulators in the 232 registers of a thread
 *   GEMM_TILE_SHARED_BYTES            at most GEMM_TILE_SHARED_LIMIT
 * docs/kernels.md names the legal shapes that are not listed, and why.
 */
#ifndef IMBREX_OPS_CUDA_KERNELS_GEMM_SWIGLU_VARIANTS_H
#define IMBREX_OPS_CUDA_KERNELS_GEMM_SWIGLU_VARIANTS_H

#include "ops/cuda/kernels/gemm_swiglu_params.h"

/* Symbols: gemm_swiglu_bf16_sm90_pair_<schedule>_<block_m>x<block_n>, in the fatbin
 * gemm_swiglu_<schedule>. */
#define GEMM_SWIGLU_PAIR_PINGPONG(X) \
    X(pingpong, 64, 96, 8, 2)        \
    X(pingpong, 64, 128, 8, 2)       \
    X(pingpong, 64, 160, 6, 2)       \
    X(pingpong, 64, 192, 6, 2)       \
    X(pingpong, 64, 224, 5, 2)       \
    X(pingpong, 64, 256, 4, 2)       \
    X(pingpong, 128, 80, 7, 2)       \
    X(pingpong, 128, 96, 6, 2)       \
    X(pingpong, 128, 112, 6, 2)      \
    X(pingpong, 128, 128, 6, 2)      \
    X(pingpong, 128, 144, 5, 2)      \
    X(pingpong, 128, 160, 5, 2)      \
    X(pingpong, 128, 176, 5, 2)      \
    X(pingpong, 128, 192, 4, 2)

#define GEMM_SWIGLU_PAIR_COOPERATIVE(X) \
    X(cooperative, 128, 80, 7, 2)       \
    X(cooperative, 128, 96, 6, 2)       \
    X(cooperative, 128, 112, 6, 2)      \
    X(cooperative, 128, 128, 6, 2)      \
    X(cooperative, 128, 144, 5, 2)      \
    X(cooperative, 128, 160, 5, 2)      \
    X(cooperative, 128, 176, 5, 2)      \
    X(cooperative, 128, 192, 4, 2)      \
    X(cooperative, 128, 208, 4, 2)      \
    X(cooperative, 128, 224, 4, 2)      \
    X(cooperative, 128, 256, 4, 2)      \
    X(cooperative, 256, 144, 4, 1)      \
    X(cooperative, 256, 160, 4, 1)      \
    X(cooperative, 256, 176, 3, 2)      \
    X(cooperative, 256, 192, 3, 2)

#define GEMM_SWIGLU_PAIR_VARIANTS(X) GEMM_SWIGLU_PAIR_PINGPONG(X) GEMM_SWIGLU_PAIR_COOPERATIVE(X)

/* gemm_swiglu_bf16_sm90_split_..., fatbin gemm_swiglu_split: for the matrices that no pair view
 * covers; few, since these are rare. */
#define GEMM_SWIGLU_SPLIT_VARIANTS(X) \
    X(pingpong, 64, 128, 8, 2)        \
    X(pingpong, 128, 128, 6, 2)       \
    X(pingpong, 128, 192, 4, 2)       \
    X(cooperative, 128, 160, 5, 2)    \
    X(cooperative, 128, 256, 4, 2)    \
    X(cooperative, 256, 192, 3, 2)

/* gemm_swiglu_bf16_sm90_gate_first_..., fatbin gemm_swiglu_gate_first: for any layout of gate and
 * up. A stage holds rows of A and of one of the two, so GEMM_TILE_SHARED_BYTES counts block_n / 2;
 * gate and up are block_n / 2 <= 192 columns of wgmma each. */
#define GEMM_SWIGLU_GATE_FIRST_VARIANTS(X) \
    X(gate_first, 64, 256, 8, 2)           \
    X(gate_first, 64, 320, 6, 2)           \
    X(gate_first, 64, 384, 6, 2)           \
    X(gate_first, 128, 128, 8, 2)          \
    X(gate_first, 128, 160, 7, 2)          \
    X(gate_first, 128, 192, 6, 2)

/* gemm_swiglu_bf16_sm90_general_..., fatbin gemm_swiglu_general: biases, and gating that is not
 * SiLU in exact rounding. Their epilogue is long, and every start of a kernel waits for its code to
 * come: so they compute no narrow tiles, whose code would be another one. */
#define GEMM_SWIGLU_GENERAL_VARIANTS(X) \
    X(pingpong, 64, 128, 8, 2)          \
    X(pingpong, 128, 128, 6, 2)         \
    X(pingpong, 128, 192, 4, 2)         \
    X(cooperative, 128, 144, 5, 2)      \
    X(cooperative, 128, 256, 4, 2)      \
    X(cooperative, 256, 192, 3, 2)

/* gemm_swiglu_bf16_sm90_general_split_..., fatbin gemm_swiglu_general_split. */
#define GEMM_SWIGLU_GENERAL_SPLIT_VARIANTS(X) \
    X(pingpong, 64, 128, 8, 2)                \
    X(pingpong, 128, 160, 5, 2)               \
    X(cooperative, 128, 256, 4, 2)

/* gemm_bf16_sm90_plain_..., fatbin gemm. */
#define GEMM_VARIANTS(X)           \
    X(pingpong, 64, 64, 8, 2)      \
    X(pingpong, 64, 96, 8, 2)      \
    X(pingpong, 64, 128, 8, 2)     \
    X(pingpong, 64, 160, 6, 2)     \
    X(pingpong, 64, 192, 6, 2)     \
    X(pingpong, 64, 256, 4, 2)     \
    X(pingpong, 128, 112, 6, 2)    \
    X(pingpong, 128, 128, 6, 2)    \
    X(pingpong, 128, 144, 5, 2)    \
    X(pingpong, 128, 160, 5, 2)    \
    X(pingpong, 128, 176, 5, 2)    \
    X(pingpong, 128, 192, 4, 2)    \
    X(cooperative, 128, 64, 8, 2)  \
    X(cooperative, 128, 96, 6, 2)  \
    X(cooperative, 128, 112, 6, 2) \
    X(cooperative, 128, 128, 6, 2) \
    X(cooperative, 128, 160, 5, 2) \
    X(cooperative, 128, 192, 4, 2) \
    X(cooperative, 128, 224, 4, 2) \
    X(cooperative, 128, 256, 4, 2) \
    X(cooperative, 256, 128, 4, 2) \
    X(cooperative, 256, 160, 4, 1) \
    X(cooperative, 256, 192, 3, 2)

#endif
