/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/dot_columns_avx2.h"

#if defined(__x86_64__)

#include "ops/cpu/vec_generic_avx2.h"

#define FEW_TILE_ROWS 4
#define FEW_SHAPES(X) X(1) X(2) X(3) X(4)
#define FEW_AHEAD_BYTES 0
#include "ops/cpu/dot_few.h"

void avx2_dot_few(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    few_walk(job, scratch, begin, end);
}

#endif
