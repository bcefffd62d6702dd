/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/op_kernels.h"

static const struct op_kernel_row rows[] = {
#define OP_KERNEL_ROW(symbol, image_name, params, shared) \
    {.name = #symbol,                                     \
     .image = KERNEL_IMAGE_##image_name,                  \
     .params_bytes = sizeof(params),                      \
     .shared_bytes = (shared)},
    OP_KERNEL_LIST(OP_KERNEL_ROW)
#undef OP_KERNEL_ROW
};

const struct op_kernel_row *op_kernel_at(enum op_kernel kernel)
{
    return &rows[kernel];
}

int32_t op_kernel_shared_bytes(enum op_kernel kernel, bool is_portable, int32_t max_shared_bytes)
{
    int32_t room = max_shared_bytes - OP_KERNEL_STATIC_BYTES, num_bytes = rows[kernel].shared_bytes;
    if (is_portable && kernel == OP_KERNEL_sample_rows) {
        return 0; /* there is no cluster whose shared memory would hold a row */
    }
    return is_portable && num_bytes > room ? room : num_bytes;
}
