/* SPDX-License-Identifier: Apache-2.0 */
/* What a launch of the GEMM for q, k and v is told, and the kernels that exist. Compiled by gcc and
 * by nvcc.
 *
 * D[M, N] = A[M, K] · B[N, K]ᵀ + bias, of which heads of q and k are normalised, if asked to, and
 * rotated; q is stored in D, k and v in the KV cache (see rope_kv_params of ops.h), all in fp32
 * until they are stored as bf16. A launch is that of gemm_swiglu_params.h in the plain form with
 * tiles of one width, which is a multiple of head_dim; D's k and v columns are not written. */
#ifndef IMBREX_OPS_CUDA_KERNELS_GEMM_QKV_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_GEMM_QKV_PARAMS_H

#include "ops/cuda/kernels/gemm_swiglu_params.h"

struct gemm_qkv_params {
    struct gemm_tile_params tile; /* up, d_rest and d_rest_narrow are not used */
    const float *cos_sin;         /* [positions, head_dim] */
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    const int32_t *positions;     /* [M] */
    const int32_t *slot_mapping;  /* [M]; negative: not stored */
    unsigned char *blocks;        /* of the KV cache */
    int64_t block_bytes;
    int64_t layer_offset;    /* bytes of a block ahead of the layer's K */
    int32_t num_rows;        /* M */
    int32_t q_columns;       /* columns of q */
    int32_t rotated_columns; /* of q and k */
    int32_t block_size;
    int32_t is_interleaved;
    float norm_eps;
    int32_t reserved[10];
};

#ifdef __cplusplus
static_assert(sizeof(struct gemm_qkv_params) == 8 * 128, "gcc and nvcc must agree");
#else
_Static_assert(sizeof(struct gemm_qkv_params) == 8 * 128, "gcc and nvcc must agree");
#endif

/* X(with, head_dim, schedule, block_m, block_n, num_stages, num_slots): lines of GEMM_VARIANTS,
 * whose costs these kernels have, but for the head_dim. */
#define GEMM_QKV_VARIANTS(X, with)            \
    X(with, 64, pingpong, 64, 64, 8, 2)       \
    X(with, 64, pingpong, 64, 128, 8, 2)      \
    X(with, 64, pingpong, 64, 192, 6, 2)      \
    X(with, 64, pingpong, 128, 128, 6, 2)     \
    X(with, 64, cooperative, 128, 64, 8, 2)   \
    X(with, 64, cooperative, 128, 128, 6, 2)  \
    X(with, 64, cooperative, 128, 192, 4, 2)  \
    X(with, 64, cooperative, 128, 256, 4, 2)  \
    X(with, 128, pingpong, 64, 128, 8, 2)     \
    X(with, 128, pingpong, 128, 128, 6, 2)    \
    X(with, 128, cooperative, 128, 128, 6, 2) \
    X(with, 128, cooperative, 128, 256, 4, 2) \
    X(with, 128, cooperative, 256, 128, 4, 2)

/* X(symbol, image, params type, most dynamic shared bytes) */
#define GEMM_QKV_ROW(X, head_dim, schedule, block_m, block_n, num_stages, num_slots)    \
    X(gemm_qkv_bf16_sm90_head##head_dim##_##schedule##_##block_m##x##block_n, gemm_qkv, \
      struct gemm_qkv_params, GEMM_TILE_SHARED_BYTES(block_m, block_n, num_stages, num_slots))
#define GEMM_QKV_KERNELS(X) GEMM_QKV_VARIANTS(GEMM_QKV_ROW, X)

#endif
