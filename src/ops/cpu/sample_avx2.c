/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/kernels_avx2.h"

#if defined(__x86_64__)

#include <math.h>
#include <stdint.h>

#include "ops/cpu/vec_avx2.h"

#define NUM_CHAINS 4 /* independent maxima */
/* Ids of which only the largest logit is known before the end: its place is looked up afterwards,
 * in one block alone, so that the pass needs no indices. */
#define BLOCK_IDS 256

/* The bits of a float without its sign are as large as those of infinity, or larger, exactly if it
 * is infinite or NaN: their maximum tells whether all are finite. */
bool avx2_scan_logits(const float *logits, int32_t num_ids, int32_t *best_id)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    const __m256 lowest = _mm256_set1_ps(-INFINITY);
    __m256i largest_bits[NUM_CHAINS];
    float best_logit = -INFINITY;
    int64_t best_begin = 0;
    for (int chain = 0; chain < NUM_CHAINS; chain++) {
        largest_bits[chain] = _mm256_setzero_si256();
    }
    for (int64_t begin = 0; begin < num_ids; begin += BLOCK_IDS) {
        int32_t num_left = num_ids - begin < BLOCK_IDS ? (int32_t)(num_ids - begin) : BLOCK_IDS;
        __m256 largest[NUM_CHAINS] = {lowest, lowest, lowest, lowest};
        int32_t i = 0;
        for (; i + NUM_CHAINS * VEC_LANES <= num_left; i += NUM_CHAINS * VEC_LANES) {
            VEC_UNROLL
            for (int chain = 0; chain < NUM_CHAINS; chain++) {
                __m256 x = _mm256_loadu_ps(logits + begin + i + chain * VEC_LANES);
                __m256i bits = _mm256_and_si256(_mm256_castps_si256(x), magnitude);
                largest_bits[chain] = _mm256_max_epi32(largest_bits[chain], bits);
                largest[chain] = _mm256_max_ps(largest[chain], x);
            }
        }
        for (; i < num_left; i += VEC_LANES) {
            __m256i mask = vec_mask_low(num_left - i);
            __m256 x = _mm256_maskload_ps(logits + begin + i, mask); /* 0 beyond the end */
            __m256i bits = _mm256_and_si256(_mm256_castps_si256(x), magnitude);
            largest_bits[0] = _mm256_max_epi32(largest_bits[0], bits);
            x = _mm256_blendv_ps(lowest, x, _mm256_castsi256_ps(mask));
            largest[0] = _mm256_max_ps(largest[0], x);
        }
        float block_best = vec_max(_mm256_max_ps(_mm256_max_ps(largest[0], largest[1]),
                                                 _mm256_max_ps(largest[2], largest[3])));
        if (block_best > best_logit) {
            best_logit = block_best;
            best_begin = begin;
        }
    }
    /* The last id is the answer only if it is the best, or if a NaN hid the place. */
    int32_t id = (int32_t)best_begin;
    while (id < num_ids - 1 && logits[id] != best_logit) {
        id++;
    }
    *best_id = id;

    const __m256i largest_finite = _mm256_set1_epi32(0x7f7fffff);
    __m256i bits = _mm256_max_epi32(_mm256_max_epi32(largest_bits[0], largest_bits[1]),
                                    _mm256_max_epi32(largest_bits[2], largest_bits[3]));
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(bits, largest_finite)) == 0;
}

/* exp(x) of four x <= 0 with a relative error of some 1e-14; 3e-308 below -708.
 *
 * x = n ln 2 + r with |r| <= ln 2 / 2, exp(x) = 2^n exp(r); exp(r) is its Taylor series up to r^11,
 * whose rest is below 0.347^12 / 12! = 6.4e-15. */
VEC_INLINE __m256d exp_of_4(__m256d x)
{
    x = _mm256_max_pd(x, _mm256_set1_pd(-708.0));
    __m256d n_real = _mm256_round_pd(_mm256_mul_pd(x, _mm256_set1_pd(0x1.71547652b82fep+0)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256d r = _mm256_fnmadd_pd(n_real, _mm256_set1_pd(0x1.62e42fefa39efp-1), x);
    r = _mm256_fnmadd_pd(n_real, _mm256_set1_pd(0x1.abc9e3b39803fp-56), r);

    __m256d p = _mm256_set1_pd(1.0 / 39916800.0);
    p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(1.0 / 3628800.0));
    p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(1.0 / 362880.0));
    p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(1.0 / 40320.0));
    p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(1.0 / 5040.0));
    p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(1.0 / 720.0));
    p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(1.0 / 120.0));
    p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(1.0 / 24.0));
    p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(1.0 / 6.0));
    p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(0.5));
    p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(1.0));
    p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(1.0));

    __m256i n = _mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(n_real));
    __m256i scale = _mm256_slli_epi64(_mm256_add_epi64(n, _mm256_set1_epi64x(1023)), 52);
    return _mm256_mul_pd(p, _mm256_castsi256_pd(scale));
}

double avx2_sum_exp(const float *logits, int32_t num_ids, float max_logit)
{
    const __m256d largest = _mm256_set1_pd((double)max_logit);
    __m256d sums[NUM_CHAINS];
    int64_t id = 0;
    for (int chain = 0; chain < NUM_CHAINS; chain++) {
        sums[chain] = _mm256_setzero_pd();
    }
    for (; id + 4 * NUM_CHAINS <= num_ids; id += 4 * NUM_CHAINS) {
        VEC_UNROLL
        for (int chain = 0; chain < NUM_CHAINS; chain++) {
            __m256d x = _mm256_cvtps_pd(_mm_loadu_ps(logits + id + 4 * chain));
            sums[chain] = _mm256_add_pd(sums[chain], exp_of_4(_mm256_sub_pd(x, largest)));
        }
    }
    double parts[4];
    _mm256_storeu_pd(
        parts, _mm256_add_pd(_mm256_add_pd(sums[0], sums[1]), _mm256_add_pd(sums[2], sums[3])));
    double sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    for (; id < num_ids; id++) {
        sum += exp((double)logits[id] - max_logit);
    }
    return sum;
}

#endif
