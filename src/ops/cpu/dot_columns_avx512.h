/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IMBREX_OPS_CPU_DOT_COLUMNS_AVX512_H
#define IMBREX_OPS_CPU_DOT_COLUMNS_AVX512_H

#include "ops/cpu/dot_job.h"

#define AVX512_FEW_ROWS 4

/* As those of dot_columns_avx2.h, with the same bits: of any number of rows, and of at most
 * AVX512_FEW_ROWS. */
dot_walk_fn avx512_dot_columns, avx512_dot_few;

#endif
