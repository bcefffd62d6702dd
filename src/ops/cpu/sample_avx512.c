/* SPDX-License-Identifier: Apache-2.0 */
/* Eight exp in fp64 at once. scan_logits stays with AVX2, which reads logits as fast as memory
 * gives them. */
#include "ops/cpu/kernels_avx512.h"

#if defined(__x86_64__)

#include "ops/cpu/vec_avx512.h"

#define NUM_CHAINS 4 /* independent sums */
#define EXP_LANES 8

/* exp(x) of eight x <= 0 with a relative error of some 1e-14: the series of sample_avx2.c; below
 * -708, 3e-308. */
VEC_INLINE __m512d exp_of_8(__m512d x)
{
    x = _mm512_max_pd(x, _mm512_set1_pd(-708.0));
    __m512d n = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(0x1.71547652b82fep+0)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512d r = _mm512_fnmadd_pd(n, _mm512_set1_pd(0x1.62e42fefa39efp-1), x);
    r = _mm512_fnmadd_pd(n, _mm512_set1_pd(0x1.abc9e3b39803fp-56), r);

    __m512d p = _mm512_set1_pd(1.0 / 39916800.0);
    p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0 / 3628800.0));
    p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0 / 362880.0));
    p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0 / 40320.0));
    p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0 / 5040.0));
    p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0 / 720.0));
    p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0 / 120.0));
    p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0 / 24.0));
    p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0 / 6.0));
    p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(0.5));
    p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0));
    p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(1.0));
    return _mm512_scalef_pd(p, n);
}

double avx512_sum_exp(const float *logits, int32_t num_ids, float max_logit)
{
    const __m512d largest = _mm512_set1_pd((double)max_logit);
    __m512d sums[NUM_CHAINS];
    int64_t id = 0;
    for (int chain = 0; chain < NUM_CHAINS; chain++) {
        sums[chain] = _mm512_setzero_pd();
    }
    for (; id + EXP_LANES * NUM_CHAINS <= num_ids; id += EXP_LANES * NUM_CHAINS) {
        VEC_UNROLL
        for (int chain = 0; chain < NUM_CHAINS; chain++) {
            __m512d x = _mm512_cvtps_pd(_mm256_loadu_ps(logits + id + EXP_LANES * chain));
            sums[chain] = _mm512_add_pd(sums[chain], exp_of_8(_mm512_sub_pd(x, largest)));
        }
    }
    for (; id < num_ids; id += EXP_LANES) {
        __mmask8 lanes =
            (__mmask8)vec_mask_low(num_ids - id < EXP_LANES ? num_ids - id : EXP_LANES);
        __m512d x = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(lanes, logits + id));
        sums[0] = _mm512_mask_add_pd(sums[0], lanes, sums[0], exp_of_8(_mm512_sub_pd(x, largest)));
    }
    return _mm512_reduce_add_pd(
        _mm512_add_pd(_mm512_add_pd(sums[0], sums[1]), _mm512_add_pd(sums[2], sums[3])));
}

#endif
