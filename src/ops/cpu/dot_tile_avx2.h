/* SPDX-License-Identifier: Apache-2.0 */
/* The inner product at the heart of linear and gemm_swiglu: a few rows of activations times a few
 * rows of weights. */
#ifndef IMBREX_OPS_CPU_DOT_TILE_AVX2_H
#define IMBREX_OPS_CPU_DOT_TILE_AVX2_H

#include <stdint.h>

#include "ops/dtype.h"

#define DOT_TILE_MAX_ROWS 6
#define DOT_TILE_MAX_COLS 8
#define DOT_TILE_MAX_SUMS 16

/* How many activation rows the next tile should take when num_rows are left. */
int32_t dot_tile_rows(int32_t num_rows);
/* Weight rows of the widest tile over that many activation rows: a multiple of 2. */
int32_t dot_tile_cols(int32_t num_rows);

/* How many columns ahead of a tile the rows to prefetch lie. */
int64_t dot_tile_cols_ahead(int32_t num_cols, int64_t row_bytes);
/* Weight rows of a panel of about panel_bytes: a positive multiple of 8. */
int64_t dot_tile_panel_cols(int64_t panel_bytes, int64_t row_bytes);

struct dot_tile {
    const float *a; /* [num_rows, num_elements], a_stride elements apart */
    int64_t a_stride;
    const unsigned char *weight_rows[DOT_TILE_MAX_COLS]; /* [num_cols] each [num_elements] */
    /* Addresses of the weight rows that will be needed next, half of num_cols in each region;
     * anything: they are only prefetched. */
    uintptr_t prefetch_regions[2];
    enum dtype dtype;
    int32_t num_rows; /* as dot_tile_rows said */
    int32_t num_cols; /* 1, 2 or as dot_tile_cols said */
    int32_t num_elements;
};

/* sums[row * num_cols + col] = sum over k of a[row, k] * weight_rows[col][k]. Every sum is built
 * the same way whatever tile it stands in: eight lanes, k ascending, one fused multiply-add each,
 * then vec_sums_of_4. */
void dot_tile_compute(const struct dot_tile *tile, float *sums);

#endif
