/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels are told: attention of many tokens of a sequence. Compiled by gcc and by nvcc.
 *
 * Rows: the query heads of one kv head lie beside each other, so that all of them meet the same
 * keys: row r of a sequence is token r / group_heads of its tokens in the step, head r %
 * group_heads of the kv head. A CTA has PREFILL_TILE_ROWS rows of one kv head of one sequence.
 *
 * Tensor map kv: the cache in bf16, dims innermost first head_dim, 16 keys, planes (2 * num_layers
 * * num_kv_heads: for each layer K of each head, then V of each), blocks; box 64, 16, 1, 1; swizzle
 * 128B. Of 8-bit elements with scales (kv_dtype.h) there is none: keys says where they are. */
#ifndef IMBREX_OPS_CUDA_KERNELS_PREFILL_ATTENTION_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_PREFILL_ATTENTION_PARAMS_H

#include <cuda.h>
#include <stdint.h>

struct prefill_attention_params {
    CUtensorMap kv;
    const void *qkv; /* [tokens, (num_heads + 2 * num_kv_heads) * head_dim] bf16 */
    void *d;         /* [tokens, num_heads * head_dim] bf16, of the sequences' tokens alone */
    const int32_t *block_tables; /* [num_seqs, max_blocks] */
    const int32_t *positions;    /* [tokens] */
    const int32_t *query_begin;  /* [num_seqs + 1] */
    const int32_t *seq_lens;     /* [num_seqs] */
    const unsigned char *keys;   /* 8-bit: of this layer in block 0; values are value_bytes on */
    int64_t block_bytes, value_bytes;
    float scale_log2e; /* scale * log2(e) */
    int32_t k_plane;   /* of head 0 in this layer; its V is num_kv_heads planes on */
    int32_t num_seqs, num_kv_heads, group_heads, max_blocks;
    int32_t min_query;     /* sequences with fewer tokens in the step are left alone */
    int32_t window;        /* at least 1; PREFILL_NO_WINDOW: all keys */
    int32_t heads_in_turn; /* 1: all tiles of a kv head, then the next head's; 0: the heads of a
                              tile beside each other */
    int32_t reserved;
};

/* Launch rule. Threads: 128 for the producer and for each 64 rows of a tile. Grid: one dimension,
 * num_kv_heads * (num_tokens * group_heads / tile rows + num_seqs), which the tiles of all
 * sequences cannot exceed. Dynamic shared memory: PREFILL_SHARED_BYTES. No tokens: launch
 * nothing. */
#define PREFILL_BLOCK_SIZE 16 /* keys of a cache block */
#define PREFILL_TILE_KEYS 128
#define PREFILL_NO_WINDOW (1 << 30)
#define PREFILL_ROWS_64 192 /* of a tile, by head_dim */
#define PREFILL_ROWS_128 128
#define PREFILL_STAGES_64 4 /* tiles of keys, and of values, in shared memory */
#define PREFILL_STAGES_128 2
#define PREFILL_SHARED_BYTES(head_dim, rows, stages) \
    (((rows) + 2 * (stages)*PREFILL_TILE_KEYS) * (head_dim)*2 + 8 * (4 * (stages) + 1) + 1024)

/* 8-bit: each of the producer's warps takes two blocks of a tile, elements and scales as they lie
 * in the cache, into one of so many slots, each with a barrier. */
#define PREFILL_PRODUCER_WARPS 4
#define PREFILL_SLOTS_64 4
#define PREFILL_SLOTS_128 3
#define PREFILL_HEAD_BYTES(head_dim) (PREFILL_BLOCK_SIZE * ((head_dim) + (head_dim) / 16))
#define PREFILL_SLOT_BYTES(head_dim) (2 * PREFILL_HEAD_BYTES(head_dim))
#define PREFILL_SCALED_SHARED_BYTES(head_dim, rows, stages, slots) \
    (PREFILL_SHARED_BYTES(head_dim, rows, stages) +                \
     PREFILL_PRODUCER_WARPS * (slots) * (PREFILL_SLOT_BYTES(head_dim) + 8) + 8)

#define PREFILL_KERNEL(X, kind, head_dim, num_bytes)                 \
    X(prefill_attention_##kind##_sm90_##head_dim, prefill_attention, \
      struct prefill_attention_params, num_bytes)

#define PREFILL_SHARED_64 PREFILL_SHARED_BYTES(64, PREFILL_ROWS_64, PREFILL_STAGES_64)
#define PREFILL_SHARED_128 PREFILL_SHARED_BYTES(128, PREFILL_ROWS_128, PREFILL_STAGES_128)
#define PREFILL_SCALED_SHARED_64 \
    PREFILL_SCALED_SHARED_BYTES(64, PREFILL_ROWS_64, PREFILL_STAGES_64, PREFILL_SLOTS_64)
#define PREFILL_SCALED_SHARED_128 \
    PREFILL_SCALED_SHARED_BYTES(128, PREFILL_ROWS_128, PREFILL_STAGES_128, PREFILL_SLOTS_128)
/* X(symbol, image, params type, most dynamic shared bytes) */
#define PREFILL_ATTENTION_KERNELS(X)                        \
    PREFILL_KERNEL(X, bf16, 64, PREFILL_SHARED_64)          \
    PREFILL_KERNEL(X, bf16, 128, PREFILL_SHARED_128)        \
    PREFILL_KERNEL(X, int8, 64, PREFILL_SCALED_SHARED_64)   \
    PREFILL_KERNEL(X, int8, 128, PREFILL_SCALED_SHARED_128) \
    PREFILL_KERNEL(X, fp8, 64, PREFILL_SCALED_SHARED_64)    \
    PREFILL_KERNEL(X, fp8, 128, PREFILL_SCALED_SHARED_128)

#ifdef __cplusplus
static_assert(sizeof(struct prefill_attention_params) == 2 * 128, "gcc and nvcc must agree");
#else
_Static_assert(sizeof(struct prefill_attention_params) == 2 * 128, "gcc and nvcc must agree");
#endif

#endif
