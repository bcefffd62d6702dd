/* SPDX-License-Identifier: Apache-2.0 */
/* The definition of struct imbrex_gating in double precision, beside which kernels are checked. */
#ifndef IMBREX_TESTS_GPU_GATING_REFERENCE_H
#define IMBREX_TESTS_GPU_GATING_REFERENCE_H

#include <stdint.h>

#include "imbrex_ops.h"

struct gating_value {
    double activated, up; /* the factors of the result */
};

/* Exact rounding: no step is rounded. */
struct gating_value gating_exact(const struct imbrex_gating *gating, double gate, double up);
/* As unfused, of two bf16: each step in double, then rounded to bf16. */
uint16_t gating_unfused(const struct imbrex_gating *gating, uint16_t gate, uint16_t up);

#endif
