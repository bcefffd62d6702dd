/* SPDX-License-Identifier: Apache-2.0 */
/* How rows of weights become vectors of one element of each row. For vectors of any width: included
 * behind vec_generic_avx2.h or vec_generic_avx512.h. */
#ifndef IMBREX_OPS_CPU_DOT_TURN_H
#define IMBREX_OPS_CPU_DOT_TURN_H

#if defined(__x86_64__)

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "ops/cpu/dot_columns.h"

#define HALVES DOT_GROUP_HALVES
#define GROUP_COLS (HALVES * VEC_LANES)
#define WORDS 4         /* of 32 bits, of a row in 16 bytes */
#define TURN_ELEMENTS 8 /* of a row, at once */

/* Rows of weights. */
struct group {
    const unsigned char *rows[GROUP_COLS];
};

/* Four words of each of as many rows as there are lanes, rows r, r + 4, ... in the parts of vector
 * r, become four vectors of a word of each. */
VEC_INLINE void turn_words(vec_words *words)
{
    vec_words low_01 = vec_unpack_low_32(words[0], words[1]);
    vec_words high_01 = vec_unpack_high_32(words[0], words[1]);
    vec_words low_23 = vec_unpack_low_32(words[2], words[3]);
    vec_words high_23 = vec_unpack_high_32(words[2], words[3]);
    words[0] = vec_unpack_low_64(low_01, low_23);
    words[1] = vec_unpack_high_64(low_01, low_23);
    words[2] = vec_unpack_low_64(high_01, high_23);
    words[3] = vec_unpack_high_64(high_01, high_23);
}

/* How eight elements of each row are turned: in parts of four vectors, and a vector, a word of each
 * row, holds two elements of bf16 or one of the other types, widened. */
VEC_INLINE int elements_of_word(enum dtype dtype)
{
    return dtype == DTYPE_BF16 ? 2 : 1;
}

/* Part `part` of the elements from an offset on, of as many rows as there are lanes. */
VEC_INLINE void turn_part(enum dtype dtype, const unsigned char *const *rows, int64_t offset,
                          int part, vec_words *words)
{
    int64_t at = offset + part * (dtype == DTYPE_F16 ? 8 : 16);
    VEC_UNROLL
    for (int row = 0; row < WORDS; row++) {
        words[row] = dtype == DTYPE_F16 ? vec_load_parts_f16(rows + row, at)
                                        : vec_load_parts(rows + row, at);
    }
    turn_words(words);
}

/* Element `idx` of those in a word. The conversions are exact. */
VEC_INLINE vec element_of_word(enum dtype dtype, vec_words word, int idx)
{
    if (dtype != DTYPE_BF16) {
        return vec_as_floats(word);
    }
    return idx == 0 ? vec_widen_low_bf16(word) : vec_widen_high_bf16(word);
}

/* The last elements of a row, fewer than eight, with eight or more zeros behind them: nothing
 * outside of the rows is read. */
struct rest {
    unsigned char rows[GROUP_COLS][2 * TURN_ELEMENTS * sizeof(float)];
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

/* Into L1. */
VEC_INLINE void prefetch_rows(const unsigned char *const *rows, int num_rows, int64_t offset)
{
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        uintptr_t at = (uintptr_t)rows[row] + (uintptr_t)offset;
        _mm_prefetch((const char *)at, _MM_HINT_T0);
    }
}

#endif
#endif
