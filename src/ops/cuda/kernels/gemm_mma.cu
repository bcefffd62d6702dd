/* SPDX-License-Identifier: Apache-2.0 */
/* SwiGLU and plain products for every GPU from compute capability 8.0 on. */
#include "ops/cuda/kernels/gemm_mma.cuh"

#define SWIGLU_KERNEL(...) GEMM_MMA_KERNEL(gemm_swiglu_bf16_sm80, pair, __VA_ARGS__)
#define PLAIN_KERNEL(...) GEMM_MMA_KERNEL(gemm_bf16_sm80, plain, __VA_ARGS__)
GEMM_MMA_VARIANTS(SWIGLU_KERNEL)
GEMM_MMA_VARIANTS(PLAIN_KERNEL)
