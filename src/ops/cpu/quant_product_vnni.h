/* SPDX-License-Identifier: Apache-2.0 */
/* Products of quantised weights with activations in blocks, for linear_vnni.c and
 * gemm_swiglu_vnni.c. Every element is, blocks ascending, acc = fma(block's sum, activation scale,
 * acc) in fp32, whichever way it is computed. */
#ifndef IMBREX_OPS_CPU_QUANT_PRODUCT_VNNI_H
#define IMBREX_OPS_CPU_QUANT_PRODUCT_VNNI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ops/cpu/cpu_kernels.h"

#define VNNI_PRODUCT_COLS 32  /* the most columns of a call */
#define VNNI_PRODUCT_ROWS 512 /* the most rows */

struct vnni_product {
    enum dtype dtype;             /* quantised */
    const unsigned char *weights; /* [.., num_elements], any alignment */
    int64_t weight_row_bytes, num_blocks;
    int64_t col_step;  /* from a column of a call to the next one */
    int64_t gap_bytes; /* what is read after the end of those rows begins so much behind it */
    /* One row of activations: weights are read in the order of their addresses where there is a way
     * to (quant_ordered_vnni.h), not as streams far apart; the bits are the same. */
    bool in_order;
    const unsigned char *activations; /* [.., num_elements] in the dtype's form */
    int64_t activation_row_bytes;
};

/* weight and the activations that meet it. */
struct vnni_product vnni_product_of(struct weight_view weight, const struct quant_rows *rows,
                                    int64_t num_elements);

/* sums[r * VNNI_PRODUCT_COLS + c] of rows [row, row + num_rows) and columns col + c * col_step, c
 * in [0, num_cols), with a step of 1 if those are more than 16.
 * sums [num_rows, VNNI_PRODUCT_COLS], 64-byte aligned, written also beyond num_cols.
 * panel [VNNI_PANEL_BYTES], 64-byte aligned. */
#define VNNI_PANEL_BYTES (64 * 1024)
typedef void vnni_compute_fn(const struct vnni_product *product, int64_t row, int32_t num_rows,
                             int64_t col, int32_t num_cols, float *sums, unsigned char *panel);
vnni_compute_fn vnni_product_compute;

/* Columns of one matrix that are computed before it is another one's turn. */
struct vnni_run {
    vnni_compute_fn *compute;
    int64_t row; /* rows of activations [row, row + num_rows) */
    int32_t num_rows;
    int64_t col;
    int32_t num_cols;     /* at most vnni_run_cols(num_rows) */
    uintptr_t next;       /* the weights that are read after them */
    unsigned char *panel; /* [VNNI_PANEL_BYTES], 64-byte aligned */
};
/* A multiple of 16, with which num_rows rows of sums take at most VNNI_SUMS. */
int32_t vnni_run_cols(int64_t num_rows);
#define VNNI_SUMS (VNNI_PRODUCT_ROWS * VNNI_PRODUCT_COLS)
/* sums[r * vnni_run_cols(num_rows) + c], 64-byte aligned, written also beyond num_cols. */
void vnni_run_compute(const struct vnni_run *run, const struct vnni_product *product, float *sums);
/* At the beginning of a piece [begin, end): asks for the first weights, which nobody has asked
 * for. Does nothing if num_rows are many. */
void vnni_product_prefetch(const struct vnni_product *product, int64_t num_rows, int64_t begin,
                           int64_t end);
/* Past the end of the weights it names memory that may not be there, which a prefetch does not
 * mind. */
static inline uintptr_t vnni_address_of(const struct vnni_product *product, int64_t col)
{
    return (uintptr_t)product->weights + (uintptr_t)(col * product->weight_row_bytes);
}

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
    /* Weights that are opened next: bytes [0, ahead_bytes) of as many rows as panels have. */
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
