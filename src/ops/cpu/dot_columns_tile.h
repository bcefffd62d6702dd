/* SPDX-License-Identifier: Apache-2.0 */
/* The register tile of dot_columns and how it fills panels. For vectors of any width: included
 * behind vec_generic_avx2.h or vec_generic_avx512.h by a file that defines
 *   TILE_MAX_ROWS      rows of activations, a multiple of BASE_ROWS
 *   TILE_AHEADS        prefetched lines in a step, of as many places
 *   TILE_SHAPES(X)     X(num_rows) for the tiles there are */
#ifndef IMBREX_OPS_CPU_DOT_COLUMNS_TILE_H
#define IMBREX_OPS_CPU_DOT_COLUMNS_TILE_H

#if defined(__x86_64__)

#include "ops/cpu/dot_turn.h"

#define BASE_ROWS 3
/* At once where nothing is prefetched: beside another hardware thread on the core the number of
 * instructions decides, and 4 at once are more of them; 16 at once were slower again. */
#define PLAIN_ELEMENTS 8
/* Of each row that is turned, into L1: what tiles have asked for is in L2, or in L3 where the
 * other hardware thread needs L2. Behind the block or the row it is needed soon, too. */
#define FILL_AHEAD_BYTES 128
#define NUM_BASES (TILE_MAX_ROWS / BASE_ROWS)

_Static_assert(TILE_MAX_ROWS <= DOT_COLUMN_MAX_ROWS && TILE_AHEADS <= DOT_COLUMN_MAX_AHEADS &&
                   GROUP_COLS <= DOT_GROUP_MAX_COLS,
               "room in struct dot_column_tile");
_Static_assert(STEP_ELEMENTS % TILE_AHEADS == 0 && MAX_BLOCK_K % STEP_ELEMENTS == 0, "whole steps");

/* Addresses of a tile as they move along k. */
struct tile_walk {
    const unsigned char *a[NUM_BASES]; /* of every third row */
    int64_t a_stride_bytes;
    const float *group;
};

/* num_elements of the even ones, or of the odd ones. */
VEC_INLINE void tile_elements(const struct tile_walk *at, int num_rows, int num_halves,
                              int num_elements, vec *sums)
{
    VEC_UNROLL
    for (int k = 0; k < num_elements; k++) {
        vec weights[HALVES];
        VEC_UNROLL
        for (int half = 0; half < num_halves; half++) {
            weights[half] = vec_load_here(at->group + k * GROUP_COLS + half * VEC_LANES);
        }
        VEC_UNROLL
        for (int row = 0; row < num_rows; row++) {
            const unsigned char *base = at->a[row / BASE_ROWS];
            const unsigned char *from = base + row % BASE_ROWS * at->a_stride_bytes;
            vec value = vec_broadcast_here((const float *)(const void *)from + 2 * k);
            VEC_UNROLL
            for (int half = 0; half < num_halves; half++) {
                vec *sum = &sums[row * HALVES + half];
                *sum = vec_add_product(*sum, value, weights[half]);
            }
        }
    }
}

VEC_INLINE void tile_advance(struct tile_walk *at, int num_elements)
{
    VEC_UNROLL
    for (int idx = 0; idx < NUM_BASES; idx++) {
        at->a[idx] += 2 * num_elements * (int64_t)sizeof(float);
    }
    at->group += num_elements * GROUP_COLS;
    /* gcc 12 otherwise derives further pointers from these, and spills. */
    VEC_UNROLL
    for (int idx = 0; idx < NUM_BASES; idx++) {
        __asm__("" : "+r"(at->a[idx]));
    }
    __asm__("" : "+r"(at->group), "+r"(at->a_stride_bytes));
}

/* Where a turned group has its odd elements. */
VEC_INLINE int64_t odd_offset(int64_t num_elements)
{
    return (num_elements + 1) / 2 * GROUP_COLS;
}

/* The even elements of the block, or the odd ones. */
VEC_INLINE void tile_pass(const struct dot_column_tile *tile, int num_rows, int num_halves,
                          int parity)
{
    const int num_aheads = TILE_AHEADS / 2; /* of a pass */
    struct tile_walk at = {.a_stride_bytes = tile->a_stride_bytes,
                           .group = (const float *)(const void *)tile->group +
                                    parity * odd_offset(tile->num_elements)};
    const uintptr_t *ahead = tile->ahead + parity * num_aheads;
    vec sums[TILE_MAX_ROWS * HALVES];
    VEC_UNROLL
    for (int idx = 0; idx < NUM_BASES; idx++) {
        at.a[idx] =
            tile->a + idx * BASE_ROWS * tile->a_stride_bytes + parity * (int64_t)sizeof(float);
    }
    VEC_UNROLL
    for (int idx = 0; idx < num_rows * HALVES; idx++) {
        sums[idx] = vec_zero();
    }
    int64_t num_left = (tile->num_elements + 1 - parity) / 2;
    int64_t end_line = tile->has_aheads ? num_left / (STEP_ELEMENTS / 2) * LINE_BYTES : 0;
    for (int64_t line = 0; line < end_line; line += LINE_BYTES) {
        for (int idx = 0; idx < num_aheads; idx++) {
            _mm_prefetch((const char *)(ahead[idx] + (uintptr_t)line), _MM_HINT_T1);
            tile_elements(&at, num_rows, num_halves, STEP_ELEMENTS / TILE_AHEADS, sums);
            tile_advance(&at, STEP_ELEMENTS / TILE_AHEADS);
        }
    }
    num_left -= end_line / LINE_BYTES * (STEP_ELEMENTS / 2);
    for (; num_left >= PLAIN_ELEMENTS; num_left -= PLAIN_ELEMENTS) {
        tile_elements(&at, num_rows, num_halves, PLAIN_ELEMENTS, sums);
        tile_advance(&at, PLAIN_ELEMENTS);
    }
    for (; num_left > 0; num_left--) {
        tile_elements(&at, num_rows, num_halves, 1, sums);
        tile_advance(&at, 1);
    }
    bool is_resumed = tile->is_resumed || parity > 0;
    float *to = tile->sums;
    VEC_UNROLL
    for (int row = 0; row < num_rows; row++) {
        VEC_UNROLL
        for (int half = 0; half < num_halves; half++) {
            int idx = row * HALVES + half;
            float *at_sum = to + idx * VEC_LANES;
            vec_store(at_sum, is_resumed ? vec_add(vec_load(at_sum), sums[idx]) : sums[idx]);
        }
    }
}

VEC_INLINE void tile_compute(const struct dot_column_tile *tile, int num_rows, int num_halves)
{
    for (int parity = 0; parity < 2; parity++) {
        tile_pass(tile, num_rows, num_halves, parity);
    }
}

#define DEFINE_TILE(num_rows)                                           \
    static void tile_##num_rows##x1(const struct dot_column_tile *tile) \
    {                                                                   \
        tile_compute(tile, num_rows, 1);                                \
    }                                                                   \
    static void tile_##num_rows##x2(const struct dot_column_tile *tile) \
    {                                                                   \
        tile_compute(tile, num_rows, 2);                                \
    }
TILE_SHAPES(DEFINE_TILE)

/* Eight elements of half of a group, or the first num_left of them where `is_rest`: even ones to
 * `to`, odd ones behind it. */
VEC_INLINE void fill_step(enum dtype dtype, const unsigned char *const *rows, int64_t offset,
                          bool is_rest, int64_t num_left, int64_t odd_at, float *to)
{
    const int num_elements = elements_of_word(dtype);
    VEC_UNROLL
    for (int part = 0; part < TURN_ELEMENTS / WORDS / num_elements; part++) {
        vec_words words[WORDS];
        turn_part(dtype, rows, offset, part, words);
        VEC_UNROLL
        for (int element = 0; element < WORDS * num_elements; element++) {
            int k = part * WORDS + element;
            if (is_rest && k >= num_left) {
                break;
            }
            vec_store(
                to + k / 2 * GROUP_COLS + (k % 2 == 0 ? 0 : odd_at),
                element_of_word(dtype, words[element / num_elements], element % num_elements));
        }
    }
}

VEC_INLINE void fill_group(enum dtype dtype, const unsigned char *const *rows, int num_halves,
                           int64_t num_k, float *to)
{
    const int64_t element_bytes = dtype == DTYPE_F32 ? 4 : 2, odd_at = odd_offset(num_k);
    int64_t k = 0;
    for (; k + TURN_ELEMENTS <= num_k; k += TURN_ELEMENTS, to += TURN_ELEMENTS / 2 * GROUP_COLS) {
        int64_t offset = k * element_bytes;
        if (offset % LINE_BYTES == 0) {
            prefetch_rows(rows, GROUP_COLS, offset + FILL_AHEAD_BYTES);
        }
        for (int half = 0; half < num_halves; half++) {
            fill_step(dtype, rows + half * VEC_LANES, offset, false, 0, odd_at,
                      to + half * VEC_LANES);
        }
    }
    if (k < num_k) {
        struct rest rest;
        struct group copied =
            copy_rest(rows, GROUP_COLS, k * element_bytes, (num_k - k) * element_bytes, &rest);
        for (int half = 0; half < num_halves; half++) {
            fill_step(dtype, copied.rows + half * VEC_LANES, 0, true, num_k - k, odd_at,
                      to + half * VEC_LANES);
        }
    }
}

#define DEFINE_FILL(dtype)                                                                    \
    static void fill_##dtype(const unsigned char *const *rows, int num_halves, int64_t num_k, \
                             unsigned char *to)                                               \
    {                                                                                         \
        fill_group(DTYPE_##dtype, rows, num_halves, num_k, (float *)(void *)to);              \
    }
DEFINE_FILL(BF16)
DEFINE_FILL(F16)
DEFINE_FILL(F32)

#define TILE_ENTRY(num_rows) [num_rows] = {tile_##num_rows##x1, tile_##num_rows##x2},
#define TILE_ENTRIES TILE_SHAPES(TILE_ENTRY)
#define FILL_ENTRIES [DTYPE_BF16] = fill_BF16, [DTYPE_F16] = fill_F16, [DTYPE_F32] = fill_F32

#endif
#endif
