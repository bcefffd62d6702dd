/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/ref/ref_kernels.h"

static void normalize_heads(float *heads, int32_t num_heads, int32_t head_dim, const float *weight,
                            float eps)
{
    if (weight != NULL) {
        struct rmsnorm_params norm = {.a = heads,
                                      .weight = weight,
                                      .d = heads,
                                      .num_tokens = num_heads,
                                      .hidden_size = head_dim,
                                      .eps = eps};
        ref_rmsnorm(&norm, 0, num_heads);
    }
}

/* Inlined with constant distances: from one pair to the next, and of the two elements of a pair. */
static inline __attribute__((always_inline)) void rotate_pairs(float *heads, int64_t num_heads,
                                                               int32_t head_dim,
                                                               const float *cos_sin,
                                                               int32_t pair_step, int32_t distance)
{
    int32_t half = head_dim / 2;
    const float *cosines = cos_sin, *sines = cos_sin + half;
    for (int64_t head = 0; head < num_heads; head++) {
        float *low = heads + head * head_dim, *high = low + distance;
        for (int32_t idx = 0; idx < half; idx++) {
            float x = low[idx * pair_step], y = high[idx * pair_step];
            low[idx * pair_step] = x * cosines[idx] - y * sines[idx];
            high[idx * pair_step] = y * cosines[idx] + x * sines[idx];
        }
    }
}

void ref_rope_kv(const struct rope_kv_params *params, int64_t begin, int64_t end)
{
    const struct kv_view *kv = &params->kv;
    int64_t head_dim = kv->head_dim, num_kv_heads = kv->num_kv_heads;
    int64_t q_width = params->num_heads * head_dim, kv_width = num_kv_heads * head_dim;
    for (int64_t token = begin; token < end; token++) {
        float *q = params->qkv + token * (q_width + 2 * kv_width);
        float *k = q + q_width;
        const float *v = k + kv_width;
        const float *cos_sin = params->cos_sin + params->positions[token] * head_dim;
        normalize_heads(q, params->num_heads, kv->head_dim, params->q_norm, params->norm_eps);
        normalize_heads(k, kv->num_kv_heads, kv->head_dim, params->k_norm, params->norm_eps);
        /* q heads and k heads lie side by side. */
        if (params->is_interleaved) {
            rotate_pairs(q, params->num_heads + num_kv_heads, kv->head_dim, cos_sin, 2, 1);
        } else {
            rotate_pairs(q, params->num_heads + num_kv_heads, kv->head_dim, cos_sin, 1,
                         kv->head_dim / 2);
        }

        if (params->slot_mapping[token] < 0) {
            continue;
        }
        int32_t block_idx = params->slot_mapping[token] / kv->block_size;
        int32_t offset = params->slot_mapping[token] % kv->block_size;
        for (int32_t head = 0; head < kv->num_kv_heads; head++) {
            unsigned char *keys = kv_view_keys(kv, block_idx, params->layer_idx, head);
            unsigned char *values = kv_view_values(kv, block_idx, params->layer_idx, head);
            ref_kv_store(kv->dtype, k + head * head_dim, kv->head_dim,
                         kv_view_row(kv, keys, offset));
            ref_kv_store(kv->dtype, v + head * head_dim, kv->head_dim,
                         kv_view_row(kv, values, offset));
        }
    }
}
