/* SPDX-License-Identifier: Apache-2.0 */
/* Products of activations in blocks with rows of quantised weights: what linear and gemm_swiglu
 * over blocks are made of.
 *
 * Every output is built the same way whichever function gives it and whatever stands beside it:
 *   sum = fma(scale * (float)dot [+ min * (float)sum of q], scale of the activations, sum)
 * block by block in ascending order, where dot is an exact sum of integers. */
#ifndef IMBREX_OPS_CPU_QUANT_TILE_AVX2_H
#define IMBREX_OPS_CPU_QUANT_TILE_AVX2_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ops/cpu/cpu_kernels.h"
#include "ops/dtype.h"

#define QUANT_STRIP_COLS 8  /* of weights that are read as they lie in memory */
#define QUANT_PANEL_COLS 64 /* of weights that are unpacked for many rows */
/* Rows of activations that a panel is unpacked for. */
#define QUANT_PANEL_ROWS 256
/* Of a matrix of weights and the activations in its form. */
struct quant_product {
    const unsigned char *weights, *rows;
    int64_t weight_row_bytes, row_bytes;
    int64_t num_blocks; /* of a row */
    enum dtype dtype;
};

/* From this many rows on, a panel is faster than a strip for each row: measured on 1024 x 1024
 * weights. The results are the same. */
static inline int32_t quant_panel_min_rows(const struct quant_product *product)
{
    return product->dtype == DTYPE_Q8_0 ? 6 : 4;
}

/* A row of activations in the form of the weights must be in quant_rows. */
struct quant_product quant_product_of(struct weight_view weight, int32_t in_features,
                                      const struct quant_rows *quant_rows);

/* Columns that are read side by side: col, col + step, ..., those of them before end. */
struct quant_strip_cols {
    int64_t col, step, end;
    /* What is read after the end of these rows begins so many bytes behind it. */
    int64_t gap_bytes;
};

/* sums[i] for column col + i * step of a row; lanes beyond the last column repeat it. Meanwhile
 * asks for what each of the streams of weights comes to next, if `does_prefetch`. */
void quant_strip(const struct quant_product *product, int64_t row,
                 const struct quant_strip_cols *cols, bool does_prefetch,
                 float sums[QUANT_STRIP_COLS]);
/* Of each stream, in bytes. */
#define QUANT_STRIP_AHEAD 512

/* Bytes of scratch memory for a panel. */
#define QUANT_PANEL_BYTES (96 * 1024)
/* sums[i * QUANT_PANEL_COLS + j] for row + i and col + j, i in [0, num_rows), j in [0, num_cols),
 * num_rows <= QUANT_PANEL_ROWS, num_cols <= QUANT_PANEL_COLS; further columns up to a multiple of
 * 16 get any values. panel [QUANT_PANEL_BYTES] and sums are 64-byte aligned. */
void quant_panel(const struct quant_product *product, int64_t row, int32_t num_rows, int64_t col,
                 int32_t num_cols, unsigned char *panel, float *sums);

#endif
