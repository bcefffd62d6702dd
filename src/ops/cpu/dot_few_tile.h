/* SPDX-License-Identifier: Apache-2.0 */
/* Few rows of activations: a unit, rows of weights as many as there are lanes in one vector or two,
 * is turned in registers and meets them. For vectors of any width: included behind
 * vec_generic_avx2.h or vec_generic_avx512.h, by files that say what is prefetched meanwhile. */
#ifndef IMBREX_OPS_CPU_DOT_FEW_TILE_H
#define IMBREX_OPS_CPU_DOT_FEW_TILE_H

#if defined(__x86_64__)

#include "ops/cpu/dot_few.h"
#include "ops/cpu/dot_turn.h"

#define NUM_CHAINS 2    /* of even and of odd elements */
#define FEW_BASE_ROWS 3 /* addresses of activations: of every third row, and twice the stride */
#define FEW_NUM_BASES ((FEW_MAX_ROWS + FEW_BASE_ROWS - 1) / FEW_BASE_ROWS)

/* Addresses of a tile's activations as they move along k. */
struct few_walk {
    const unsigned char *a[FEW_NUM_BASES];
    int64_t a_stride_bytes;
};

VEC_INLINE struct few_walk few_walk_of(const unsigned char *a, int64_t a_stride_bytes)
{
    struct few_walk walk = {.a_stride_bytes = a_stride_bytes};
    VEC_UNROLL
    for (int idx = 0; idx < FEW_NUM_BASES; idx++) {
        walk.a[idx] = a + idx * FEW_BASE_ROWS * a_stride_bytes;
    }
    return walk;
}

VEC_INLINE void few_advance(struct few_walk *walk)
{
    VEC_UNROLL
    for (int idx = 0; idx < FEW_NUM_BASES; idx++) {
        walk->a[idx] += TURN_ELEMENTS * sizeof(float);
    }
}

/* Eight elements, or the first num_left of them where `is_rest`, of as many rows of weights as a
 * vector has lanes; sums [num_rows], of each its chains. */
VEC_INLINE void few_step(enum dtype dtype, const struct few_walk *walk,
                         const unsigned char *const *rows, int num_rows, int64_t offset,
                         bool is_rest, int64_t num_left, vec *sums)
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
            vec weight =
                element_of_word(dtype, words[element / num_elements], element % num_elements);
            VEC_UNROLL
            for (int row = 0; row < num_rows; row++) {
                const unsigned char *base = walk->a[row / FEW_BASE_ROWS];
                const unsigned char *from = base + row % FEW_BASE_ROWS * walk->a_stride_bytes;
                vec *sum = &sums[row * NUM_CHAINS + k % NUM_CHAINS];
                *sum = vec_add_product(
                    *sum, vec_broadcast_here((const float *)(const void *)from + k), weight);
            }
        }
    }
}

#endif
#endif
