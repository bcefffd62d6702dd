/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IMBREX_OPS_CPU_DOT_COLUMNS_AVX512_H
#define IMBREX_OPS_CPU_DOT_COLUMNS_AVX512_H

#include "ops/cpu/dot_job.h"

/* As avx2_dot_columns, with the same bits. */
dot_walk_fn avx512_dot_columns;

#endif
