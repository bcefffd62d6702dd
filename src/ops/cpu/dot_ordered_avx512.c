/* SPDX-License-Identifier: Apache-2.0 */
/* A unit of sixteen columns, and sixteen sums of eight rows. One or two rows are left to vectors of
 * half the width, whose units stay in L1. */
#include "ops/cpu/dot_few.h"

#if defined(__x86_64__)

#include "ops/cpu/vec_generic_avx512.h"

#define NARROW_ROWS 2
#define ORDERED_TILE_ROWS 8
#define ORDERED_SHAPES(X) X(3, 1) X(4, 1) X(5, 1) X(6, 1) X(7, 1) X(8, 1)
#include "ops/cpu/dot_ordered.h"

void avx512_dot_ordered(const struct dot_job *job, unsigned char *scratch, int64_t begin,
                        int64_t end)
{
    if (job->num_tokens <= NARROW_ROWS || end - begin < UNIT_COLS) {
        avx2_dot_ordered(job, scratch, begin, end);
        return;
    }
    ordered_walk(job, scratch, begin, end);
}

#endif
