/* SPDX-License-Identifier: Apache-2.0 */
/* Two passes over the keys: the first finds the largest score, the second adds up exp(score -
 * largest) and its products with the values. The scores are computed twice, so that none need be
 * stored. */
#include <math.h>

#include "ops/ref/ref_kernels.h"

static float score_at(const struct attention_params *params, const int32_t *block_table,
                      int32_t kv_head, const float *q, int64_t position)
{
    const struct kv_view *kv = &params->kv;
    const float *keys =
        kv_view_keys(kv, block_table[position / kv->block_size], params->layer_idx, kv_head);
    struct weight_view view = {keys, DTYPE_F32};
    return params->scale * ref_dot(q, view, position % kv->block_size, kv->head_dim);
}

/* One query head of one token: positions [first, num_positions). */
static void attend(const struct attention_params *params, const int32_t *block_table,
                   int32_t kv_head, const float *q, int64_t first, int64_t num_positions, float *d)
{
    const struct kv_view *kv = &params->kv;
    float largest = -INFINITY;
    for (int64_t position = first; position < num_positions; position++) {
        float score = score_at(params, block_table, kv_head, q, position);
        largest = score > largest ? score : largest;
    }
    for (int32_t idx = 0; idx < kv->head_dim; idx++) {
        d[idx] = 0.0f;
    }
    float total = 0.0f;
    for (int64_t position = first; position < num_positions; position++) {
        float weight = expf(score_at(params, block_table, kv_head, q, position) - largest);
        const float *value =
            kv_view_values(kv, block_table[position / kv->block_size], params->layer_idx, kv_head) +
            position % kv->block_size * kv->head_dim;
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
    (void)work;
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
            const float *q = params->q + token * params->q_stride + head * head_dim;
            float *d = params->d + (token * params->num_heads + head) * head_dim;
            attend(params, block_table, kv_head, q, first, num_positions, d);
        }
    }
}
