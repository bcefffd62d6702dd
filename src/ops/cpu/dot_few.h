/* SPDX-License-Identifier: Apache-2.0 */
/* Few rows of activations: memory decides, and what it gives depends on how it is asked, which is
 * why there are several ways. All add up in the same order: dot_columns.h. */
#ifndef IMBREX_OPS_CPU_DOT_FEW_H
#define IMBREX_OPS_CPU_DOT_FEW_H

#include "ops/cpu/dot_job.h"

#define FEW_MAX_ROWS 8

/* Of at most FEW_MAX_ROWS rows. Streams: eight rows of weights that lie far apart, each the
 * beginning of many. Ordered: eight or sixteen rows beside each other, then the next ones. */
dot_walk_fn avx2_dot_streams, avx2_dot_ordered, avx512_dot_ordered;

#endif
