/* SPDX-License-Identifier: Apache-2.0 */
/* What the AVX2 kernels share: loads that widen and never leave their row, one order of adding up
 * eight lanes, exp. Included by *_avx2.c only, which are built with -mavx2 -mfma -mf16c. */
#ifndef IMBREX_OPS_CPU_VEC_AVX2_H
#define IMBREX_OPS_CPU_VEC_AVX2_H

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>

#include "ops/cpu/vec_unroll.h"
#include "ops/dtype.h"

#define VEC_LANES 8

/* Holds a vector in a register. gcc 12 otherwise repeats a load as the memory operand of each use,
 * and tiles wait for the load units. */
VEC_INLINE __m256 vec_keep(__m256 vec)
{
    __asm__("" : "+x"(vec));
    return vec;
}

/* Eight elements from any address, loaded where this stands: after the products that stand before
 * it and before those behind it. What gcc 12 arranges by itself needs more registers than there
 * are. */
VEC_INLINE __m256 vec_load_here(const float *at)
{
    __m256 vec;
    __asm__ volatile("vmovups %1, %0" : "=x"(vec) : "m"(*(const __m256_u *)(const void *)at));
    return vec;
}

/* sum + a * b with one rounding, in the register of the sum; likewise in its place. */
VEC_INLINE __m256 vec_add_product(__m256 sum, __m256 a, __m256 b)
{
    __asm__ volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}

/* A broadcast where this stands. */
VEC_INLINE __m256 vec_broadcast_here(const float *at)
{
    __m256 vec;
    __asm__ volatile("vbroadcastss %1, %0" : "=x"(vec) : "m"(*at));
    return vec;
}

/* Lanes [0, num_lanes) set. */
VEC_INLINE __m256i vec_mask_low(int32_t num_lanes)
{
    __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(num_lanes), lanes);
}

/* The first num_lanes lanes, all of them from eight on. A masked store is a long sequence of
 * micro-operations on AMD processors. */
VEC_INLINE void vec_store_first(float *at, __m256 vec, int32_t num_lanes)
{
    if (num_lanes >= VEC_LANES) {
        _mm256_storeu_ps(at, vec);
    } else {
        _mm256_maskstore_ps(at, vec_mask_low(num_lanes), vec);
    }
}

/* Eight weights from any byte address, widened. The conversions are exact. */
VEC_INLINE __m256 vec_load_weights(enum dtype dtype, const unsigned char *weights)
{
    if (dtype == DTYPE_BF16) {
        __m128i bits = _mm_loadu_si128((const __m128i *)(const void *)weights);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    if (dtype == DTYPE_F16) {
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)weights));
    }
    return _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i *)(const void *)weights));
}

/* Lane i is the sum of the eight lanes of vector i: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
VEC_INLINE __m128 vec_sums_of_4(__m256 vec_0, __m256 vec_1, __m256 vec_2, __m256 vec_3)
{
    __m256 pairs_01 = _mm256_hadd_ps(vec_0, vec_1);
    __m256 pairs_23 = _mm256_hadd_ps(vec_2, vec_3);
    __m256 halves = _mm256_hadd_ps(pairs_01, pairs_23);
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

/* The same order for one vector. */
VEC_INLINE float vec_sum(__m256 vec)
{
    return _mm_cvtss_f32(vec_sums_of_4(vec, vec, vec, vec));
}

VEC_INLINE float vec_max(__m256 vec)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(vec), _mm256_extractf128_ps(vec, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* exp(x) with a relative error of at most 0.73 * 2^-23 (measured over every third float; subnormal
 * results are off by 0.78 * 2^-149); inf above 88.73, 0 below -103.98, NaN for NaN.
 *
 * x = n ln 2 + r with |r| <= ln 2 / 2, exp(x) = 2^n (1 + r + r^2 p(r)); p interpolates
 * (exp(r) - 1 - r) / r^2 at five Chebyshev nodes (relative error of exp 1.4e-8). 2^n is multiplied
 * in two halves, because n runs from -150 to 128. */
VEC_INLINE __m256 vec_exp(__m256 x)
{
    const __m256 one = _mm256_set1_ps(1.0f);
    /* max and min return their second operand when one is NaN. */
    x = _mm256_max_ps(_mm256_set1_ps(-104.0f), x);
    x = _mm256_min_ps(_mm256_set1_ps(89.0f), x);
    __m256 n_real = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(0x1.715476p+0f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n_real, _mm256_set1_ps(0x1.62e43p-1f), x);
    r = _mm256_fnmadd_ps(n_real, _mm256_set1_ps(-0x1.05c61p-29f), r);

    __m256 p = _mm256_set1_ps(0x1.4f2a52p-10f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.120b62p-7f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.557904p-5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.5554dep-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.ffffdep-2f));
    __m256 value = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), one);

    __m256i n = _mm256_cvtps_epi32(n_real);
    __m256i n_low = _mm256_srai_epi32(n, 1);
    __m256i n_high = _mm256_sub_epi32(n, n_low);
    const __m256i bias = _mm256_set1_epi32(127);
    __m256i scale_low = _mm256_slli_epi32(_mm256_add_epi32(n_low, bias), 23);
    __m256i scale_high = _mm256_slli_epi32(_mm256_add_epi32(n_high, bias), 23);
    value = _mm256_mul_ps(value, _mm256_castsi256_ps(scale_low));
    return _mm256_mul_ps(value, _mm256_castsi256_ps(scale_high));
}

/* x / (1 + exp(-x)) as the reference computes it: -0 once exp(-x) overflows, NaN for -inf. */
VEC_INLINE __m256 vec_silu(__m256 x)
{
    __m256 negated = _mm256_xor_ps(x, _mm256_set1_ps(-0.0f));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), vec_exp(negated)));
}

#endif
#endif
