/* SPDX-License-Identifier: Apache-2.0 */
/* What a launch of the Hopper GEMM kernels is told; compiled by gcc and by nvcc. One struct serves
 * the fused kernels, D[M, I] = silu(A[M, K] · gateᵀ) * (A · upᵀ), and their plain twin,
 * D[M, N] = A[M, K] · B[N, K]ᵀ + bias: they share everything but the epilogue.
 *
 * Tensor maps: bf16, element strides 1, no interleave, out-of-bounds elements read as zero.
 *   slice = ceil(block_n / 16 / cluster_m): what one CTA of a cluster loads of B, in 16-row pieces
 *   rest  = output columns of a tile mod 64; a tile block_n wide has block_n / 2 output columns in
 *           the fused kernels, block_n in the plain ones, a narrow tile 8 or 16 fewer
 *
 *   map     form   dims, innermost first  strides in bytes               box
 *   a       all    K, M                   lda * 2                        64, block_m / cluster_n
 *   b       pair   K, 8, 2, I / 8         ldb * 2, pair_stride, ldb * 16  64, 8, 2, slice
 *   b, up   split  K, I (gate; up)        ldb * 2 of each                64, 8 * slice
 *   b       plain  K, N                   ldb * 2                        64, 16 * slice
 *   d       all    columns of D, M        ldd * 2                        64, 16
 *   d_rest  all    columns of D, M        ldd * 2                        rest, 16
 *
 * Swizzle: 128B; d_rest 64B where rest == 32, 32B where rest == 16, none elsewhere. d_rest is for
 * wide tiles, d_rest_narrow for narrow ones; a map that no tile uses is zeroed (rest == 0; fewer
 * than 64 output columns). L2 promotion: 256B for a, b, up; none for the others. Every base is
 * 16-byte aligned and every stride a multiple of 16 bytes below 2^40 (limits of the copy engine),
 * else no variant is legal. The general forms have the maps of pair and split.
 *
 * pair: gate and up rows come interleaved by 8 out of one view of both matrices. pair_stride is the
 * distance between the first rows of the two, and b starts at the one with the lower address. So it
 * serves [gate;up] (pair_stride = I * ldb * 2), [up;gate] (the same, up_first = 1) and two separate
 * pointers (their difference). It needs I % 8 == 0, equal row strides and a pair_stride below 2^40;
 * where these fail the split form is left. Where the two are interleaved by r = 1 or 8 rows of one
 * matrix, pair_stride is r * ldb * 2, the stride of a row ldb * 2 (r = 8) or twice that (r = 1),
 * and that of 8 rows 32 * ldb.
 *
 * Two widths: of the tiles along n the first num_wide are block_n wide, those after them block_n -
 * 16, so that the number of tiles can fill the last wave at any width on average. All uniform:
 * num_wide at least the number of tiles; so always in the general forms. Together they must cover
 * the columns of D.
 */
#ifndef IMBREX_OPS_CUDA_KERNELS_GEMM_SWIGLU_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_GEMM_SWIGLU_PARAMS_H

#include <cuda.h>
#include <stdint.h>

#include "ops/cuda/kernels/gating_params.h"

struct gemm_tile_params {
    CUtensorMap a;
    CUtensorMap b;
    CUtensorMap up;
    CUtensorMap d;
    CUtensorMap d_rest;
    CUtensorMap d_rest_narrow;
    const float *bias;    /* [N], of B, in the general forms of gate; NULL: none */
    int32_t num_k_blocks; /* ceil(K / 64), at least 1 */
    int32_t num_blocks_m; /* ceil(M / (block_m * cluster_m)): blocks of a whole cluster */
    int32_t num_blocks_n; /* ceil(tiles along n / cluster_n) */
    int32_t group_m;      /* blocks of m that are walked before the next block of n; at least 1 */
    int32_t num_columns;  /* columns of D: where bias ends */
    int32_t up_first;     /* pair: 1 where b starts at up */
    int32_t num_wide;     /* tiles of n, from the first on, that are block_n wide */
    int32_t cluster_m;
    int32_t cluster_n;
    int32_t weights_settled; /* 1: no running grid writes B, so it is read early */
    int32_t num_early;       /* k-blocks of the first weights that then are asked for ahead of A */
    /* General forms alone, from here on. */
    int32_t bias_step;       /* values from one bias of gate, or of up, to the next: 1 or 2 */
    const float *up_bias;    /* [I] or NULL */
    int32_t bias_group_step; /* values from 8 biases to the next 8: 8 or 16 */
    int32_t reserved;
    struct gating_params gating;
};

/* Launch rule. Threads: GEMM_TILE_THREADS. Cluster: (cluster_m * cluster_n, 1, 1), each 1, 2 or 4,
 * their product at most 4; the CTAs of a cluster that lie along m share the rows of B, those along
 * n the rows of A. Grid: min(num_blocks_m * num_blocks_n, clusters that the device holds at once) *
 * cluster size; each cluster walks the blocks that follow its own in steps of the number of
 * clusters. Dynamic shared memory: GEMM_TILE_SHARED_BYTES. M == 0 or no columns: launch nothing.
 * The kernels wait for the grid before them (griddepcontrol.wait) ahead of their first access to
 * memory, weights apart if settled, and let the next one start early, so that they may be launched
 * with programmatic stream serialization. */
#define GEMM_TILE_THREADS 384
#define GEMM_TILE_BLOCK_K 64
#define GEMM_TILE_SLOT_BYTES 8192 /* 64 rows x 64 columns of bf16 on their way out */
#define GEMM_TILE_SHARED_BYTES(block_m, block_n, num_stages, num_slots) \
    ((num_stages) * ((block_m) + (block_n)) * GEMM_TILE_BLOCK_K * 2 +   \
     2 * (num_slots)*GEMM_TILE_SLOT_BYTES + (num_stages)*16 + 1024)
#define GEMM_TILE_SHARED_LIMIT 232448 /* of a CTA, compute capability 9.0 */

#ifdef __cplusplus
static_assert(sizeof(struct gemm_tile_params) == 7 * 128, "gcc and nvcc must agree");
#else
_Static_assert(sizeof(struct gemm_tile_params) == 7 * 128, "gcc and nvcc must agree");
#endif

#endif
