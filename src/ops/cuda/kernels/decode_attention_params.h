/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels are told: attention on mma.sync, of single tokens and of any number. Compiled by
 * gcc and by nvcc. */
#ifndef IMBREX_OPS_CUDA_KERNELS_DECODE_ATTENTION_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_DECODE_ATTENTION_PARAMS_H

#include <stdint.h>

/* Tokens of a block of the KV cache. */
#define ATTENTION_BLOCK_SIZE 16

/* The tokens of sequence i are [query_begin[i], query_begin[i + 1]), one after the other; a tile
 * has rows of (token, query head of one KV head). Tile numbers are given out as if each sequence
 * began a new one: those of sequence i begin at query_begin[i] * group_heads / rows of a tile + i,
 * and a number that no sequence reaches has nothing to do. The grid is (KV heads x tiles), the last
 * tile first, since it has the most keys. */
struct tensor_attention_kernel_params {
    const void *qkv;           /* [tokens, num_heads + 2 * num_kv_heads, head_dim] bf16 */
    void *d;                   /* [tokens, num_heads, head_dim] bf16 */
    const unsigned char *keys; /* of this layer in block 0; values are value_bytes further */
    const int32_t *block_tables, *positions, *query_begin;
    int64_t block_bytes, value_bytes;
    int32_t num_seqs, num_tiles, num_heads, num_kv_heads;
    int32_t group_heads; /* num_heads / num_kv_heads */
    int32_t head_dim;    /* at most the kernel's, a multiple of 16 */
    int32_t max_blocks;
    int32_t window;   /* 0: none */
    float exp2_scale; /* scale * log2(e) */
    int32_t is_fp8;   /* tensor_attention_scaled_*: E4M3, else INT8 */
};

/* X(rest, head_dim, 16-row tiles of a warp, keys of a step): 4 warps, so 64 rows a tile or 128. Up
 * to 128 columns 32 rows of a warp share what it reads of keys and values; beyond, their
 * accumulators would not fit its registers. */
#define TENSOR_ATTENTION_LIST(X, rest) \
    X(rest, 32, 2, 64)                 \
    X(rest, 64, 2, 64)                 \
    X(rest, 96, 2, 64)                 \
    X(rest, 128, 2, 32)                \
    X(rest, 160, 1, 32)                \
    X(rest, 192, 1, 32)                \
    X(rest, 256, 1, 32)
#define TENSOR_ATTENTION_THREADS 128
/* Queries, two stages of keys and values; rows are 16 bytes longer, so that eight of them at one
 * column lie in different banks. */
#define TENSOR_ATTENTION_SHARED(head_dim, m_tiles, keys) \
    ((64 * (m_tiles) + 4 * (keys)) * (2 * (head_dim) + 16))

/* tensor_attention_scaled_<head_dim> reads a cache with scales (kv_dtype.h). */
#define TENSOR_ATTENTION_KERNEL(X, head_dim, m_tiles, keys)                                        \
    X(tensor_attention_##head_dim, tensor_attention, struct tensor_attention_kernel_params,        \
      TENSOR_ATTENTION_SHARED(head_dim, m_tiles, keys))                                            \
    X(tensor_attention_scaled_##head_dim, tensor_attention, struct tensor_attention_kernel_params, \
      TENSOR_ATTENTION_SHARED(head_dim, m_tiles, keys))

/* Attention of the sequences with one token in the step. A sequence's keys are cut into parts, as
 * many as its own length asks for. Row seq * columns + column is a KV head (and chunk of its query
 * heads: a column) of a sequence, item part * num_rows + row a part of it: the first parts, which
 * all sequences have, come first, so that clusters share them evenly whatever the lengths. A
 * cluster takes every num_clusters-th item, its warps runs of blocks of it. What several parts
 * found is put together by the merge kernel, grid (num_heads, num_seqs), head_dim threads. */
struct decode_attention_kernel_params {
    const void *qkv;           /* [tokens, num_heads + 2 * num_kv_heads, head_dim] bf16 */
    void *d;                   /* [tokens, num_heads, head_dim] bf16 */
    const unsigned char *keys; /* of this layer in block 0; values are value_bytes further */
    const int32_t *block_tables, *query_begin, *seq_lens;
    float *accums;   /* [num_seqs, num_heads, max_parts, head_dim]: sum of weight * value */
    float *extremes; /* [num_seqs, num_heads, max_parts, 2]: largest score, sum of weights */
    int64_t block_bytes, value_bytes;
    int32_t num_heads, num_kv_heads;
    int32_t group_heads; /* num_heads / num_kv_heads */
    int32_t max_blocks, max_parts;
    int32_t num_columns, num_rows, num_items, num_clusters;
    int32_t window;     /* 0: none */
    int32_t most_parts; /* of a sequence */
    float exp2_scale;   /* scale * log2(e); times the score unit of 8-bit elements */
};

/* What keys and values are kept in. */
enum { DECODE_BF16, DECODE_INT8, DECODE_FP8 };
#define DECODE_GROUP 32 /* elements with a scale */
/* Codes are multiplied as 2^-120 (E4M3) or 2^-6 (INT8) times themselves, with queries that are 2^64
 * times themselves in the first case: exp2_scale has the rest. */
#define DECODE_FP8_QUERY_EXPONENT 64
#define DECODE_FP8_SCORE_UNIT 0x1p56f
#define DECODE_INT8_SCORE_UNIT 0x1p6f

#define DECODE_THREADS 128
/* CTAs that an SM has registers for. */
#define DECODE_SM_CTAS(kind, heads) ((heads) != 8 ? 2 : (kind) == DECODE_BF16 ? 3 : 4)
/* CTAs of a cluster: with a block or two for each of its warps it reads 512 keys at once. */
#define DECODE_CLUSTER(head_dim) ((head_dim) == 64 ? 4 : 8)
/* Clusters of a launch, on DECODE_CLUSTERS_SMS SMs, with 3 CTAs on an SM (8 heads) or 2. An idle
 * H200 holds 45 clusters of 8 and 92 of 4, one in a step fewer: those that find no place begin when
 * others end. A layer's attention of 8 sequences of 32,768 keys in a step of a 7B model: 138 us
 * with 39 clusters, 159 with 41, 172 with 43. */
#define DECODE_CLUSTERS_SMS 132
#define DECODE_CLUSTERS(head_dim, heads) \
    ((head_dim) == 64 ? ((heads) == 8 ? 86 : 57) : ((heads) == 8 ? 40 : 27))
/* The same of 8-bit elements, with 4 CTAs on an SM (8 heads) or 2. */
#define DECODE_SCALED_CLUSTERS(head_dim, heads) \
    ((heads) != 8 ? DECODE_CLUSTERS(head_dim, heads) : (head_dim) == 64 ? 114 : 54)
/* Parts of a sequence that reads num_blocks blocks, a function of nothing else, so that its bits do
 * not depend on the batch: so many that a single long sequence has enough loads under way, but few,
 * since each costs a beginning and a merge, and so that items of several long sequences divide into
 * the clusters (head_dim 128: 40 by 20 items of a sequence). */
#define DECODE_PART_BLOCKS 64
#define DECODE_PARTS_LIMIT 16
#define DECODE_MOST_PARTS(head_dim, num_columns)                     \
    ((head_dim) == 64 ? ((num_columns) <= 5    ? DECODE_PARTS_LIMIT  \
                         : (num_columns) >= 43 ? 2                   \
                                               : 86 / (num_columns)) \
                      : ((num_columns) <= 2    ? 10                  \
                         : (num_columns) <= 8  ? 5                   \
                         : (num_columns) >= 20 ? 2                   \
                                               : 40 / (num_columns)))
/* Of 8-bit elements, whose warps are busy for longer with as many bytes, twice as many: 54 clusters
 * by 40 items of a sequence of 4 KV heads, 8 of which are 6 rounds. */
#define DECODE_SCALED_MOST_PARTS(head_dim, num_columns)          \
    ((num_columns) <= 2 && (head_dim) == 64 ? 14                 \
     : (num_columns) <= 3                   ? DECODE_PARTS_LIMIT \
     : (num_columns) <= 5                   ? 10                 \
     : (num_columns) >= 27                  ? 2                  \
                                            : 54 / (num_columns))
#define DECODE_PARTS(num_blocks, most_parts)         \
    ((num_blocks) >= (most_parts)*DECODE_PART_BLOCKS \
         ? (most_parts)                              \
         : ((num_blocks) + DECODE_PART_BLOCKS - 1) / DECODE_PART_BLOCKS)

/* What warps and CTAs tell each other: 4 x heads rows and 2 x 8 rows for 8 heads, extremes,
 * barriers and tables. */
#define DECODE_SHARED(head_dim, heads) ((4 * (head_dim) + 2 * (head_dim) + 64) * 4 * (heads) + 8192)
/* Beside 8-bit elements queries lie there as well, those of each warp for itself. */
#define DECODE_QUERY_BYTES(head_dim, heads) ((heads) * (head_dim)*2)
#define DECODE_SCALED_SHARED(head_dim, heads) \
    (DECODE_SHARED(head_dim, heads) + 4 * DECODE_QUERY_BYTES(head_dim, heads))

/* decode_attention_once_*: stages of each warp, over which it writes what it found; queries beside
 * 8-bit elements; what CTAs tell each other, 8 rows for 8 heads, extremes and barriers. Launches of
 * no more items than clusters. */
#define DECODE_STAGES 2
#define DECODE_STAGE_BYTES(kind) ((kind) == DECODE_BF16 ? 8192 : 4352)
#define DECODE_ONCE_SHARED(kind, head_dim, heads)                                          \
    (4 * DECODE_STAGES * DECODE_STAGE_BYTES(kind) + ((head_dim) + 32) * 4 * (heads) + 64 + \
     ((kind) == DECODE_BF16 ? 0 : 4 * DECODE_QUERY_BYTES(head_dim, heads)))

/* decode_attention_<kind>_<head_dim>_<heads of a group that a CTA takes> */
#define DECODE_ATTENTION_KERNEL_OF(X, kind, number, head_dim, heads, shared) \
    X(decode_attention_##kind##_##head_dim##_##heads, decode_attention,      \
      struct decode_attention_kernel_params, shared)                         \
    X(decode_attention_once_##kind##_##head_dim##_##heads, decode_attention, \
      struct decode_attention_kernel_params, DECODE_ONCE_SHARED(number, head_dim, heads))
#define DECODE_ATTENTION_KERNEL(X, head_dim, heads)                   \
    DECODE_ATTENTION_KERNEL_OF(X, bf16, DECODE_BF16, head_dim, heads, \
                               DECODE_SHARED(head_dim, heads))        \
    DECODE_ATTENTION_KERNEL_OF(X, int8, DECODE_INT8, head_dim, heads, \
                               DECODE_SCALED_SHARED(head_dim, heads)) \
    DECODE_ATTENTION_KERNEL_OF(X, fp8, DECODE_FP8, head_dim, heads,   \
                               DECODE_SCALED_SHARED(head_dim, heads))

/* X(symbol, image, params type, most dynamic shared bytes) */
#define DECODE_ATTENTION_KERNELS(X)                   \
    TENSOR_ATTENTION_LIST(TENSOR_ATTENTION_KERNEL, X) \
    DECODE_ATTENTION_KERNEL(X, 64, 8)                 \
    DECODE_ATTENTION_KERNEL(X, 64, 16)                \
    DECODE_ATTENTION_KERNEL(X, 128, 8)                \
    DECODE_ATTENTION_KERNEL(X, 128, 16)               \
    X(decode_attention_merge, decode_attention, struct decode_attention_kernel_params, 0)

#endif
