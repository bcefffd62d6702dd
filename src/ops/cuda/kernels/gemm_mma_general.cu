/* SPDX-License-Identifier: Apache-2.0 */
/* Fused products with biases and any gating for every GPU from compute capability 8.0 on. Apart,
 * because the driver compiles what it loads. */
#include "ops/cuda/kernels/gemm_mma.cuh"

#define GENERAL_KERNEL(...) GEMM_MMA_KERNEL(gemm_swiglu_bf16_sm80_general, general, __VA_ARGS__)
GEMM_MMA_GENERAL_VARIANTS(GENERAL_KERNEL)
