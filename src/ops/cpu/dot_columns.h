/* SPDX-License-Identifier: Apache-2.0 */
/* linear and gemm_swiglu of plain weights where lanes are columns: the weights of some rows of the
 * checkpoint, a group, are turned on the way into vectors of one element of each, widened, which
 * meet broadcast activations. Here: the walk over many rows of activations, for the register tiles
 * of any instruction set.
 *
 * An output is, for each block of k, one accumulator that takes the even elements, ascending, and
 * one that takes the odd ones; these are added up block by block, even before odd. Two chains let
 * few rows read eight columns at a time, which memory gives faster than sixteen. Blocks depend on
 * the length of a row alone, so an output has the same bits in a tile of any size, among any rows
 * and on every instruction set. */
#ifndef IMBREX_OPS_CPU_DOT_COLUMNS_H
#define IMBREX_OPS_CPU_DOT_COLUMNS_H

#include <stdbool.h>
#include <stdint.h>

#include "ops/cpu/dot_job.h"
#include "ops/cpu/dot_sizes.h"
#include "ops/dtype.h"

#define LINE_BYTES 64
#define STEP_ELEMENTS 32
/* Of one block of fp32 activations. Six rows of them then take a third of an L1 of 32 KiB, twelve
 * rows less than half of one of 48 KiB. */
#define MAX_BLOCK_K 448
#define DOT_GROUP_HALVES 2 /* vectors of a group */
#define DOT_GROUP_MAX_COLS 32
#define DOT_COLUMN_MAX_ROWS 12
#define DOT_COLUMN_MAX_AHEADS 32

/* Rows of activations times a turned group, or the first half of it. */
struct dot_column_tile {
    const unsigned char *a; /* a_stride_bytes apart */
    int64_t a_stride_bytes;
    const unsigned char *group; /* what `fill` wrote */
    int64_t num_elements;
    /* A cache line from each is prefetched in every step. */
    uintptr_t ahead[DOT_COLUMN_MAX_AHEADS];
    bool has_aheads; /* false: they are of `group`, and may be left out */
    float *sums;     /* [num_rows][columns of a group] */
    bool is_resumed; /* adds to what is there */
};
typedef void dot_column_tile_fn(const struct dot_column_tile *tile);

/* Turns elements [0, num_k) of the rows of num_halves halves of a group. */
typedef void dot_column_fill_fn(const unsigned char *const *rows, int num_halves, int64_t num_k,
                                unsigned char *to);

/* What an instruction set brings. */
struct dot_columns {
    int32_t a_element_bytes;     /* of activations */
    int32_t panel_element_bytes; /* of weights that are turned; of whole steps of each column */
    int32_t max_block_k;
    int32_t group_cols; /* of a group, DOT_GROUP_HALVES vectors */
    int32_t most_rows;  /* of a tile; there are all from half as many on */
    int32_t num_aheads; /* of a tile */
    /* Of scratch: a panel of turned groups, and the sums of cut rows. */
    int32_t panel_bytes, partial_bytes;
    dot_column_fill_fn *fill[DTYPE_NUM_PLAIN];
    dot_column_tile_fn *tiles[DOT_COLUMN_MAX_ROWS + 1][DOT_GROUP_HALVES]; /* by halves - 1 */
};

/* Columns [begin, end) of all tokens, of which there are enough for the smallest tile.
 * scratch [CPU_SCRATCH_BYTES]. */
void dot_columns(const struct dot_columns *columns, const struct dot_job *job,
                 unsigned char *scratch, int64_t begin, int64_t end);

/* ---- for those who turn rows by themselves --------------------------------------------------- */

static inline int64_t element_bytes_of(const struct dot_job *job)
{
    return (int64_t)dtype_block_bytes(job->dtype);
}

/* Elements of a block of k. */
static inline int64_t block_k_at_most(const struct dot_job *job, int64_t max_block_k)
{
    int64_t num_blocks = divide_up(job->num_elements, max_block_k);
    return round_up(divide_up(job->num_elements, num_blocks), STEP_ELEMENTS);
}

static inline int64_t block_k_of(const struct dot_job *job)
{
    return block_k_at_most(job, MAX_BLOCK_K);
}

/* Rows of the columns from `col` on, of which those before `end` exist, from element k on; where
 * there are fewer, the last one again. */
static inline void rows_at(const struct dot_job *job, int32_t matrix, int64_t col, int64_t end,
                           int64_t k, int64_t num_rows, const unsigned char **rows)
{
    int64_t row_bytes = job->num_elements * element_bytes_of(job);
    const unsigned char *at = job->weights[matrix] + col * row_bytes + k * element_bytes_of(job);
    for (int64_t idx = 0; idx < num_rows; idx++) {
        rows[idx] = at;
        at += col + idx + 1 < end ? row_bytes : 0;
    }
}

#endif
