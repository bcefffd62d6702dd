/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels are told: attention of many tokens of a sequence. Compiled by gcc and by nvcc.
 *
 * Rows: the query heads of one kv head lie beside each other, so that all of them meet the same
 * keys: row r of a sequence is token r / group_heads of its tokens in the step, head r %
 * group_heads of the kv head. A CTA has PREFILL_TILE_ROWS rows of one kv head of one sequence.
 *
 * Tensor map kv: the cache in bf16, dims innermost first head_dim, 16 keys, planes (2 * num_layers
 * * num_kv_heads: for each layer K of each head, then V of each), blocks; box 64, 16, 1, 1; swizzle
 * 128B. */
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
    float scale_log2e;           /* scale * log2(e) */
    int32_t k_plane;             /* of head 0 in this layer; its V is num_kv_heads planes on */
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

/* X(symbol, image, params type, most dynamic shared bytes) */
#define PREFILL_ATTENTION_KERNELS(X)                                                       \
    X(prefill_attention_bf16_sm90_64, prefill_attention, struct prefill_attention_params,  \
      PREFILL_SHARED_BYTES(64, PREFILL_ROWS_64, PREFILL_STAGES_64))                        \
    X(prefill_attention_bf16_sm90_128, prefill_attention, struct prefill_attention_params, \
      PREFILL_SHARED_BYTES(128, PREFILL_ROWS_128, PREFILL_STAGES_128))

#ifdef __cplusplus
static_assert(sizeof(struct prefill_attention_params) == 2 * 128, "gcc and nvcc must agree");
#else
_Static_assert(sizeof(struct prefill_attention_params) == 2 * 128, "gcc and nvcc must agree");
#endif

#endif
