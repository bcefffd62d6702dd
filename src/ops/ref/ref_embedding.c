/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/ref/ref_kernels.h"

void ref_embedding(const struct embedding_params *params, int64_t begin, int64_t end)
{
    const unsigned char *table = params->table.elements;
    int64_t row_bytes = (int64_t)dtype_row_bytes(params->table.dtype, params->hidden_size);
    for (int64_t token = begin; token < end; token++) {
        quant_dequantize_row(params->table.dtype, table + params->token_ids[token] * row_bytes,
                             params->d + token * params->hidden_size, params->hidden_size);
    }
}
