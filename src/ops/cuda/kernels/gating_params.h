/* SPDX-License-Identifier: Apache-2.0 */
/* How a kernel makes one result of gate and up: struct imbrex_gating of imbrex_ops.h as device code
 * wants it. Compiled by gcc and by nvcc. */
#ifndef IMBREX_OPS_CUDA_KERNELS_GATING_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_GATING_PARAMS_H

#include <stdint.h>

enum gating_activation {
    GATING_SILU,
    GATING_GELU_ERF,
    GATING_GELU_TANH,
    GATING_RELU,
    GATING_SILU_IN_STEPS, /* rounded as unfused: alpha * gate, its sigmoid, the product */
};

struct gating_params {
    int32_t activation; /* enum gating_activation */
    int32_t is_unfused; /* 1: round to bf16 after each step */
    float alpha;        /* of the two SILU; 1 in the first if unfused */
    float limit;        /* infinity: none; a bf16 if unfused */
    float up_offset;
    int32_t reserved;
};

#ifdef __cplusplus
static_assert(sizeof(struct gating_params) == 24, "gcc and nvcc must agree");
#else
_Static_assert(sizeof(struct gating_params) == 24, "gcc and nvcc must agree");
#endif

#endif
