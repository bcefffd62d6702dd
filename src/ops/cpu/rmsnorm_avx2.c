/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <math.h>

#include "ops/cpu/vec_avx2.h"

#define NUM_SUMS 4 /* independent chains of fused multiply-adds */

static float sum_of_squares(const float *a, int64_t width)
{
    __m256 sums[NUM_SUMS];
    for (int idx = 0; idx < NUM_SUMS; idx++) {
        sums[idx] = _mm256_setzero_ps();
    }
    int64_t k = 0;
    for (; k + NUM_SUMS * VEC_LANES <= width; k += NUM_SUMS * VEC_LANES) {
        VEC_UNROLL
        for (int idx = 0; idx < NUM_SUMS; idx++) {
            __m256 x = _mm256_loadu_ps(a + k + idx * VEC_LANES);
            sums[idx] = _mm256_fmadd_ps(x, x, sums[idx]);
        }
    }
    for (; k < width; k += VEC_LANES) {
        __m256 x = _mm256_maskload_ps(a + k, vec_mask_low((int32_t)(width - k)));
        sums[0] = _mm256_fmadd_ps(x, x, sums[0]);
    }
    return vec_sum(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
}

void avx2_rmsnorm(const struct rmsnorm_params *params, int64_t begin, int64_t end)
{
    int64_t width = params->hidden_size;
    for (int64_t token = begin; token < end; token++) {
        const float *a = params->a + rmsnorm_row(params, token) * width;
        float *d = params->d + token * width;
        float mean_square = sum_of_squares(a, width) / (float)width;
        __m256 scale = _mm256_set1_ps(1.0f / sqrtf(mean_square + params->eps));
        int64_t k = 0;
        for (; k + VEC_LANES <= width; k += VEC_LANES) {
            __m256 x = _mm256_mul_ps(_mm256_loadu_ps(a + k), scale);
            _mm256_storeu_ps(d + k, _mm256_mul_ps(x, _mm256_loadu_ps(params->weight + k)));
        }
        if (k < width) {
            __m256i rest = vec_mask_low((int32_t)(width - k));
            __m256 x = _mm256_mul_ps(_mm256_maskload_ps(a + k, rest), scale);
            __m256 weight = _mm256_maskload_ps(params->weight + k, rest);
            _mm256_maskstore_ps(d + k, rest, _mm256_mul_ps(x, weight));
        }
    }
}

#endif
