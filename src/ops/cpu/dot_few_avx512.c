/* SPDX-License-Identifier: Apache-2.0 */
/* In vectors of eight lanes, as AVX2 has it, but prefetched as a Xeon of the Sapphire Rapids kind
 * gave weights fastest: along the rows, into L1. */
#include "ops/cpu/dot_columns_avx512.h"

#if defined(__x86_64__)

#include "ops/cpu/vec_generic_avx2.h"

#define FEW_MAX_ROWS AVX512_FEW_ROWS
#define FEW_TILE_ROWS 4
#define FEW_SHAPES(X) X(1) X(2) X(3) X(4)
#define FEW_AHEAD_BYTES 512
#include "ops/cpu/dot_few.h"

void avx512_dot_few(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    few_walk(job, scratch, begin, end);
}

#endif
