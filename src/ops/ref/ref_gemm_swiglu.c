/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stddef.h>

#include "ops/ref/ref_kernels.h"

/* -0 below about -88, where exp overflows; NaN for -inf. */
static float silu(float x)
{
    return x / (1.0f + expf(-x));
}

void ref_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                     int64_t begin, int64_t end)
{
    for (int64_t col = begin; col < end; col++) {
        float gate_bias = params->gate_bias == NULL ? 0.0f : params->gate_bias[col];
        float up_bias = params->up_bias == NULL ? 0.0f : params->up_bias[col];
        for (int64_t token = 0; token < params->num_tokens; token++) {
            float gate = ref_product(params->a, params->hidden_size, work->quant_rows, token,
                                     params->gate, col, params->hidden_size);
            float up = ref_product(params->a, params->hidden_size, work->quant_rows, token,
                                   params->up, col, params->hidden_size);
            gate += gate_bias;
            up += up_bias;
            params->d[token * params->intermediate_size + col] = silu(gate) * up;
        }
    }
}
