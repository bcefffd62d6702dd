/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels are told: any size, fp32 or bf16. Compiled by gcc and by nvcc.
 *
 * Activations, weights and the KV cache are of one type, T: float or bf16, by the kernel. */
#ifndef IMBREX_OPS_CUDA_KERNELS_PLAIN_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_PLAIN_PARAMS_H

#include <stdint.h>

/* d[i, :] = norm(a[rows[i], :]) * weight; one CTA a row of d, PLAIN_THREADS threads. */
struct plain_norm_params {
    const float *a;      /* [tokens, width] */
    const int32_t *rows; /* [rows of the grid], or NULL: the same */
    const float *weight; /* [width] */
    void *d;             /* [rows, width] T */
    int32_t width;
    float eps;
};

/* d = a · weightᵀ + bias, and what the kernel makes of it: stored as T, stored as fp32 (logits),
 * added to fp32, or silu(d) * (a · up_weightᵀ + up_bias) as T. A CTA makes a tile: grid x walks
 * over columns, y over rows. */
struct plain_product_params {
    const void *a;         /* [num_rows, in_features] T */
    const void *weight;    /* [out_features, in_features] T */
    const void *up_weight; /* of swiglu alone, the same shape */
    const float *bias;     /* [out_features] or NULL */
    const float *up_bias;  /* likewise */
    void *d;               /* [num_rows, out_features] */
    int32_t num_rows, in_features, out_features;
    int32_t reserved;
};

/* One layer of a struct kv_view. */
struct plain_kv {
    unsigned char *blocks; /* K of the layer in block 0 */
    int64_t block_bytes;
    int32_t num_kv_heads, block_size, head_dim;
    int32_t reserved;
};

/* As struct qkv_params from the products on; a warp for a head of a token. */
struct plain_rope_params {
    void *qkv;                    /* [tokens, all heads * head_dim] T: q rotated in place */
    const float *cos_sin;         /* [positions, head_dim] */
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    const int32_t *positions;     /* [tokens] */
    const int32_t *slot_mapping;  /* [tokens]; negative: the token is left alone */
    struct plain_kv kv;
    int32_t num_tokens, num_heads;
    float norm_eps;
    int32_t is_interleaved;
};

/* As struct attend_params; one CTA of PLAIN_THREADS threads for a token (grid x) and head (y). */
struct plain_attend_params {
    const void *qkv; /* [tokens, all heads * head_dim] T */
    void *d;         /* [tokens, num_heads * head_dim] T */
    struct plain_kv kv;
    const int32_t *block_tables; /* [num_seqs, max_blocks] */
    const int32_t *seq_idx;      /* [tokens] */
    const int32_t *positions;    /* [tokens] */
    int32_t num_heads, max_blocks, window;
    float scale;
};

#define PLAIN_THREADS 256
/* A tile of a product. */
#define PLAIN_TILE_ROWS 64
#define PLAIN_TILE_COLUMNS 64
#define PLAIN_MAX_HEAD_DIM 512

/* X(symbol, image, params type, most dynamic shared bytes) */
#define PLAIN_KERNELS_OF(X, type)                                 \
    X(plain_norm_##type, plain, struct plain_norm_params, 0)      \
    X(plain_store_##type, plain, struct plain_product_params, 0)  \
    X(plain_logits_##type, plain, struct plain_product_params, 0) \
    X(plain_add_##type, plain, struct plain_product_params, 0)    \
    X(plain_swiglu_##type, plain, struct plain_product_params, 0) \
    X(plain_rope_##type, plain, struct plain_rope_params, 0)      \
    X(plain_attend_##type, plain, struct plain_attend_params, 0)
#define PLAIN_KERNELS(X)     \
    PLAIN_KERNELS_OF(X, f32) \
    PLAIN_KERNELS_OF(X, bf16)

#endif
