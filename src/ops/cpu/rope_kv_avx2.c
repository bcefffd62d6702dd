/* SPDX-License-Identifier: Apache-2.0 */
/* The norms of q and k take most of the time where there are any, and are all that is replaced:
 * the reference rotates and copies as fast as memory. */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <stddef.h>

#include "ops/ref/ref_kernels.h"

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

void avx2_rope_kv(const struct rope_kv_params *params, int64_t begin, int64_t end)
{
    struct rope_kv_params normed = *params;
    int64_t head_dim = params->kv.head_dim;
    int64_t width = (params->num_heads + 2 * (int64_t)params->kv.num_kv_heads) * head_dim;
    normed.q_norm = normed.k_norm = NULL;
    for (int64_t token = begin; token < end; token++) {
        float *q = params->qkv + token * width;
        normalize_heads(params, q, params->num_heads, params->q_norm);
        normalize_heads(params, q + params->num_heads * head_dim, params->kv.num_kv_heads,
                        params->k_norm);
        ref_rope_kv(&normed, token, token + 1);
    }
}

#endif
