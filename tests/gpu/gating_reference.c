/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/gating_reference.h"

#include <math.h>

#include "ops/dtype.h"

#define SQRT_HALF 0.70710678118654752440
#define SQRT_2_OVER_PI 0.79788456080286535588

static double effective_alpha(const struct imbrex_gating *gating)
{
    return gating->alpha == 0.0f ? 1.0 : (double)gating->alpha;
}

/* The forms in which nothing cancels below zero. */
static double activate(const struct imbrex_gating *gating, double x)
{
    switch (gating->activation) {
    case IMBREX_ACTIVATION_SILU:
        return x / (1.0 + exp(-effective_alpha(gating) * x));
    case IMBREX_ACTIVATION_GELU_ERF:
        return x * (0.5 * erfc(-x * SQRT_HALF));
    case IMBREX_ACTIVATION_GELU_TANH:
        return x / (1.0 + exp(-2.0 * SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)));
    case IMBREX_ACTIVATION_RELU:
        return x < 0.0 ? 0.0 : x;
    }
    return NAN;
}

/* NaN stays. */
static double clamp_above(double x, double limit)
{
    return limit != 0.0 && x > limit ? limit : x;
}

static double clamp_below(double x, double limit)
{
    return limit != 0.0 && x < -limit ? -limit : x;
}

struct gating_value gating_exact(const struct imbrex_gating *gating, double gate, double up)
{
    double limit = (double)gating->limit;
    return (struct gating_value){
        .activated = activate(gating, clamp_above(gate, limit)),
        .up = clamp_below(clamp_above(up, limit), limit) + (double)gating->up_offset,
    };
}

/* Twice, over fp32, as a framework does that computes in it; double to bf16 at once differs where
 * fp32 rounds to the middle of two bf16. */
static double rounded(double x)
{
    return (double)bf16_to_float(bf16_from_float((float)x));
}

uint16_t gating_unfused(const struct imbrex_gating *gating, uint16_t gate, uint16_t up)
{
    double limit = rounded((double)gating->limit), alpha = effective_alpha(gating);
    double x = clamp_above((double)bf16_to_float(gate), limit);
    double y = clamp_below(clamp_above((double)bf16_to_float(up), limit), limit);
    if (gating->activation == IMBREX_ACTIVATION_SILU && alpha != 1.0) {
        double sigmoid = rounded(1.0 / (1.0 + exp(-rounded(alpha * x))));
        x = rounded(x * sigmoid);
    } else {
        x = rounded(activate(gating, x));
    }
    y = rounded(y + (double)gating->up_offset);
    return bf16_from_float((float)(x * y));
}
