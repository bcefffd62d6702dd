/* SPDX-License-Identifier: Apache-2.0 */
/* Two passes over the keys: the first finds the largest score, the second adds up exp(score -
 * largest) and its products with the values. The scores are computed twice, so that none need be
 * stored. */
#include <math.h>

#include "ops/ref/ref_kernels.h"

/* One query head of one token. */
struct ref_query {
    const struct attention_params *params;
    const int32_t *block_table;
    int32_t kv_head;
    const float *q;
    float *row; /* [head_dim] of scratch memory: a key or a value, widened */
};

/* The key or value of a position, in fp32: where it lies, or in query->row. */
static const float *load_row(const struct ref_query *query, unsigned char *head, int64_t position)
{
    const struct kv_view *kv = &query->params->kv;
    struct kv_row row = kv_view_row(kv, head, (int32_t)(position % kv->block_size));
    if (kv->dtype == KV_DTYPE_F32) {
        return (const float *)(void *)row.elements;
    }
    ref_kv_load(kv->dtype, row, kv->head_dim, query->row);
    return query->row;
}

static float score_at(const struct ref_query *query, int64_t position)
{
    const struct kv_view *kv = &query->params->kv;
    unsigned char *keys = kv_view_keys(kv, query->block_table[position / kv->block_size],
                                       query->params->layer_idx, query->kv_head);
    struct weight_view view = {load_row(query, keys, position), DTYPE_F32};
    return query->params->scale * ref_dot(query->q, view, 0, kv->head_dim);
}

/* Positions [first, num_positions). */
static void attend(const struct ref_query *query, int64_t first, int64_t num_positions, float *d)
{
    const struct kv_view *kv = &query->params->kv;
    float largest = -INFINITY;
    for (int64_t position = first; position < num_positions; position++) {
        float score = score_at(query, position);
        largest = score > largest ? score : largest;
    }
    for (int32_t idx = 0; idx < kv->head_dim; idx++) {
        d[idx] = 0.0f;
    }
    float total = 0.0f;
    for (int64_t position = first; position < num_positions; position++) {
        float weight = expf(score_at(query, position) - largest);
        unsigned char *values = kv_view_values(kv, query->block_table[position / kv->block_size],
                                               query->params->layer_idx, query->kv_head);
        const float *value = load_row(query, values, position);
        total += weight;
        for (int32_t idx = 0; idx < kv->head_dim; idx++) {
            d[idx] += weight * value[idx];
        }
    }
    for (int32_t idx = 0; idx < kv->head_dim; idx++) {
        d[idx] /= total;
    }
}

void ref_attention(const struct attention_params *params, const struct cpu_work *work,
                   int64_t begin, int64_t end)
{
    int32_t head_dim = params->kv.head_dim;
    int32_t group_heads = params->num_heads / params->kv.num_kv_heads;
    for (int64_t item = begin; item < end; item++) {
        int64_t token = item % params->num_tokens;
        int32_t kv_head = (int32_t)(item / params->num_tokens);
        const int32_t *block_table =
            params->block_tables + (int64_t)params->seq_idx[token] * params->max_blocks;
        int64_t first = attention_first_key(params, token);
        int64_t num_positions = (int64_t)params->positions[token] + 1;
        for (int64_t head = (int64_t)kv_head * group_heads;
             head < (int64_t)(kv_head + 1) * group_heads; head++) {
            struct ref_query query = {.params = params,
                                      .block_table = block_table,
                                      .kv_head = kv_head,
                                      .q = params->q + token * params->q_stride + head * head_dim,
                                      .row = (float *)(void *)work->scratch};
            float *d = params->d + (token * params->num_heads + head) * head_dim;
            attend(&query, first, num_positions, d);
        }
    }
}
