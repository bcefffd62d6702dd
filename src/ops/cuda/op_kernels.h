/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of a forward pass beside the matrix kernels of kernel_table.h, and how one is
 * launched. Each takes one argument, its params struct, which a header in kernels/ defines for gcc
 * and nvcc alike. */
#ifndef IMBREX_OPS_CUDA_OP_KERNELS_H
#define IMBREX_OPS_CUDA_OP_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ops/cuda/kernel_image.h"
#include "ops/cuda/kernels/decode_attention_params.h"
#include "ops/cuda/kernels/gated_activation_params.h"
#include "ops/cuda/kernels/gemm_qkv_params.h"
#include "ops/cuda/kernels/gemm_residual_params.h"
#include "ops/cuda/kernels/host_copy_params.h"
#include "ops/cuda/kernels/plain_params.h"
#include "ops/cuda/kernels/prefill_attention_params.h"
#include "ops/cuda/kernels/row_params.h"
#include "ops/cuda/kernels/sample_params.h"
#include "ops/cuda/kernels/small_params.h"

/* X(symbol, image, params type, most dynamic shared bytes) */
#define OP_KERNEL_LIST(X)        \
    ROW_KERNELS(X)               \
    GATED_ACTIVATION_KERNELS(X)  \
    GEMM_QKV_KERNELS(X)          \
    GEMM_RESIDUAL_KERNELS(X)     \
    SMALL_KERNELS(X)             \
    DECODE_ATTENTION_KERNELS(X)  \
    PREFILL_ATTENTION_KERNELS(X) \
    SAMPLE_KERNELS(X)            \
    HOST_COPY_KERNELS(X)         \
    PLAIN_KERNELS(X)

enum op_kernel {
#define OP_KERNEL_ENUM(symbol, image, params, shared) OP_KERNEL_##symbol,
    OP_KERNEL_LIST(OP_KERNEL_ENUM)
#undef OP_KERNEL_ENUM
        OP_KERNEL_COUNT
};

struct op_kernel_row {
    const char *name; /* the symbol */
    enum kernel_image image;
    size_t params_bytes;
    int32_t shared_bytes; /* dynamic, the most that it is launched with */
};

const struct op_kernel_row *op_kernel_at(enum op_kernel kernel);
/* The same as far as a thread block has it; of the portable kernels, which GPUs with little of it
 * run too, less than on Hopper. */
int32_t op_kernel_shared_bytes(enum op_kernel kernel, bool is_portable, int32_t max_shared_bytes);

/* Beside the dynamic shared memory, what the kernels that use much of it have at most. */
#define OP_KERNEL_STATIC_BYTES 1024

#endif
