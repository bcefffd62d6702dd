/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of eight lanes for code that is written for any width. */
#ifndef IMBREX_OPS_CPU_VEC_GENERIC_AVX2_H
#define IMBREX_OPS_CPU_VEC_GENERIC_AVX2_H

#if defined(__x86_64__)

#include "ops/cpu/vec_avx2.h"

typedef __m256 vec;
typedef __m256i vec_words; /* 32 bits in a lane */

VEC_INLINE vec vec_zero(void)
{
    return _mm256_setzero_ps();
}

VEC_INLINE vec vec_add(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}

VEC_INLINE vec vec_load(const float *at)
{
    return _mm256_loadu_ps(at);
}

VEC_INLINE void vec_store(float *at, vec value)
{
    _mm256_storeu_ps(at, value);
}

/* 16 bytes at an offset of rows[0] and rows[4], one after the other. */
VEC_INLINE vec_words vec_load_parts(const unsigned char *const *rows, int64_t offset)
{
    __m128i first = _mm_loadu_si128((const __m128i *)(const void *)(rows[0] + offset));
    __m128i second = _mm_loadu_si128((const __m128i *)(const void *)(rows[4] + offset));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}

/* Likewise four elements of f16 of each, widened. */
VEC_INLINE vec_words vec_load_parts_f16(const unsigned char *const *rows, int64_t offset)
{
    __m128i first = _mm_loadl_epi64((const __m128i *)(const void *)(rows[0] + offset));
    __m128i second = _mm_loadl_epi64((const __m128i *)(const void *)(rows[4] + offset));
    return _mm256_castps_si256(_mm256_cvtph_ps(_mm_unpacklo_epi64(first, second)));
}

/* In parts of 16 bytes. */
VEC_INLINE vec_words vec_unpack_low_32(vec_words a, vec_words b)
{
    return _mm256_unpacklo_epi32(a, b);
}

VEC_INLINE vec_words vec_unpack_high_32(vec_words a, vec_words b)
{
    return _mm256_unpackhi_epi32(a, b);
}

VEC_INLINE vec_words vec_unpack_low_64(vec_words a, vec_words b)
{
    return _mm256_unpacklo_epi64(a, b);
}

VEC_INLINE vec_words vec_unpack_high_64(vec_words a, vec_words b)
{
    return _mm256_unpackhi_epi64(a, b);
}

/* Elements of bf16 as floats: the lower and the upper one of each lane. */
VEC_INLINE vec vec_widen_low_bf16(vec_words words)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

VEC_INLINE vec vec_widen_high_bf16(vec_words words)
{
    const __m256i high = _mm256_set1_epi32((int32_t)0xffff0000u);
    return _mm256_castsi256_ps(_mm256_and_si256(words, high));
}

VEC_INLINE vec vec_as_floats(vec_words words)
{
    return _mm256_castsi256_ps(words);
}

#endif
#endif
