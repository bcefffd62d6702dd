/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernel between two products and the next is told, where they are not fused. Compiled by
 * gcc and by nvcc. */
#ifndef IMBREX_OPS_CUDA_KERNELS_GATED_ACTIVATION_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_GATED_ACTIVATION_PARAMS_H

#include "ops/cuda/kernels/gating_params.h"

#define GATED_ACTIVATION_COLUMNS 8 /* a thread's, of a row: 16 bytes */
#define GATED_ACTIVATION_ROWS 2    /* that a thread works on at a time */
#define GATED_ACTIVATION_MAX_THREADS 512

/* d[row, :] = act(gate[row, :]) * up[row, :], bf16; bases and strides in whole pieces of 16 bytes.
 * Grid: x, CTAs that cover row_pieces with a thread a piece; y, any number: rows are walked in
 * steps of GATED_ACTIVATION_ROWS times it. */
struct gated_activation_kernel_params {
    const void *gate, *up;
    void *d;
    int64_t gate_stride, up_stride, d_stride; /* in pieces */
    int32_t num_rows, row_pieces;
    struct gating_params gating;
};

/* X(symbol, image, params type, most dynamic shared bytes) */
#define GATED_ACTIVATION_KERNELS(X) \
    X(gated_activation_bf16, gated_activation, struct gated_activation_kernel_params, 0)

#ifdef __cplusplus
static_assert(sizeof(struct gated_activation_kernel_params) == 80, "gcc and nvcc must agree");
#else
_Static_assert(sizeof(struct gated_activation_kernel_params) == 80, "gcc and nvcc must agree");
#endif

#endif
