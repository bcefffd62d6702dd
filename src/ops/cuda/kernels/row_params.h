/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels are told that work on single rows. Compiled by gcc and by nvcc. */
#ifndef IMBREX_OPS_CUDA_KERNELS_ROW_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_ROW_PARAMS_H

#include <stdint.h>

/* d[t, :] = table[token_ids[t], :], one CTA a token, any number of threads. */
struct embedding_kernel_params {
    const int32_t *token_ids; /* [tokens of the grid] */
    const void *table;        /* [vocab_size, hidden_size] bf16 or fp32, by the kernel */
    float *d;                 /* [tokens, hidden_size] */
    int32_t hidden_size;
    int32_t reserved;
};

/* cos_sin[p, i] = factor * cos(p * frequencies[i]), sines behind the cosines; p = position_begin +
 * the CTA's number, any number of threads. */
#define ROPE_TABLE_MAX_PAIRS 256
struct rope_table_kernel_params {
    double frequencies[ROPE_TABLE_MAX_PAIRS]; /* of num_pairs */
    float *cos_sin;                           /* [positions, 2 * num_pairs] */
    double factor;
    int32_t num_pairs, position_begin;
};

/* d[i, :] = bf16 of norm(a[rows[i], :]) * weight, one CTA a row. rmsnorm_<q> keeps a row in
 * registers, 4 q elements a thread: hidden_size is a multiple of 4 and at most 4 q * threads,
 * threads a multiple of 32. The order of the sum follows from hidden_size and threads. */
struct rmsnorm_kernel_params {
    const float *a;      /* rows of hidden_size, 16-byte aligned */
    const int32_t *rows; /* [rows of the grid] or NULL: the same */
    const float *weight; /* [hidden_size], 16-byte aligned */
    void *d;             /* [rows of the grid, hidden_size] bf16, 8-byte aligned */
    int32_t hidden_size;
    float eps;
};

/* Heads of q and k are normalised, if asked to, and rotated; q stays where it is, k and v go into
 * the cache (see rope_kv_params of ops.h). bf16.
 *
 * ROPE_KV_HEADS heads of a token are the work of a group of group_threads lanes, a power of 2 up to
 * 32, of which threads_of_head = head_dim / (2 * pairs) have `pairs` pairs of elements of each
 * head; rope_kv_<pairs>. Threads of the grid: num_groups * group_threads, rounded up to CTAs of
 * ROPE_KV_THREADS. */
struct rope_kv_kernel_params {
    void *qkv;                    /* [tokens, num_all_heads * head_dim] */
    const float *cos_sin;         /* [positions, head_dim] */
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    const int32_t *positions;     /* [tokens] */
    const int32_t *slot_mapping;  /* [tokens]; negative: not stored */
    unsigned char *blocks;        /* of the KV cache */
    int64_t block_bytes;
    int64_t layer_offset; /* bytes of a block ahead of the layer's K */
    int64_t num_groups;   /* tokens * groups_of_token */
    int32_t num_heads, num_kv_heads;
    int32_t num_all_heads; /* num_heads + 2 * num_kv_heads */
    int32_t head_dim, block_size;
    int32_t group_threads, threads_of_head;
    int32_t is_interleaved;
    int32_t groups_of_token; /* num_all_heads / ROPE_KV_HEADS, rounded up */
    float norm_eps;
    int32_t keeps_kv; /* k and v stay in qkv, as q does: kv_store takes them from there */
    int32_t reserved;
};
#define ROPE_KV_THREADS 128
#define ROPE_KV_HEADS 4

/* k and v, bf16, into a cache with scales (kv_dtype.h): kv_store_int8, kv_store_fp8. A warp has a
 * group of a row, a lane each of its elements; warps of the grid: tokens * 2 * num_kv_heads *
 * row_groups, rounded up to CTAs of KV_STORE_THREADS. */
struct kv_store_kernel_params {
    const void *qkv;             /* [tokens, num_heads + 2 * num_kv_heads, head_dim] */
    const int32_t *slot_mapping; /* [tokens]; negative: not stored */
    unsigned char *blocks;       /* of the KV cache */
    int64_t block_bytes;
    int64_t layer_offset; /* bytes of a block ahead of the layer's K */
    int64_t head_bytes;   /* of one head in a block; V's heads lie behind K's */
    int64_t num_warps;
    int32_t num_heads, num_kv_heads;
    int32_t head_dim, block_size;
    int32_t row_groups; /* scales of a row */
    /* The kernel behind begins before this one has waited for the one ahead: attention, which has
     * much to load that neither writes. */
    int32_t is_early;
};
#define KV_STORE_THREADS 128

/* d = silu(gate + gate_bias) * (up + up_bias), 8 columns a thread: CTAs (columns / 8 in x, rounded
 * up, tokens in y) of any number of threads. */
struct silu_mul_kernel_params {
    const void *gate_up;              /* [tokens, gate then up of intermediate_size] bf16 */
    const float *gate_bias, *up_bias; /* [intermediate_size], 16-byte aligned, or NULL */
    void *d;                          /* [tokens, intermediate_size] bf16 */
    int32_t intermediate_size;        /* a multiple of 8 */
    int32_t reserved;
};

/* hidden += bias + the sum of num_splits partial products, in their order: 4 columns a thread, CTAs
 * as silu_mul. */
struct split_add_kernel_params {
    float *hidden;        /* [tokens, num_columns] */
    const float *partial; /* [num_splits] x split_stride elements: rows as hidden has */
    const float *bias;    /* [num_columns] or NULL */
    int64_t split_stride;
    int32_t num_columns; /* a multiple of 4 */
    int32_t num_splits;
};

/* X(symbol, image, params type, most dynamic shared bytes) */
#define ROW_KERNELS(X)                                        \
    X(embedding_bf16, row, struct embedding_kernel_params, 0) \
    X(embedding_f32, row, struct embedding_kernel_params, 0)  \
    X(rope_table, row, struct rope_table_kernel_params, 0)    \
    X(rmsnorm_2, row, struct rmsnorm_kernel_params, 0)        \
    X(rmsnorm_4, row, struct rmsnorm_kernel_params, 0)        \
    X(rmsnorm_8, row, struct rmsnorm_kernel_params, 0)        \
    X(rope_kv_8, row, struct rope_kv_kernel_params, 0)        \
    X(rope_kv_4, row, struct rope_kv_kernel_params, 0)        \
    X(kv_store_int8, row, struct kv_store_kernel_params, 0)   \
    X(kv_store_fp8, row, struct kv_store_kernel_params, 0)    \
    X(silu_mul, row, struct silu_mul_kernel_params, 0)        \
    X(split_add, row, struct split_add_kernel_params, 0)

#endif
