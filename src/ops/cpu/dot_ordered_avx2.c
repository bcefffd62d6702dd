/* SPDX-License-Identifier: Apache-2.0 */
/* Eight sums for any number of rows, but two of one row by three. */
#include "ops/cpu/dot_few.h"

#if defined(__x86_64__)

#include "ops/cpu/vec_generic_avx2.h"

#define ORDERED_TILE_ROWS 4
#define ORDERED_SHAPES(X) X(1, 2) X(2, 2) X(3, 1) X(4, 1)
#include "ops/cpu/dot_ordered.h"

void avx2_dot_ordered(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    if (end - begin < UNIT_COLS) {
        avx2_dot_streams(job, scratch, begin, end);
        return;
    }
    ordered_walk(job, scratch, begin, end);
}

#endif
