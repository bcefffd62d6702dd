/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/ref/ref_kernels.h"

void ref_embedding(const struct embedding_params *params, int64_t begin, int64_t end)
{
    for (int64_t token = begin; token < end; token++) {
        int64_t row = (int64_t)params->token_ids[token] * params->hidden_size;
        float *d = params->d + token * params->hidden_size;
        for (int32_t col = 0; col < params->hidden_size; col++) {
            d[col] = weight_load(params->table, row + col);
        }
    }
}
