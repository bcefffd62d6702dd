/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of sixteen lanes for code that is written for any width. */
#ifndef IMBREX_OPS_CPU_VEC_GENERIC_AVX512_H
#define IMBREX_OPS_CPU_VEC_GENERIC_AVX512_H

#if defined(__x86_64__)

#include "ops/cpu/vec_avx512.h"

typedef __m512 vec;
typedef __m512i vec_words; /* 32 bits in a lane */

VEC_INLINE vec vec_zero(void)
{
    return _mm512_setzero_ps();
}

VEC_INLINE vec vec_add(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}

VEC_INLINE vec vec_load(const float *at)
{
    return _mm512_loadu_ps(at);
}

VEC_INLINE void vec_store(float *at, vec value)
{
    _mm512_storeu_ps(at, value);
}

/* 16 bytes at an offset of rows[0], rows[4], rows[8] and rows[12], one after the other. */
VEC_INLINE vec_words vec_load_parts(const unsigned char *const *rows, int64_t offset)
{
    __m128i quarters[4];
    VEC_UNROLL
    for (int idx = 0; idx < 4; idx++) {
        quarters[idx] = _mm_loadu_si128((const __m128i *)(const void *)(rows[4 * idx] + offset));
    }
    __m512i words = _mm512_castsi128_si512(quarters[0]);
    words = _mm512_inserti32x4(words, quarters[1], 1);
    words = _mm512_inserti32x4(words, quarters[2], 2);
    return _mm512_inserti32x4(words, quarters[3], 3);
}

/* Likewise four elements of f16 of each, widened. */
VEC_INLINE vec_words vec_load_parts_f16(const unsigned char *const *rows, int64_t offset)
{
    __m128i quarters[4];
    VEC_UNROLL
    for (int idx = 0; idx < 4; idx++) {
        quarters[idx] = _mm_loadl_epi64((const __m128i *)(const void *)(rows[4 * idx] + offset));
    }
    __m128i low = _mm_unpacklo_epi64(quarters[0], quarters[1]);
    __m128i high = _mm_unpacklo_epi64(quarters[2], quarters[3]);
    __m256i bits = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    return _mm512_castps_si512(_mm512_cvtph_ps(bits));
}

/* In parts of 16 bytes. */
VEC_INLINE vec_words vec_unpack_low_32(vec_words a, vec_words b)
{
    return _mm512_unpacklo_epi32(a, b);
}

VEC_INLINE vec_words vec_unpack_high_32(vec_words a, vec_words b)
{
    return _mm512_unpackhi_epi32(a, b);
}

VEC_INLINE vec_words vec_unpack_low_64(vec_words a, vec_words b)
{
    return _mm512_unpacklo_epi64(a, b);
}

VEC_INLINE vec_words vec_unpack_high_64(vec_words a, vec_words b)
{
    return _mm512_unpackhi_epi64(a, b);
}

/* Elements of bf16 as floats: the lower and the upper one of each lane. */
VEC_INLINE vec vec_widen_low_bf16(vec_words words)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

VEC_INLINE vec vec_widen_high_bf16(vec_words words)
{
    const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000u);
    return _mm512_castsi512_ps(_mm512_and_si512(words, high));
}

VEC_INLINE vec vec_as_floats(vec_words words)
{
    return _mm512_castsi512_ps(words);
}

#endif
#endif
