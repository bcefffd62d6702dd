/* SPDX-License-Identifier: Apache-2.0 */
/* One pass over the cache for all query heads of a kv head: keys in chunks of up to 32 positions of
 * one block; scores, weights and running sums of each head stay on the stack.
 *
 *   scores   eight keys x one head at a time, one accumulator each, summed across lanes at the end
 *   softmax  online: `largest` rises with the chunks, and what was added so far is scaled down
 *   values   up to eight vectors of the output row x one head in registers, keys one by one
 *
 * Chunk edges depend on the block size, the position and the window only, so a token's result
 * depends on nothing else in the batch. Source of the online softmax: arXiv 1805.02867; of its use
 * here: FlashAttention, arXiv 2205.14135. */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "ops/cpu/vec_avx2.h"
#include "ops/ref/ref_kernels.h"

#define MAX_HEAD_DIM 256 /* wider heads go to the reference: 8 heads of 256 are 16 KiB of stack */
#define MAX_HEADS 8      /* query heads that share a pass over the cache */
#define CHUNK_KEYS 32

/* Query heads of one token that read the same kv head, padded with zeros to whole vectors. */
struct head_group {
    int32_t num_heads, head_dim;
    float q[MAX_HEADS][MAX_HEAD_DIM];   /* times scale */
    float sum[MAX_HEADS][MAX_HEAD_DIM]; /* of weight * value */
    float total[MAX_HEADS];             /* of weights */
    float largest[MAX_HEADS];           /* score so far */
};

/* Scores of one head against eight keys, num_keys of which exist: the others repeat the last and
 * become -inf. */
static __m256 score_keys(const float *q, const float *keys, int32_t num_keys, int32_t head_dim)
{
    const float *rows[VEC_LANES];
    __m256 sums[VEC_LANES];
    VEC_UNROLL
    for (int key = 0; key < VEC_LANES; key++) {
        rows[key] = keys + (int64_t)(key < num_keys ? key : num_keys - 1) * head_dim;
        sums[key] = _mm256_setzero_ps();
    }
    int32_t idx = 0;
    for (; idx + VEC_LANES <= head_dim; idx += VEC_LANES) {
        __m256 query = _mm256_loadu_ps(q + idx);
        VEC_UNROLL
        for (int key = 0; key < VEC_LANES; key++) {
            sums[key] = _mm256_fmadd_ps(query, _mm256_loadu_ps(rows[key] + idx), sums[key]);
        }
    }
    if (idx < head_dim) {
        __m256i rest = vec_mask_low(head_dim - idx);
        __m256 query = _mm256_loadu_ps(q + idx);
        VEC_UNROLL
        for (int key = 0; key < VEC_LANES; key++) {
            sums[key] =
                _mm256_fmadd_ps(query, _mm256_maskload_ps(rows[key] + idx, rest), sums[key]);
        }
    }
    __m256 scores = _mm256_set_m128(vec_sums_of_4(sums[4], sums[5], sums[6], sums[7]),
                                    vec_sums_of_4(sums[0], sums[1], sums[2], sums[3]));
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), scores,
                            _mm256_castsi256_ps(vec_mask_low(num_keys)));
}

/* Turns a head's scores of one chunk into weights, relative to the new largest score; returns the
 * factor for everything weighed before. NaN scores give NaN weights. */
static float weigh_chunk(struct head_group *group, int32_t head, float *scores, int32_t num_vecs)
{
    __m256 maxima = _mm256_loadu_ps(scores);
    for (int32_t vec = 1; vec < num_vecs; vec++) {
        maxima = _mm256_max_ps(maxima, _mm256_loadu_ps(scores + vec * VEC_LANES));
    }
    float before = group->largest[head];
    float largest = fmaxf(before, vec_max(maxima));
    /* While every score is -inf, weights are zero, and their total of zero makes the result NaN if
     * it stays so. */
    __m256 base = _mm256_set1_ps(largest == -INFINITY ? 0.0f : largest);
    __m256 totals = _mm256_setzero_ps();
    for (int32_t vec = 0; vec < num_vecs; vec++) {
        __m256 score = _mm256_loadu_ps(scores + vec * VEC_LANES);
        __m256 weight = vec_exp(_mm256_sub_ps(score, base));
        _mm256_storeu_ps(scores + vec * VEC_LANES, weight);
        totals = _mm256_add_ps(totals, weight);
    }
    __m256 factor = vec_exp(_mm256_sub_ps(_mm256_set1_ps(before), base));
    float before_factor = _mm256_cvtss_f32(factor);
    group->total[head] = group->total[head] * before_factor + vec_sum(totals);
    group->largest[head] = largest;
    return before_factor;
}

/* sum = sum * factor + sum over keys of weights[key] * values[key], for num_vecs vectors of the row
 * from idx on; `mask` for the last vector of a row that is not whole. */
VEC_INLINE void add_values(float *sum, const float *values, const float *weights, int32_t num_keys,
                           int32_t head_dim, float factor, int num_vecs, bool masked, __m256i mask)
{
    __m256 sums[VEC_LANES];
    __m256 factors = _mm256_set1_ps(factor);
    VEC_UNROLL
    for (int vec = 0; vec < num_vecs; vec++) {
        sums[vec] = _mm256_mul_ps(_mm256_loadu_ps(sum + vec * VEC_LANES), factors);
    }
    for (int32_t key = 0; key < num_keys; key++) {
        __m256 weight = _mm256_broadcast_ss(weights + key);
        const float *value = values + (int64_t)key * head_dim;
        VEC_UNROLL
        for (int vec = 0; vec < num_vecs; vec++) {
            __m256 part =
                masked ? _mm256_maskload_ps(value, mask) : _mm256_loadu_ps(value + vec * VEC_LANES);
            sums[vec] = _mm256_fmadd_ps(weight, part, sums[vec]);
        }
    }
    VEC_UNROLL
    for (int vec = 0; vec < num_vecs; vec++) {
        _mm256_storeu_ps(sum + vec * VEC_LANES, sums[vec]);
    }
}

static void add_value_rows(float *sum, const float *values, const float *weights, int32_t num_keys,
                           int32_t head_dim, float factor)
{
    const __m256i none = _mm256_setzero_si256();
    int32_t idx = 0;
    for (; idx + 8 * VEC_LANES <= head_dim; idx += 8 * VEC_LANES) {
        add_values(sum + idx, values + idx, weights, num_keys, head_dim, factor, 8, false, none);
    }
    for (; idx + 2 * VEC_LANES <= head_dim; idx += 2 * VEC_LANES) {
        add_values(sum + idx, values + idx, weights, num_keys, head_dim, factor, 2, false, none);
    }
    if (idx + VEC_LANES <= head_dim) {
        add_values(sum + idx, values + idx, weights, num_keys, head_dim, factor, 1, false, none);
        idx += VEC_LANES;
    }
    if (idx < head_dim) {
        add_values(sum + idx, values + idx, weights, num_keys, head_dim, factor, 1, true,
                   vec_mask_low(head_dim - idx));
    }
}

static void group_init(struct head_group *group, const float *q, float scale)
{
    int32_t head_dim = group->head_dim;
    int32_t padded = (head_dim + VEC_LANES - 1) / VEC_LANES * VEC_LANES;
    for (int32_t head = 0; head < group->num_heads; head++) {
        for (int32_t idx = 0; idx < padded; idx++) {
            group->q[head][idx] = idx < head_dim ? q[head * head_dim + idx] * scale : 0.0f;
            group->sum[head][idx] = 0.0f;
        }
        group->total[head] = 0.0f;
        group->largest[head] = -INFINITY;
    }
}

/* num_keys <= CHUNK_KEYS consecutive positions of one block. */
static void group_add_chunk(struct head_group *group, const float *keys, const float *values,
                            int32_t num_keys)
{
    int32_t num_vecs = (num_keys + VEC_LANES - 1) / VEC_LANES;
    float weights[CHUNK_KEYS];
    for (int32_t head = 0; head < group->num_heads; head++) {
        for (int32_t vec = 0; vec < num_vecs; vec++) {
            int32_t first = vec * VEC_LANES;
            int32_t num_left = num_keys - first;
            _mm256_storeu_ps(weights + first,
                             score_keys(group->q[head], keys + (int64_t)first * group->head_dim,
                                        num_left < VEC_LANES ? num_left : VEC_LANES,
                                        group->head_dim));
        }
        float factor = weigh_chunk(group, head, weights, num_vecs);
        add_value_rows(group->sum[head], values, weights, num_keys, group->head_dim, factor);
    }
}

static void attend(const struct attention_params *params, struct head_group *group, int64_t token,
                   int32_t kv_head)
{
    const struct kv_view *kv = &params->kv;
    const int32_t *block_table =
        params->block_tables + (int64_t)params->seq_idx[token] * params->max_blocks;
    int64_t first_key = attention_first_key(params, token);
    int64_t num_keys = (int64_t)params->positions[token] + 1;
    for (int64_t first = first_key - first_key % kv->block_size; first < num_keys;
         first += kv->block_size) {
        int32_t block_idx = block_table[first / kv->block_size];
        const float *keys = kv_view_keys(kv, block_idx, params->layer_idx, kv_head);
        const float *values = kv_view_values(kv, block_idx, params->layer_idx, kv_head);
        int32_t num_block_keys =
            num_keys - first < kv->block_size ? (int32_t)(num_keys - first) : kv->block_size;
        int32_t key = first < first_key ? (int32_t)(first_key - first) : 0;
        for (; key < num_block_keys; key += CHUNK_KEYS) {
            int32_t num_left = num_block_keys - key;
            int64_t offset = (int64_t)key * kv->head_dim;
            group_add_chunk(group, keys + offset, values + offset,
                            num_left < CHUNK_KEYS ? num_left : CHUNK_KEYS);
        }
    }
}

void avx2_attention(const struct attention_params *params, int64_t begin, int64_t end)
{
    int32_t num_kv_heads = params->kv.num_kv_heads, head_dim = params->kv.head_dim;
    if (head_dim > MAX_HEAD_DIM) {
        ref_attention(params, begin, end);
        return;
    }
    int32_t heads_per_kv_head = params->num_heads / num_kv_heads;
    struct head_group group;
    group.head_dim = head_dim;
    for (int64_t item = begin; item < end; item++) {
        int64_t token = item / num_kv_heads;
        int32_t kv_head = (int32_t)(item % num_kv_heads);
        for (int32_t first = 0; first < heads_per_kv_head; first += MAX_HEADS) {
            int32_t num_left = heads_per_kv_head - first;
            int64_t head_offset = ((int64_t)kv_head * heads_per_kv_head + first) * head_dim;
            group.num_heads = num_left < MAX_HEADS ? num_left : MAX_HEADS;
            group_init(&group, params->q + token * params->q_stride + head_offset, params->scale);
            attend(params, &group, token, kv_head);
            float *d = params->d + token * params->num_heads * head_dim + head_offset;
            for (int32_t head = 0; head < group.num_heads; head++) {
                for (int32_t idx = 0; idx < head_dim; idx++) {
                    d[head * head_dim + idx] = group.sum[head][idx] / group.total[head];
                }
            }
        }
    }
}

#endif
