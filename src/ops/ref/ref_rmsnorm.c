/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "ops/ref/ref_kernels.h"

void ref_rmsnorm(const struct rmsnorm_params *params, int64_t begin, int64_t end)
{
    int32_t width = params->hidden_size;
    for (int64_t token = begin; token < end; token++) {
        const float *a = params->a + rmsnorm_row(params, token) * width;
        float *d = params->d + token * width;
        struct weight_view row = {a, DTYPE_F32};
        float mean_square = ref_dot(a, row, 0, width) / (float)width;
        float scale = 1.0f / sqrtf(mean_square + params->eps);
        for (int32_t col = 0; col < width; col++) {
            d[col] = a[col] * scale * params->weight[col];
        }
    }
}
