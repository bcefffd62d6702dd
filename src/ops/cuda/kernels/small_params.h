/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels are told: products of few tokens. Compiled by gcc and by nvcc. */
#ifndef IMBREX_OPS_CUDA_KERNELS_SMALL_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_SMALL_PARAMS_H

#include <stdint.h>

/* A product of at most 64 tokens with a matrix, whose rows are taken in tiles of two times 8: the
 * low rows and, for each, a high one that is combined with it.
 *
 *             low and high row of pair p, 8 pairs a tile       the result
 *   qkv       partners in RoPE, tiles_per_head tiles a head    d [., out_features] bf16 and
 *                                                              the KV cache
 *   project   16 rows in a row                                 added to d [., out_features] fp32
 *   mlp       row p of gate, row p of up                       d [., out_features / 2] bf16
 *   logits    16 rows in a row                                 d [., out_features] fp32
 */
struct small_kernel_params {
    const void *weight; /* [out_features, in_features] bf16 */
    /* stream kernels and small_resident_project: [num_tokens, in_features] bf16; the other resident
     * ones: hidden, fp32, whose rows they normalise */
    const void *a;
    const int32_t *rows;      /* of a, one a token, or NULL; logits */
    const float *norm_weight; /* [in_features] */
    const float *bias;        /* [out_features] or NULL */
    void *d;
    const float *cos_sin;        /* [positions, head_dim] */
    const int32_t *positions;    /* [num_tokens] */
    const int32_t *slot_mapping; /* [num_tokens]; negative: not stored */
    unsigned char *kv_layer;     /* K of the layer in block 0, bf16 */
    int64_t kv_block_bytes;
    int32_t num_tokens, in_features, out_features, num_tiles;
    int32_t head_dim, num_heads, num_kv_heads, block_size;
    int32_t tiles_per_head, is_interleaved;
    float eps;
    /* Resident kernels: CTAs have so many tiles, the first extra_tiles one more. */
    int32_t cta_tiles, extra_tiles;
    /* small_single_project: 1, or 2 where in_features is a multiple of 128: a tile is 8 rows, and
     * the high ones are the second halves of the low ones. */
    int32_t num_parts;
    int32_t keeps_heads; /* qkv: heads are still to be normalised; d gets all of them, unrotated */
    int32_t keeps_kv;    /* qkv: d gets k and v as well, which kv_store takes from there */
};

/* normed = norm(hidden), one CTA of SMALL_THREADS a token. */
struct small_norm_params {
    const float *hidden; /* [., hidden_size] */
    const int32_t *rows; /* [tokens of the grid] or NULL */
    const float *weight; /* [hidden_size] */
    void *normed;        /* [tokens, hidden_size] bf16 */
    int32_t hidden_size; /* a multiple of 64 */
    float eps;
};

/* Of d of a qkv product with keeps_heads: heads of q and k normalised and rotated, k and v stored.
 * A CTA of 32 threads for each head (x) and token (y). */
struct small_heads_params {
    void *qkv;           /* [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] bf16 */
    const float *q_norm; /* [head_dim] or NULL */
    const float *k_norm;
    const float *cos_sin;
    const int32_t *positions;
    const int32_t *slot_mapping;
    unsigned char *kv_layer;
    int64_t kv_block_bytes;
    int32_t head_dim, num_heads, num_kv_heads, block_size;
    int32_t is_interleaved;
    float eps;
};

/* All kernels but small_heads. */
#define SMALL_WARPS 8
#define SMALL_THREADS (32 * SMALL_WARPS)
/* Of k that a warp multiplies at once with a tile's 16 rows: whole cache lines. */
#define SMALL_CHUNK 64
#define SMALL_CHUNK_BYTES (16 * SMALL_CHUNK * 2)

/* Resident kernels: at most 8 tokens, whose activations stay in shared memory, rows 64 bytes longer
 * than in_features. Before them come the sums of each warp of SMALL_RESIDENT_SUMS tiles, 128 bytes
 * for every two tokens; behind them the chunks under way, as many a warp as the kernel is named for
 * or as it has to multiply. "single" is one token. */
#define SMALL_RESIDENT_TOKENS 8
#define SMALL_RESIDENT_SUMS 4
#define SMALL_RESIDENT_SUM_BYTES(num_tokens) \
    (SMALL_RESIDENT_SUMS * SMALL_WARPS * ((num_tokens) == 1 ? 64 : 128 * (((num_tokens) + 1) / 2)))
/* With more beside the chunks, two such kernels hardly fit an SM, and stream kernels are faster
 * (measured at 8 tokens of Qwen2.5 7B). */
#define SMALL_RESIDENT_MAX_BASE_BYTES (56 << 10)
#define SMALL_RESIDENT_MAX_BYTES \
    (SMALL_RESIDENT_MAX_BASE_BYTES + 8 * SMALL_WARPS * SMALL_CHUNK_BYTES)

/* Stream kernels for up to 8 x tiles_n tokens: 4 warps along the rows, 2 along k. A stage holds a
 * chunk of each warp and the activations of both chunks, rows 64 bytes longer than these are. */
#define SMALL_STREAM_WARPS_K 2
#define SMALL_STREAM_TILES (SMALL_WARPS / SMALL_STREAM_WARPS_K)
#define SMALL_STREAM_ROW_BYTES (SMALL_STREAM_WARPS_K * SMALL_CHUNK * 2 + 64)
#define SMALL_STREAM_STAGES(tiles_n) ((tiles_n) <= 2 ? 5 : (tiles_n) == 4 ? 4 : 3)
#define SMALL_STREAM_STAGE_BYTES(tiles_n) \
    (SMALL_WARPS * SMALL_CHUNK_BYTES + 8 * (tiles_n)*SMALL_STREAM_ROW_BYTES)
#define SMALL_STREAM_BYTES(tiles_n) \
    (SMALL_STREAM_STAGES(tiles_n) * SMALL_STREAM_STAGE_BYTES(tiles_n))

/* X(symbol, image, params type, most dynamic shared bytes) */
#define SMALL_STREAM_KERNELS(X, op)                                                            \
    X(small_stream_##op##_8, small_stream, struct small_kernel_params, SMALL_STREAM_BYTES(1))  \
    X(small_stream_##op##_16, small_stream, struct small_kernel_params, SMALL_STREAM_BYTES(2)) \
    X(small_stream_##op##_32, small_stream, struct small_kernel_params, SMALL_STREAM_BYTES(4)) \
    X(small_stream_##op##_64, small_stream, struct small_kernel_params, SMALL_STREAM_BYTES(8))
#define SMALL_RESIDENT_KERNEL(X, symbol) \
    X(symbol, small_resident, struct small_kernel_params, SMALL_RESIDENT_MAX_BYTES)
#define SMALL_RESIDENT_KERNELS(X, op)                 \
    SMALL_RESIDENT_KERNEL(X, small_resident_##op##_4) \
    SMALL_RESIDENT_KERNEL(X, small_resident_##op##_8) \
    SMALL_RESIDENT_KERNEL(X, small_single_##op##_4)   \
    SMALL_RESIDENT_KERNEL(X, small_single_##op##_8)
#define SMALL_KERNELS(X)                                     \
    SMALL_RESIDENT_KERNELS(X, qkv)                           \
    SMALL_RESIDENT_KERNELS(X, project)                       \
    SMALL_RESIDENT_KERNELS(X, mlp)                           \
    SMALL_RESIDENT_KERNELS(X, logits)                        \
    SMALL_STREAM_KERNELS(X, qkv)                             \
    SMALL_STREAM_KERNELS(X, project)                         \
    SMALL_STREAM_KERNELS(X, mlp)                             \
    SMALL_STREAM_KERNELS(X, logits)                          \
    X(small_norm, small_stream, struct small_norm_params, 0) \
    X(small_heads, small_stream, struct small_heads_params, 0)

#endif
