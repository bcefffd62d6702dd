/* SPDX-License-Identifier: Apache-2.0 */
/* Fused gate and up GEMM with SwiGLU, gate first, then up. */
#include "ops/cuda/kernels/gemm_swiglu_gate_first.cuh"
#include "ops/cuda/kernels/gemm_swiglu_variants.h"

#define KERNEL(schedule, block_m, block_n, num_stages, num_slots)                                 \
    extern "C" __global__ void __launch_bounds__(GEMM_TILE_THREADS, 1)                            \
        gemm_swiglu_bf16_sm90_##schedule##_##block_m##x##block_n(                                 \
            const __grid_constant__ struct gemm_tile_params params)                               \
    {                                                                                             \
        gate_first_gemm<block_m, block_n, num_stages, num_slots, hidden, false>(params, nullptr); \
    }
GEMM_SWIGLU_GATE_FIRST_VARIANTS(KERNEL)
