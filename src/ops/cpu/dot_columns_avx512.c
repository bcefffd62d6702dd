/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of up to 12 rows x 32 columns: 24 of 32 registers are sums, 2 hold weights. An element of k
 * is 2 loads, 12 broadcasts and 24 multiply-adds, so that half of what the load units can do is
 * left; broadcasts as operands of the multiply-adds would need all of it. */
#include "ops/cpu/dot_columns_avx512.h"

#if defined(__x86_64__)

#include "ops/cpu/dot_few.h"
#include "ops/cpu/vec_generic_avx512.h"

#define TILE_MAX_ROWS 12
/* From five rows on multiply-adds of half the width, which streams have, are slower than memory. */
#define NARROW_MAX_ROWS 4
/* As many as let one tile of rows ask for all rows of the next group. */
#define TILE_AHEADS 32
#define TILE_SHAPES(X) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#include "ops/cpu/dot_columns_tile.h"

static const struct dot_columns avx512_columns = {.a_element_bytes = sizeof(float),
                                                  .panel_element_bytes = sizeof(float),
                                                  .max_block_k = MAX_BLOCK_K,
                                                  .group_cols = GROUP_COLS,
                                                  .most_rows = TILE_MAX_ROWS,
                                                  .num_aheads = TILE_AHEADS,
                                                  .panel_bytes = 448 * 1024,
                                                  .partial_bytes = 512 * 1024,
                                                  .fill = {FILL_ENTRIES},
                                                  .tiles = {TILE_ENTRIES}};

void avx512_dot_columns(const struct dot_job *job, unsigned char *scratch, int64_t begin,
                        int64_t end)
{
    if (job->num_tokens <= FEW_MAX_ROWS && job->few_way == FEW_WAY_ORDERED) {
        avx512_dot_ordered(job, scratch, begin, end);
        return;
    }
    if (job->num_tokens <= NARROW_MAX_ROWS) {
        avx2_dot_streams(job, scratch, begin, end);
        return;
    }
    dot_columns(&avx512_columns, job, scratch, begin, end);
}

#endif
