/* SPDX-License-Identifier: Apache-2.0 */
/* How threads share the columns of a loop that memory bounds: each has a range and takes pieces
 * from its front, one behind the other, so that the end of a piece can prefetch the beginning of
 * the next one. Whose range is empty takes half of what another one has left, from its back. */
#ifndef IMBREX_OPS_COLUMN_RANGES_H
#define IMBREX_OPS_COLUMN_RANGES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* No two on one cache line, at whatever multiple of 8 they begin. */
struct column_range {
    _Atomic uint64_t left; /* the first unit in the upper half, the one behind the last in the lower
                            * half */
    unsigned char padding[56];
};

struct column_ranges {
    struct column_range *ranges; /* [num_threads] */
    int32_t num_threads;
    int32_t num_parts; /* threads that begin with a range, the first ones; at least 1 */
    int64_t count;     /* columns */
    int32_t unit;      /* pieces begin at multiples of so many columns */
    int64_t least;     /* columns of a piece, but at the end of a range */
};

/* Before the threads begin. At most UINT32_MAX units. */
void column_ranges_split(struct column_ranges *ranges);
/* The next piece for a thread, [*begin, *end); false: nothing is left. */
bool column_ranges_take(struct column_ranges *ranges, int32_t thread_idx, int64_t *begin,
                        int64_t *end);

#endif
