/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of up to 6 rows x 16 columns: 12 of 16 registers are sums, 2 hold weights, 1 an
 * activation. */
#include "ops/cpu/dot_columns_avx2.h"

#if defined(__x86_64__)

#include "ops/cpu/dot_few.h"
#include "ops/cpu/vec_generic_avx2.h"

#define TILE_MAX_ROWS 6
#define TILE_AHEADS 8
#define TILE_SHAPES(X) X(3) X(4) X(5) X(6)
#include "ops/cpu/dot_columns_tile.h"

static const struct dot_columns avx2_columns = {.a_element_bytes = sizeof(float),
                                                .panel_element_bytes = sizeof(float),
                                                .max_block_k = MAX_BLOCK_K,
                                                .group_cols = GROUP_COLS,
                                                .most_rows = TILE_MAX_ROWS,
                                                .num_aheads = TILE_AHEADS,
                                                .panel_bytes = 256 * 1024,
                                                .partial_bytes = 256 * 1024,
                                                .fill = {FILL_ENTRIES},
                                                .tiles = {TILE_ENTRIES}};

void avx2_dot_columns(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    if (job->num_tokens <= FEW_MAX_ROWS) {
        (job->few_way == FEW_WAY_ORDERED ? avx2_dot_ordered : avx2_dot_streams)(job, scratch, begin,
                                                                                end);
        return;
    }
    dot_columns(&avx2_columns, job, scratch, begin, end);
}

#endif
