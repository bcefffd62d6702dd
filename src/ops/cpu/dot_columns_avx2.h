/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IMBREX_OPS_CPU_DOT_COLUMNS_AVX2_H
#define IMBREX_OPS_CPU_DOT_COLUMNS_AVX2_H

#include "ops/cpu/dot_job.h"

/* Of any number of rows of fp32. */
dot_walk_fn avx2_dot_columns;

#endif
