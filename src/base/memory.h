/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes that cannot overflow unseen, address space that is committed when touched, and an arena
 * over it. */
#ifndef IMBREX_BASE_MEMORY_H
#define IMBREX_BASE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

/* *product = a * b, or false on overflow. */
static inline bool size_mul(size_t a, size_t b, size_t *product)
{
    return !__builtin_mul_overflow(a, b, product);
}

/* *sum = a + b, or false on overflow. */
static inline bool size_add(size_t a, size_t b, size_t *sum)
{
    return !__builtin_add_overflow(a, b, sum);
}

/* Zeroed address space of num_bytes (rounded up to pages), committed page by page when first
 * touched. */
struct memory_region {
    unsigned char *base; /* NULL when num_bytes is 0 */
    size_t num_bytes;
};

/* `what` names the region in the error. OUT_OF_MEMORY if the address space is not to be had. */
enum imbrex_status memory_region_map(const char *what, size_t num_bytes,
                                     struct memory_region *region, struct imbrex_error *err);
void memory_region_unmap(struct memory_region *region);

#define ARENA_ALIGNMENT 64 /* a cache line, and a full AVX-512 vector */

/* Hands out consecutive aligned pieces. With base NULL it only measures, so that one function both
 * plans and places: run it once to learn num_used, map that much, run it again. */
struct arena {
    unsigned char *base;
    size_t num_used;
    bool overflowed; /* a size did not fit size_t; then num_used means nothing */
};

/* count x element_bytes at the next multiple of ARENA_ALIGNMENT; NULL while measuring. */
void *arena_take(struct arena *arena, size_t count, size_t element_bytes);

#endif
