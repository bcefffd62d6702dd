/* SPDX-License-Identifier: Apache-2.0 */
/* Products of quantised weights with activations in blocks, for linear_vnni.c and
 * gemm_swiglu_vnni.c. Every element is, blocks ascending, acc = fma(block's sum, activation scale,
 * acc) in fp32, whichever way it is computed. */
#ifndef IMBREX_OPS_CPU_QUANT_PRODUCT_VNNI_H
#define IMBREX_OPS_CPU_QUANT_PRODUCT_VNNI_H

#include <stddef.h>
#include <stdint.h>

#include "ops/cpu/cpu_kernels.h"

#define VNNI_PRODUCT_COLS 32  /* the most columns of a call */
#define VNNI_PRODUCT_ROWS 512 /* the most rows */

struct vnni_product {
    enum dtype dtype;             /* quantised */
    const unsigned char *weights; /* [.., num_elements], any alignment */
    int64_t weight_row_bytes, num_blocks;
    const unsigned char *activations; /* [.., num_elements] in the dtype's form */
    int64_t activation_row_bytes;
};

/* weight and the activations that meet it. */
struct vnni_product vnni_product_of(struct weight_view weight, const struct quant_rows *rows,
                                    int64_t num_elements);

/* How many columns at a time pay for so many rows: 16 or 32. Callers keep to it, since prefetching
 * does. */
int64_t vnni_product_cols(int64_t num_rows);
/* At the beginning of a piece [col, col + num_cols): asks for the first weights, which nobody has
 * asked for. Does nothing if num_rows are many. */
void vnni_product_prefetch(const struct vnni_product *product, int64_t num_rows, int64_t col,
                           int64_t num_cols);

/* sums[r * VNNI_PRODUCT_COLS + c] of rows [row, row + num_rows) and columns [col, col + num_cols).
 * sums [num_rows, VNNI_PRODUCT_COLS], 64-byte aligned, written also beyond num_cols.
 * panel [VNNI_PANEL_BYTES], 64-byte aligned. */
#define VNNI_PANEL_BYTES (32 * 1024)
typedef void vnni_compute_fn(const struct vnni_product *product, int64_t row, int32_t num_rows,
                             int64_t col, int32_t num_cols, float *sums, unsigned char *panel);
vnni_compute_fn vnni_product_compute;

/* What passes by one or two panels of sixteen columns, blocks [block, block + num_blocks) of their
 * weights as quant_panel_vnni.h lays them out: num_rows rows of activations and their sums so far,
 * [num_rows, VNNI_PRODUCT_COLS], none before block 0. */
struct vnni_tile_run {
    enum dtype dtype;
    int32_t num_panels, num_rows;
    unsigned char *panels[2]; /* 64-byte aligned, the run's to change */
    const unsigned char *activations;
    int64_t activation_row_bytes, block, num_blocks;
    float *sums;
    /* Weights that are opened next: bytes [0, ahead_bytes) of each of 32 rows. */
    uintptr_t ahead;
    int64_t ahead_stride, ahead_bytes;
};
typedef void vnni_tiles_fn(const struct vnni_tile_run *run);
/* Part `part` of num_parts of asking for them. */
void vnni_prefetch_part(const struct vnni_tile_run *run, int32_t part, int32_t num_parts);
/* vnni_product_compute with panels, whatever num_rows is, and another function for them. */
void vnni_product_compute_panels(const struct vnni_product *product, int64_t row, int32_t num_rows,
                                 int64_t col, int32_t num_cols, float *sums, unsigned char *panel,
                                 vnni_tiles_fn *tiles);

/* linear and gemm_swiglu of quantised weights with another way to compute sums. */
void vnni_product_linear(vnni_compute_fn *compute, const struct linear_params *params,
                         const struct cpu_work *work, int64_t begin, int64_t end);
void vnni_product_gemm_swiglu(vnni_compute_fn *compute, const struct gemm_swiglu_params *params,
                              const struct cpu_work *work, int64_t begin, int64_t end);

#endif
