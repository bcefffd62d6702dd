/* SPDX-License-Identifier: Apache-2.0 */
/* Choices by measurement: the cost model tells plans apart to within about 1 %, which is more than
 * the best plans of a product differ by. */
#include "ops/cuda/tile_measured.h"

#include "ops/cuda/tile_choice.h"

#define MEASURED_ROW(sms, tile_form, rows, n, depth, tile_schedule, bm, bn, cm, cn, group, tiles, \
                     gain)                                                                        \
    {.num_sms = (sms),                                                                            \
     .problem = {.form = TILE_FORM_##tile_form, .m = (rows), .columns = (n), .k = (depth)},       \
     .schedule = TILE_SCHEDULE_##tile_schedule,                                                   \
     .block_m = (bm),                                                                             \
     .block_n = (bn),                                                                             \
     .cluster_m = (cm),                                                                           \
     .cluster_n = (cn),                                                                           \
     .group_m = (group),                                                                          \
     .num_tiles_n = (tiles)},

static const struct tile_measurement measured[] = {TILE_MEASURED(MEASURED_ROW)};

const struct tile_measurement *tile_measured_table(size_t *num_rows)
{
    *num_rows = sizeof(measured) / sizeof(measured[0]);
    return measured;
}

static bool is_row_for(const struct tile_measurement *row, const struct tile_machine *machine,
                       const struct tile_problem *problem)
{
    const struct tile_problem *other = &row->problem;
    return row->num_sms == machine->num_sms && other->form == problem->form &&
           other->columns == problem->columns && other->k == problem->k && problem->m <= other->m &&
           problem->m > other->m - TILE_MEASURED_ROWS;
}

/* Names a kernel by what it is, so that rows outlive a change of the list. */
static bool is_kernel_of(const struct tile_measurement *row, const struct kernel_variant *kernel)
{
    return kernel_serves(kernel, row->problem.form) && kernel->schedule == row->schedule &&
           kernel->block_m == row->block_m && kernel->block_n == row->block_n;
}

enum imbrex_status tile_choose_measured(const struct tile_machine *machine,
                                        const struct tile_problem *problem,
                                        const struct tile_measurement *table, size_t num_rows,
                                        int32_t begin, int32_t end, struct tile_plan *plan,
                                        struct imbrex_error *err)
{
    for (size_t i = 0; i < num_rows; i++) {
        const struct tile_measurement *row = &table[i];
        if (!is_row_for(row, machine, problem)) {
            continue;
        }
        for (int32_t kernel_idx = begin; kernel_idx < end; kernel_idx++) {
            struct tile_plan candidate = {.kernel_idx = kernel_idx,
                                          .cluster_m = row->cluster_m,
                                          .cluster_n = row->cluster_n,
                                          .group_m = row->group_m,
                                          .num_tiles_n = row->num_tiles_n};
            if (is_kernel_of(row, kernel_table_at(kernel_idx)) &&
                tile_check(machine, problem, &candidate, NULL) == IMBREX_STATUS_OK) {
                *plan = candidate;
                return IMBREX_STATUS_OK;
            }
        }
    }
    return tile_choose(machine, problem, begin, end, plan, err);
}
