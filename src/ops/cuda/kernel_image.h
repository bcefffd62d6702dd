/* SPDX-License-Identifier: Apache-2.0 */
/* The compiled kernels, embedded in the library: one fatbin for each file of kernels and each of
 * the two architectures that it is compiled for. */
#ifndef IMBREX_OPS_CUDA_KERNEL_IMAGE_H
#define IMBREX_OPS_CUDA_KERNEL_IMAGE_H

#include <stdbool.h>
#include <stddef.h>

/* X(name): src/ops/cuda/kernels/<name>.cu, compiled for sm_90a. */
#define KERNEL_IMAGE_LIST(X)     \
    X(gemm_swiglu_pingpong)      \
    X(gemm_swiglu_cooperative)   \
    X(gemm_swiglu_split)         \
    X(gemm_swiglu_gate_first)    \
    X(gemm_swiglu_general)       \
    X(gemm_swiglu_general_split) \
    X(gated_activation)          \
    X(gemm)                      \
    X(row)                       \
    X(plain)                     \
    X(prefill_attention)         \
    X(tensor_attention)          \
    X(gemm_qkv)                  \
    X(gemm_residual)             \
    X(small_resident)            \
    X(small_stream)              \
    X(decode_attention)          \
    X(host_copy)                 \
    X(sample)
/* Compiled for compute_80, as machine code for 8.x and as what the driver compiles for others. */
#define KERNEL_IMAGE_PORTABLE_LIST(X) \
    X(gemm_mma)                       \
    X(gemm_mma_general)               \
    X(gated_activation)               \
    X(row)                            \
    X(plain)                          \
    X(tensor_attention)               \
    X(small_resident)                 \
    X(small_stream)                   \
    X(host_copy)                      \
    X(sample)

enum kernel_image {
#define KERNEL_IMAGE_ENUM(name) KERNEL_IMAGE_##name,
    KERNEL_IMAGE_LIST(KERNEL_IMAGE_ENUM)
#undef KERNEL_IMAGE_ENUM
    /* Portable only. */
    KERNEL_IMAGE_gemm_mma,
    KERNEL_IMAGE_gemm_mma_general,
    KERNEL_IMAGE_COUNT
};

/* Static storage; NULL where the file is not compiled for that architecture. */
const unsigned char *kernel_image_bytes(enum kernel_image image, bool is_portable,
                                        size_t *num_bytes);
const char *kernel_image_name(enum kernel_image image);

#endif
