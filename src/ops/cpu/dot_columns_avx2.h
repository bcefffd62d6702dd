/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IMBREX_OPS_CPU_DOT_COLUMNS_AVX2_H
#define IMBREX_OPS_CPU_DOT_COLUMNS_AVX2_H

#include "ops/cpu/dot_job.h"

#define FEW_MAX_ROWS 8

/* Both take activations as fp32 and add up in the same order: of any number of rows, and of at most
 * FEW_MAX_ROWS. */
dot_walk_fn avx2_dot_columns, avx2_dot_few;

#endif
