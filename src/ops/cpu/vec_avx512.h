/* SPDX-License-Identifier: Apache-2.0 */
/* What the AVX-512 kernels share: loads that widen and never leave their row, one order of adding
 * up sixteen lanes, exp. Included by *_avx512.c, *_vnni.c and *_amx.c only, all built with the
 * options of AVX-512 F, BW, DQ and VL. */
#ifndef IMBREX_OPS_CPU_VEC_AVX512_H
#define IMBREX_OPS_CPU_VEC_AVX512_H

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>

#include "ops/cpu/vec_unroll.h"
#include "ops/dtype.h"

#define VEC_LANES 16

/* Holds a vector in a register. gcc 12 otherwise repeats a load as the memory operand of each
 * use. */
VEC_INLINE __m512 vec_keep(__m512 vec)
{
    __asm__("" : "+v"(vec));
    return vec;
}

/* sum + a * b with one rounding, in the register of the sum and in its place, as the two below.
 * gcc 12 otherwise puts some results in the registers of a or b, where tiles as large as the
 * register file then spill. */
VEC_INLINE __m512 vec_add_product(__m512 sum, __m512 a, __m512 b)
{
    __asm__ volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

VEC_INLINE __m512 vec_load_here(const float *at)
{
    __m512 vec;
    __asm__ volatile("vmovups %1, %0" : "=v"(vec) : "m"(*(const __m512_u *)(const void *)at));
    return vec;
}

VEC_INLINE __m512 vec_broadcast_here(const float *at)
{
    __m512 vec;
    __asm__ volatile("vbroadcastss %1, %0" : "=v"(vec) : "m"(*at));
    return vec;
}

/* Lanes [0, num_lanes) set; all of them from 16 on, none below 1. */
VEC_INLINE __mmask16 vec_mask_low(int64_t num_lanes)
{
    return num_lanes >= VEC_LANES ? (__mmask16)0xffff
           : num_lanes <= 0       ? (__mmask16)0
                                  : (__mmask16)((1u << num_lanes) - 1);
}

/* Sixteen bf16 elements, each in the upper two bytes of its lane. One instruction, where zero
 * extension and a shift are two. The broadcast is part of a load; a plain load of half a vector
 * would come to one of the lower 16 registers, of which gcc 12 then has too few. */
VEC_INLINE __m512 vec_widen_bf16(__m256i bits)
{
    const __m512i element_of_word =
        _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5,
                         5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(
        (__mmask32)0xaaaaaaaa, element_of_word, _mm512_broadcast_i64x4(bits)));
}

/* Sixteen weights from any byte address, widened. The conversions are exact. */
VEC_INLINE __m512 vec_load_weights(enum dtype dtype, const unsigned char *weights)
{
    if (dtype == DTYPE_F32) {
        return _mm512_loadu_ps((const void *)weights);
    }
    __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)weights);
    return dtype == DTYPE_BF16 ? vec_widen_bf16(bits) : _mm512_cvtph_ps(bits);
}

/* Lane i is the sum of the sixteen lanes of vector i. Lanes 4j to 4j + 3 are added first, as (0 +
 * 2) + (1 + 3), to four sums q_j, and these as (q_0 + q_2) + (q_1 + q_3). */
VEC_INLINE __m128 vec_sums_of_4(__m512 vec_0, __m512 vec_1, __m512 vec_2, __m512 vec_3)
{
    __m512 pairs_01 =
        _mm512_add_ps(_mm512_unpacklo_ps(vec_0, vec_1), _mm512_unpackhi_ps(vec_0, vec_1));
    __m512 pairs_23 =
        _mm512_add_ps(_mm512_unpacklo_ps(vec_2, vec_3), _mm512_unpackhi_ps(vec_2, vec_3));
    __m512 quarters = _mm512_add_ps(_mm512_shuffle_ps(pairs_01, pairs_23, _MM_SHUFFLE(1, 0, 1, 0)),
                                    _mm512_shuffle_ps(pairs_01, pairs_23, _MM_SHUFFLE(3, 2, 3, 2)));
    __m256 halves =
        _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

/* The same order for one vector. */
VEC_INLINE float vec_sum(__m512 vec)
{
    return _mm_cvtss_f32(vec_sums_of_4(vec, vec, vec, vec));
}

/* exp(x); inf above 88.73, 0 below -103.98, NaN for NaN. The polynomial is that of vec_avx2.h, and
 * scaling by 2^n rounds once, also to subnormal results. */
VEC_INLINE __m512 vec_exp(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    /* max and min return their second operand when one is NaN. */
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);
    x = _mm512_min_ps(_mm512_set1_ps(89.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p+0f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e43p-1f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-0x1.05c61p-29f), r);

    __m512 p = _mm512_set1_ps(0x1.4f2a52p-10f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.120b62p-7f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.557904p-5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.5554dep-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.ffffdep-2f));
    __m512 value = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), one);
    return _mm512_scalef_ps(value, n);
}

/* x / (1 + exp(-x)) as the reference computes it: -0 once exp(-x) overflows, NaN for -inf. */
VEC_INLINE __m512 vec_silu(__m512 x)
{
    __m512 negated = _mm512_xor_ps(x, _mm512_set1_ps(-0.0f));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), vec_exp(negated)));
}

#endif
#endif
