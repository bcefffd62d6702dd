/* SPDX-License-Identifier: Apache-2.0 */
/* How attention over many keys is split among threads: the keys of a row fall into splits whose
 * edges depend on its position and the window only, and each split has its own online softmax. Rows
 * of few tokens are computed split by split, each in a part of the scratch memory that all threads
 * see, and folded afterwards; other rows are folded on the way. Both fold the same splits in the
 * same order. */
#ifndef IMBREX_OPS_CPU_ATTENTION_SPLIT_H
#define IMBREX_OPS_CPU_ATTENTION_SPLIT_H

#include <stddef.h>
#include <stdint.h>

#include "ops/cpu/cpu_kernels.h"
#include "ops/ops.h"

/* Of a thread's scratch memory the first half is for its tile, the second for parts. */
#define ATTENTION_TILE_BYTES (CPU_SCRATCH_BYTES / 2)
/* Floats of a row of keys, turned or widened, that a tile has memory for: 256 KiB a chunk. */
#define ATTENTION_MAX_TILE_FLOATS 1024
#define ATTENTION_TILE_TOKENS 32     /* at most */
#define ATTENTION_MIN_SPLIT_KEYS 512 /* folds: 1 % of a prefill, 64 wide, 4,096 keys, EPYC 9004 */
#define ATTENTION_MAX_SPLITS 32      /* one more if a window begins inside of a split */

/* Of one query row: what its softmax has come to. */
struct attention_row {
    float largest; /* score */
    float total;   /* of exp(score - largest) */
};

/* Parts (token * num_kv_heads + kv head) * max_splits + split of a call. A part is
 * struct attention_row [heads of a kv head], then sums [heads of a kv head][head_dim rounded up to
 * whole lines], each 64-byte aligned. */
struct attention_parts {
    unsigned char *scratch; /* of all threads, CPU_SCRATCH_BYTES each */
    size_t part_bytes, row_bytes;
    int32_t max_splits, thread_parts; /* of a token; in a thread's scratch */
    int64_t count;
};

/* The positions of one part; none if its token has fewer splits. */
struct attention_span {
    int64_t token, begin, end;
    int32_t kv_head;
};

/* Wider heads go to the reference. A cache that is not fp32 is widened, which takes as much memory
 * as keys that are turned. */
static inline bool attention_has_tiles(const struct kv_view *kv)
{
    return kv->head_dim * (kv->dtype == KV_DTYPE_F32 ? 1 : 2) <= ATTENTION_MAX_TILE_FLOATS;
}

/* Splits of a token lie between multiples of this many positions: a power of two. */
static inline int64_t attention_split_keys(const struct attention_params *params, int64_t token)
{
    int64_t num_keys = params->positions[token] + 1 - attention_first_key(params, token);
    int64_t split_keys = ATTENTION_MIN_SPLIT_KEYS;
    while (split_keys * ATTENTION_MAX_SPLITS < num_keys) {
        split_keys *= 2;
    }
    return split_keys;
}

/* Splits with a key that the token sees. */
static inline int64_t attention_num_splits(const struct attention_params *params, int64_t token)
{
    int64_t split_keys = attention_split_keys(params, token);
    return params->positions[token] / split_keys - attention_first_key(params, token) / split_keys +
           1;
}

static inline struct attention_span attention_parts_span(const struct attention_parts *parts,
                                                         const struct attention_params *params,
                                                         int64_t part)
{
    int64_t row = part / parts->max_splits, token = row / params->kv.num_kv_heads;
    int64_t split_keys = attention_split_keys(params, token);
    int64_t first_key = attention_first_key(params, token);
    int64_t num_keys = (int64_t)params->positions[token] + 1;
    int64_t begin = (first_key / split_keys + part % parts->max_splits) * split_keys;
    int64_t end = begin + split_keys < num_keys ? begin + split_keys : num_keys;
    begin = begin > first_key ? begin : first_key;
    return (struct attention_span){.token = token,
                                   .begin = begin,
                                   .end = begin < end ? end : begin,
                                   .kv_head = (int32_t)(row % params->kv.num_kv_heads)};
}

static inline struct attention_row *attention_parts_rows(const struct attention_parts *parts,
                                                         int64_t part)
{
    unsigned char *thread_parts =
        parts->scratch + part / parts->thread_parts * CPU_SCRATCH_BYTES + ATTENTION_TILE_BYTES;
    return (struct attention_row *)(void *)(thread_parts + (size_t)(part % parts->thread_parts) *
                                                               parts->part_bytes);
}

static inline float *attention_parts_sums(const struct attention_parts *parts, int64_t part)
{
    return (float *)(void *)((unsigned char *)attention_parts_rows(parts, part) + parts->row_bytes);
}

/* Lays out the parts of a call; false if they do not fit. */
static inline bool attention_parts_plan(const struct attention_params *params,
                                        unsigned char *scratch, int32_t num_threads,
                                        struct attention_parts *parts)
{
    const struct kv_view *kv = &params->kv;
    size_t num_heads = (size_t)(params->num_heads / kv->num_kv_heads);
    size_t row_bytes = (num_heads * sizeof(struct attention_row) + 63) / 64 * 64;
    size_t head_bytes = ((size_t)kv->head_dim * sizeof(float) + 63) / 64 * 64;
    size_t part_bytes = row_bytes + num_heads * head_bytes;
    size_t thread_parts = (CPU_SCRATCH_BYTES - ATTENTION_TILE_BYTES) / part_bytes;
    int64_t max_splits = 1;
    for (int64_t token = 0; token < params->num_tokens; token++) {
        int64_t num_splits = attention_num_splits(params, token);
        max_splits = num_splits > max_splits ? num_splits : max_splits;
    }
    int64_t count = (int64_t)params->num_tokens * kv->num_kv_heads * max_splits;
    if (!attention_has_tiles(kv) || count > (int64_t)thread_parts * num_threads) {
        return false;
    }
    *parts = (struct attention_parts){.scratch = scratch,
                                      .part_bytes = part_bytes,
                                      .row_bytes = row_bytes,
                                      .max_splits = (int32_t)max_splits,
                                      .thread_parts = (int32_t)thread_parts,
                                      .count = count};
    return true;
}

#endif
