/* SPDX-License-Identifier: Apache-2.0 */
/* Norms and rotation with eight lanes, in the reference's order of operations: a rotation gives its
 * bits. */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/cpu/vec_avx2.h"

static void normalize_heads(const struct rope_kv_params *params, float *heads, int32_t num_heads,
                            const float *weight)
{
    if (weight != NULL) {
        struct rmsnorm_params norm = {.a = heads,
                                      .weight = weight,
                                      .d = heads,
                                      .num_tokens = num_heads,
                                      .hidden_size = params->kv.head_dim,
                                      .eps = params->norm_eps};
        avx2_rmsnorm(&norm, 0, num_heads);
    }
}

/* Pairs (x[i], x[i + half]) of one head. */
static void rotate_halves(float *head, const float *cosines, const float *sines, int32_t half)
{
    int32_t i = 0;
    for (; i + VEC_LANES <= half; i += VEC_LANES) {
        __m256 x = _mm256_loadu_ps(head + i), y = _mm256_loadu_ps(head + half + i);
        __m256 cosine = _mm256_loadu_ps(cosines + i), sine = _mm256_loadu_ps(sines + i);
        _mm256_storeu_ps(head + i, _mm256_sub_ps(_mm256_mul_ps(x, cosine), _mm256_mul_ps(y, sine)));
        _mm256_storeu_ps(head + half + i,
                         _mm256_add_ps(_mm256_mul_ps(y, cosine), _mm256_mul_ps(x, sine)));
    }
    for (; i < half; i++) {
        float x = head[i], y = head[half + i];
        head[i] = x * cosines[i] - y * sines[i];
        head[half + i] = y * cosines[i] + x * sines[i];
    }
}

/* Pairs (x[2 * i], x[2 * i + 1]) of one head, four a vector: each lane times the pair's cosine, its
 * neighbour times the sine; the first of a pair subtracts, the second adds. */
static void rotate_neighbours(float *head, const float *cosines, const float *sines, int32_t half)
{
    const __m256i pair_of_lane = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    int32_t i = 0;
    for (; i + VEC_LANES / 2 <= half; i += VEC_LANES / 2) {
        __m256 pairs = _mm256_loadu_ps(head + 2 * i);
        __m256 cosine = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(cosines + i)),
                                                 pair_of_lane);
        __m256 sine =
            _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(sines + i)), pair_of_lane);
        __m256 swapped = _mm256_permute_ps(pairs, _MM_SHUFFLE(2, 3, 0, 1));
        _mm256_storeu_ps(head + 2 * i, _mm256_addsub_ps(_mm256_mul_ps(pairs, cosine),
                                                        _mm256_mul_ps(swapped, sine)));
    }
    for (; i < half; i++) {
        float x = head[2 * i], y = head[2 * i + 1];
        head[2 * i] = x * cosines[i] - y * sines[i];
        head[2 * i + 1] = y * cosines[i] + x * sines[i];
    }
}

void avx2_rope_kv(const struct rope_kv_params *params, int64_t begin, int64_t end)
{
    const struct kv_view *kv = &params->kv;
    int64_t head_dim = kv->head_dim;
    int32_t half = kv->head_dim / 2, num_rotated = params->num_heads + kv->num_kv_heads;
    int64_t width = (num_rotated + (int64_t)kv->num_kv_heads) * head_dim;
    for (int64_t token = begin; token < end; token++) {
        float *q = params->qkv + token * width;
        float *k = q + params->num_heads * head_dim;
        const float *v = k + kv->num_kv_heads * head_dim;
        const float *cosines = params->cos_sin + params->positions[token] * head_dim;
        normalize_heads(params, q, params->num_heads, params->q_norm);
        normalize_heads(params, k, kv->num_kv_heads, params->k_norm);
        for (int32_t head = 0; head < num_rotated; head++) {
            if (params->is_interleaved) {
                rotate_neighbours(q + head * head_dim, cosines, cosines + half, half);
            } else {
                rotate_halves(q + head * head_dim, cosines, cosines + half, half);
            }
        }
        if (params->slot_mapping[token] < 0) {
            continue;
        }
        int32_t block_idx = params->slot_mapping[token] / kv->block_size;
        int32_t offset = params->slot_mapping[token] % kv->block_size;
        for (int32_t head = 0; head < kv->num_kv_heads; head++) {
            unsigned char *keys = kv_view_keys(kv, block_idx, params->layer_idx, head);
            unsigned char *values = kv_view_values(kv, block_idx, params->layer_idx, head);
            avx2_kv_store(kv->dtype, k + head * head_dim, kv->head_dim,
                          kv_view_row(kv, keys, offset));
            avx2_kv_store(kv->dtype, v + head * head_dim, kv->head_dim,
                          kv_view_row(kv, values, offset));
        }
    }
}

#endif
