/* SPDX-License-Identifier: Apache-2.0 */
/* What linear and gemm_swiglu of plain weights ask of those who walk over rows, columns and k. */
#ifndef IMBREX_OPS_CPU_DOT_JOB_H
#define IMBREX_OPS_CPU_DOT_JOB_H

#include <stdbool.h>
#include <stdint.h>

#include "ops/cpu/cpu_kernels.h"
#include "ops/dtype.h"

/* What one call of `store` gets: the sums of some rows and columns. */
struct dot_sums {
    /* Of each matrix, [num_rows, num_cols], `stride` apart, aligned as vectors of the instruction
     * set are; reading on to a multiple of their lanes is allowed. */
    const float *at[2];
    int64_t stride;
    int64_t first_row, first_col;
    int32_t num_rows, num_cols;
};
typedef void dot_store_fn(const void *params, const struct dot_sums *sums);

/* Products of the same activations with one or two matrices of the same shape and dtype. */
struct dot_job {
    const void *a; /* [num_tokens, num_elements], a_stride_bytes apart */
    int64_t a_stride_bytes;
    const unsigned char *weights[2]; /* [.., num_elements] */
    int32_t num_matrices;
    enum dtype dtype;
    int32_t num_tokens, num_elements;
    int64_t num_cols; /* that there are of each matrix: what lies behind a piece comes next */
    enum few_way few_way;
    dot_store_fn *store;
    const void *params; /* of store */
};

/* Columns [begin, end) of all tokens. scratch [CPU_SCRATCH_BYTES]. */
typedef void dot_walk_fn(const struct dot_job *job, unsigned char *scratch, int64_t begin,
                         int64_t end);
#endif
