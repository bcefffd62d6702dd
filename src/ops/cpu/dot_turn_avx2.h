/* SPDX-License-Identifier: Apache-2.0 */
/* How rows of weights become vectors of one element of each row, and in which blocks their elements
 * are added up, for the walks over columns. Included by *_avx2.c only. */
#ifndef IMBREX_OPS_CPU_DOT_TURN_AVX2_H
#define IMBREX_OPS_CPU_DOT_TURN_AVX2_H

#if defined(__x86_64__)

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "ops/cpu/dot_panel.h"
#include "ops/cpu/dot_sizes.h"
#include "ops/cpu/vec_avx2.h"

#define LINE_BYTES 64
#define STEP_ELEMENTS 32
#define GROUP_COLS 16
#define HALVES 2 /* of a group: what one vector holds */
#define WORDS 4  /* of 32 bits, of a row in half of a vector */
/* Six rows of activations take a third of L1. */
#define MAX_BLOCK_K 448

_Static_assert(MAX_BLOCK_K % STEP_ELEMENTS == 0, "whole steps");

static inline int64_t element_bytes_of(const struct dot_job *job)
{
    return (int64_t)dtype_block_bytes(job->dtype);
}

static inline int64_t block_k_of(const struct dot_job *job)
{
    int64_t num_blocks = divide_up(job->num_elements, MAX_BLOCK_K);
    return round_up(divide_up(job->num_elements, num_blocks), STEP_ELEMENTS);
}

/* Rows of weights; where there are fewer columns, the last one of a matrix again. */
struct group {
    const unsigned char *rows[GROUP_COLS];
};

/* Rows of the columns from `col` on, of which those before `end` exist, from element k on. */
static inline void rows_at(const struct dot_job *job, int32_t matrix, int64_t col, int64_t end,
                           int64_t k, int64_t num_rows, const unsigned char **rows)
{
    int64_t row_bytes = job->num_elements * element_bytes_of(job);
    const unsigned char *at = job->weights[matrix] + col * row_bytes + k * element_bytes_of(job);
    for (int64_t idx = 0; idx < num_rows; idx++) {
        rows[idx] = at;
        at += col + idx + 1 < end ? row_bytes : 0;
    }
}

VEC_INLINE __m256i load_two(const unsigned char *low, const unsigned char *high)
{
    __m128i first = _mm_loadu_si128((const __m128i *)(const void *)low);
    __m128i second = _mm_loadu_si128((const __m128i *)(const void *)high);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}

VEC_INLINE __m256i widen_two_f16(const unsigned char *low, const unsigned char *high)
{
    __m128i first = _mm_loadl_epi64((const __m128i *)(const void *)low);
    __m128i second = _mm_loadl_epi64((const __m128i *)(const void *)high);
    return _mm256_castps_si256(_mm256_cvtph_ps(_mm_unpacklo_epi64(first, second)));
}

/* Four words of each of eight rows, row r and r + 4 in the halves of vector r, become four vectors
 * of a word of each. */
VEC_INLINE void turn_words(__m256i *vecs)
{
    __m256i low_01 = _mm256_unpacklo_epi32(vecs[0], vecs[1]);
    __m256i high_01 = _mm256_unpackhi_epi32(vecs[0], vecs[1]);
    __m256i low_23 = _mm256_unpacklo_epi32(vecs[2], vecs[3]);
    __m256i high_23 = _mm256_unpackhi_epi32(vecs[2], vecs[3]);
    vecs[0] = _mm256_unpacklo_epi64(low_01, low_23);
    vecs[1] = _mm256_unpackhi_epi64(low_01, low_23);
    vecs[2] = _mm256_unpacklo_epi64(high_01, high_23);
    vecs[3] = _mm256_unpackhi_epi64(high_01, high_23);
}

/* How eight elements of each of eight rows are turned: in parts of four vectors, and a vector, a
 * word of each row, holds two elements of bf16 or one of the other types, widened. */
VEC_INLINE int elements_of_word(enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? 2 : 1;
}

/* Part `part` of the elements from an offset on. */
VEC_INLINE void turn_part(enum dtype dtype, const unsigned char *const *rows, int64_t offset,
                          int part, __m256i *words)
{
    int64_t at = offset + part * (dtype == DTYPE_F16 ? 8 : 16);
    VEC_UNROLL
    for (int row = 0; row < WORDS; row++) {
        words[row] = dtype == DTYPE_F16 ? widen_two_f16(rows[row] + at, rows[row + WORDS] + at)
                                        : load_two(rows[row] + at, rows[row + WORDS] + at);
    }
    turn_words(words);
}

/* Element `idx` of those in a word. The conversions are exact. */
VEC_INLINE __m256 element_of_word(enum dtype dtype, __m256i word, int idx)
{
    if (dtype == DTYPE_BF16) {
        word = idx == 0 ? _mm256_slli_epi32(word, 16)
                        : _mm256_and_si256(word, _mm256_set1_epi32((int32_t)0xffff0000u));
    }
    return _mm256_castsi256_ps(word);
}

/* The last elements of a row, fewer than eight, with eight or more zeros behind them: nothing
 * outside of the rows is read. */
struct rest {
    unsigned char rows[GROUP_COLS][2 * VEC_LANES * sizeof(float)];
};

static inline struct group copy_rest(const unsigned char *const *rows, int num_rows, int64_t offset,
                                     int64_t num_bytes, struct rest *rest)
{
    struct group copied;
    memset(rest, 0, sizeof(*rest));
    for (int row = 0; row < num_rows; row++) {
        memcpy(rest->rows[row], rows[row] + offset, (size_t)num_bytes);
        copied.rows[row] = rest->rows[row];
    }
    return copied;
}

VEC_INLINE void prefetch_rows(const struct group *group, int64_t offset)
{
    VEC_UNROLL
    for (int row = 0; row < GROUP_COLS; row++) {
        uintptr_t at = (uintptr_t)group->rows[row] + (uintptr_t)offset;
        _mm_prefetch((const char *)at, _MM_HINT_T1);
    }
}

#endif
#endif
