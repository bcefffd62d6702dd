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

/* The portable sampler has no cluster whose shared memory would hold a row. */
int32_t op_kernel_shared_bytes(enum op_kernel kernel, bool is_portable)
{
    return is_portable && kernel == OP_KERNEL_sample_rows ? 0 : rows[kernel].shared_bytes;
}
