/* SPDX-License-Identifier: Apache-2.0 */
/* Plans that were measured on the machine they run on; the public part is in imbrex_ops.h. */
#ifndef IMBREX_OPS_CUDA_TUNE_TABLE_H
#define IMBREX_OPS_CUDA_TUNE_TABLE_H

#include "base/log.h"
#include "imbrex_ops.h"
#include "ops/cuda/tile_choice.h"

/* Rows that are faster than the choice without a table. */
int32_t tune_table_num_faster(const struct imbrex_tune_table *table);

/* The plan of the row that was measured for the problem: one of the same form, columns and k, whose
 * rows are the least of those that m may take (TILE_MEASURED_ROWS). False if there is none, if it
 * is not faster, not legal on the machine or not of the kernels [begin, end). A table of NULL has
 * no rows. */
bool tune_table_find_plan(const struct imbrex_tune_table *table, const struct tile_machine *machine,
                          const struct tile_problem *problem, int32_t begin, int32_t end,
                          struct tile_plan *plan);

/* Gives the device the table at `path`, as imbrex_device_options.tuned says; NULL does nothing. The
 * device has none yet. On failure nothing has changed. */
enum imbrex_status tune_load(struct imbrex_device *device, const char *path, bool is_optional,
                             const struct log *log, struct imbrex_error *err);

#endif
