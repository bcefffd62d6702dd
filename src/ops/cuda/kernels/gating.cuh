/* SPDX-License-Identifier: Apache-2.0 */
/* The steps between the two products of a gated MLP and its result, on values in registers. Each
 * step is a pass over all values, and what is asked for is a branch that all threads take alike: so
 * the code of the activations is there once, and none waits for another's result in a pass.
 *
 * The same functions in the fused kernels and in the activation's own kernel, with no product that
 * the compiler may contract with a sum: equal inputs give equal bits. */
#ifndef IMBREX_OPS_CUDA_KERNELS_GATING_CUH
#define IMBREX_OPS_CUDA_KERNELS_GATING_CUH

#include <math.h>

#include "ops/cuda/kernels/gating_params.h"
#include "ops/cuda/kernels/ptx.cuh"

/* Both values to bf16 and back. */
__device__ __forceinline__ void round_pair(float &x, float &y)
{
    const uint32_t pair = bf16x2_round(x, y);
    x = __uint_as_float(pair << 16);
    y = __uint_as_float(pair & 0xffff0000u);
}

/* Unfused, both products were bf16 before they were anything else. */
template <int COUNT>
__device__ __forceinline__ void round_products(const struct gating_params &p, float (&gate)[COUNT],
                                               float (&up)[COUNT])
{
    if (p.is_unfused != 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            round_pair(gate[i], up[i]);
    }
}

/* 1 / (1 + 2^exponent). The factor keeps the argument of the reciprocal where its result is a
 * normal number. */
__device__ __forceinline__ float logistic(float exponent)
{
    return reciprocal_approx(fmaf(exp2_approx(exponent), 0x1p-8f, 0x1p-8f)) * 0x1p-8f;
}

/* x / (1 + e^(-alpha x)); scale is -alpha log2(e). */
__device__ __forceinline__ float silu(float x, float scale)
{
    return x * logistic(x * scale);
}

/* (1 + tanh u) / 2 is 1 / (1 + e^(-2 u)), which loses nothing where tanh is near -1; u = sqrt(2 /
 * pi) (x + 0.044715 x^3). */
__device__ __forceinline__ float gelu_tanh(float x)
{
    const float slope = fmaf(x * x, -0.102943240f, -2.30220820f);
    return x * logistic(x * slope);
}

/* x P(normal < x). With q = P(normal > |x|), which never cancels, it is x q below zero and x - x q
 * above. q = e^(-x^2 / 2) t p(t), t = 1 / (1 + |x| / 4), p of degree 7 by Remez exchange for |x| <=
 * 14, within 2^-21 of itself. Above zero q counts for nothing from 16 on, where an infinite x must
 * not meet a q of 0; below, -infinity times 0 is the NaN that the formula has. */
__device__ __forceinline__ float gelu_erf(float x)
{
    const float t = reciprocal_approx(fmaf(fabsf(x), 0.25f, 1.0f));
    float p = fmaf(-0.0298465863f, t, 0.0466541573f);
    p = fmaf(p, t, 0.0740716085f);
    p = fmaf(p, t, 0.0123733738f);
    p = fmaf(p, t, 0.111907728f);
    p = fmaf(p, t, 0.0839649290f);
    p = fmaf(p, t, 0.101233631f);
    p = fmaf(p, t, 0.0996409357f);
    const float q = exp2_approx(x * x * -0.721347520f) * (t * p);
    return fmaf(-fabsf(fminf(x, 16.0f)), q, fmaxf(x, -0.0f));
}

template <int COUNT>
__device__ __forceinline__ void activate(const struct gating_params &p, float (&gate)[COUNT])
{
    const float scale = p.alpha * -1.44269504f;
    switch (p.activation) {
    case GATING_SILU:
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            gate[i] = silu(gate[i], scale);
        break;
    case GATING_GELU_ERF:
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            gate[i] = gelu_erf(gate[i]);
        break;
    case GATING_GELU_TANH:
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            gate[i] = gelu_tanh(gate[i]);
        break;
    case GATING_RELU:
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            gate[i] = max_nan(gate[i], 0.0f);
        break;
    default: /* GATING_SILU_IN_STEPS */
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            float &x = gate[i], &y = gate[i + 1];
            float a = x * p.alpha, b = y * p.alpha;
            round_pair(a, b);
            a = logistic(a * -1.44269504f);
            b = logistic(b * -1.44269504f);
            round_pair(a, b);
            x *= a;
            y *= b;
        }
        break;
    }
}

/* All but the last step, gate times up, which is that of whoever stores. Unfused, both come in as
 * bf16. */
template <int COUNT>
__device__ __forceinline__ void apply_gating(const struct gating_params &p, float (&gate)[COUNT],
                                             float (&up)[COUNT])
{
    static_assert(COUNT % 2 == 0, "values are rounded two at a time");
    if (p.limit < INFINITY) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            gate[i] = min_nan(gate[i], p.limit);
            up[i] = max_nan(min_nan(up[i], p.limit), -p.limit);
        }
    }
    activate(p, gate);
    if (p.is_unfused != 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2)
            round_pair(gate[i], gate[i + 1]);
    }
    if (p.up_offset != 0.0f) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            up[i] += p.up_offset;
            up[i + 1] += p.up_offset;
            if (p.is_unfused != 0)
                round_pair(up[i], up[i + 1]);
        }
    }
}

#endif
