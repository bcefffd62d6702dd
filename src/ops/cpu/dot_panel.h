/* SPDX-License-Identifier: Apache-2.0 */
/* The order in which linear and gemm_swiglu of plain weights walk over rows, columns and k, for the
 * register tiles of any instruction set. */
#ifndef IMBREX_OPS_CPU_DOT_PANEL_H
#define IMBREX_OPS_CPU_DOT_PANEL_H

#include <stdbool.h>
#include <stdint.h>

#include "ops/dtype.h"

#define DOT_TILE_MAX_ROWS 6
#define DOT_TILE_MAX_COLS 4
#define DOT_TILE_MAX_SUMS 24

/* A few rows of activations times a few rows of weights. */
struct dot_tile {
    const unsigned char
        *a; /* [num_rows, num_elements] of what the tiles take, a_stride_bytes apart */
    int64_t a_stride_bytes;
    const unsigned char *weight_rows[DOT_TILE_MAX_COLS]; /* each [num_elements] */
    /* Memory that will be needed soon, anything: it is only prefetched. From each address a cache
     * line for every one that is read of a row of weights. */
    uintptr_t ahead[DOT_TILE_MAX_COLS];
    /* Of the elements before these of the same rows, and for those after them: the accumulators as
     * they are, [num_rows * num_cols] vectors, 64-byte aligned. */
    float *partial;
    bool is_resumed, is_continued;
    int32_t num_elements;
};

/* sums[row * stride + col] = sum over k of a[row, k] * weight_rows[col][k]; unwritten if
 * is_continued. Every sum is built the same way whatever tile it stands in: one vector of
 * accumulators, k ascending, one fused multiply-add each, a fixed tree over the lanes. */
typedef void dot_tile_fn(const struct dot_tile *tile, float *sums, int64_t stride);

/* The tiles of an instruction set. */
struct dot_tiles {
    int32_t vector_bytes;
    int32_t a_element_bytes; /* of activations */
    int32_t panel_bytes;     /* a panel of weights that L2 holds beside what is on its way there */
    /* Of panels of the least width, all k. Where they would be larger, only blocks of k of panels
     * of block_panel_cols are in L2. */
    int32_t max_panel_bytes, block_panel_cols;
    /* Where there are many rows of activations, rows of more than max_whole_k elements are added up
     * in blocks of at most max_block_k. */
    int32_t max_whole_k, max_block_k;
    int32_t most_rows;                       /* of a tile */
    int32_t num_cols[DOT_TILE_MAX_ROWS + 1]; /* of the tile of so many rows; 0: there is none */
    dot_tile_fn *fns[DTYPE_NUM_PLAIN][DOT_TILE_MAX_ROWS + 1]; /* NULL: not for this dtype */
};

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
    const struct dot_tiles *tiles; /* of dot_panels alone */
    const void *a;                 /* [num_tokens, num_elements], a_stride_bytes apart */
    int64_t a_stride_bytes;
    const unsigned char *weights[2]; /* [.., num_elements] */
    int32_t num_matrices;
    enum dtype dtype;
    int32_t num_tokens, num_elements;
    dot_store_fn *store;
    const void *params; /* of store */
};

/* Columns [begin, end) of all tokens. scratch [CPU_SCRATCH_BYTES]. */
typedef void dot_panels_fn(const struct dot_job *job, unsigned char *scratch, int64_t begin,
                           int64_t end);
dot_panels_fn dot_panels;

#endif
