/* SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>

#include "ops/ref/ref_kernels.h"

void ref_linear(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                int64_t end)
{
    for (int64_t col = begin; col < end; col++) {
        for (int64_t token = 0; token < params->num_tokens; token++) {
            float sum = ref_product(params->a, params->a_stride, work->quant_rows, token,
                                    params->weight, col, params->in_features);
            if (params->bias != NULL) {
                sum += params->bias[col];
            }
            if (params->residual != NULL) {
                sum += params->residual[token * params->d_stride + col];
            }
            params->d[token * params->d_stride + col] = sum;
        }
    }
}
