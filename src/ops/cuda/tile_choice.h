/* SPDX-License-Identifier: Apache-2.0 */
/* Which kernel computes a product, and how it is launched: candidates, the one statement of what is
 * legal, and a cost model that orders them. Nothing here calls the driver. */
#ifndef IMBREX_OPS_CUDA_TILE_CHOICE_H
#define IMBREX_OPS_CUDA_TILE_CHOICE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "imbrex_ops.h"
#include "ops/cuda/kernel_table.h"

/* Rows of gate, then of up, in the view of both: the columns that lie in one thread's accumulators.
 * */
#define TILE_PAIR_ROWS 8
/* Columns of the result that are stored together. */
#define TILE_STORE_COLUMNS 8

/* What matters of a device. */
struct tile_machine {
    int32_t num_sms;
    int32_t max_shared_bytes; /* of a thread block */
    bool is_portable;         /* runs the portable kernels alone */
};

/* D[m, columns] over k. */
struct tile_problem {
    enum tile_form form;
    int32_t m, columns, k;
};

/* A kernel and the numbers that its launch takes. */
struct tile_plan {
    int32_t kernel_idx;
    int32_t cluster_m, cluster_n, group_m;
    int32_t num_tiles_n; /* 0: as many as block_n asks for, all of that width */
};

/* A plan laid over a problem. */
struct tile_grid {
    int64_t num_blocks_m, num_blocks_n; /* in clusters */
    int64_t num_clusters;               /* that run at the same time, at most */
    int64_t num_waves;
    int64_t num_tiles_n; /* that are not empty */
    int64_t num_wide;    /* of these, the first ones: of block_n; the others are a piece narrower */
};

/* Widths of tiles are multiples of this many rows of weights. */
#define TILE_PIECE_ROWS (2 * TILE_PAIR_ROWS)

/* Output columns of one tile, and of one piece of it. */
static inline int32_t tile_columns(const struct kernel_variant *kernel)
{
    return kernel->form == TILE_FORM_PLAIN ? kernel->block_n : kernel->block_n / 2;
}
static inline int32_t tile_piece_columns(const struct kernel_variant *kernel)
{
    return kernel->form == TILE_FORM_PLAIN ? TILE_PIECE_ROWS : TILE_PAIR_ROWS;
}

struct tile_grid tile_grid_of(const struct tile_machine *machine,
                              const struct tile_problem *problem, const struct tile_plan *plan);

/* The only statement of what is legal. OK, INVALID_ARGUMENT for numbers that no launch may have, or
 * UNSUPPORTED with the limit and its cause. */
enum imbrex_status tile_check(const struct tile_machine *machine,
                              const struct tile_problem *problem, const struct tile_plan *plan,
                              struct imbrex_error *err);

/* Expected time of a legal plan, microseconds. */
double tile_cost_us(const struct tile_machine *machine, const struct tile_problem *problem,
                    const struct tile_plan *plan);

/* The legal plan of the least cost among the kernels [begin, end) of the table; the first of
 * equals. UNSUPPORTED, with the reason of the last kernel of the problem's form, if there is none.
 * */
enum imbrex_status tile_choose(const struct tile_machine *machine,
                               const struct tile_problem *problem, int32_t begin, int32_t end,
                               struct tile_plan *plan, struct imbrex_error *err);

/* A choice that was measured: one row of a table like tile_measured.h. */
struct tile_measurement {
    int32_t num_sms;
    struct tile_problem problem;
    enum tile_schedule schedule;
    int32_t block_m, block_n;
    int32_t cluster_m, cluster_n, group_m, num_tiles_n;
};

/* Rows of M up to this many fewer than a measured one have its tiles, so they take its plan. */
#define TILE_MEASURED_ROWS 64

/* The plan that was measured to be the fastest for the problem on such a machine; where none was,
 * or the kernels [begin, end) have it no longer, that of tile_choose. */
enum imbrex_status tile_choose_measured(const struct tile_machine *machine,
                                        const struct tile_problem *problem,
                                        const struct tile_measurement *table, size_t num_rows,
                                        int32_t begin, int32_t end, struct tile_plan *plan,
                                        struct imbrex_error *err);
/* The library's own table, *num_rows of it. */
const struct tile_measurement *tile_measured_table(size_t *num_rows);

#endif
