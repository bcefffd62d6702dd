/* SPDX-License-Identifier: Apache-2.0 */
/* Fused gate and up GEMM with biases and any gating, gate and up through two tensor maps. */
#include "ops/cuda/kernels/gemm_swiglu_variants.h"
#include "ops/cuda/kernels/gemm_tile.cuh"

#define KERNEL(schedule, block_m, block_n, num_stages, num_slots)                            \
    extern "C" __global__ void __launch_bounds__(GEMM_TILE_THREADS, 1)                       \
        gemm_swiglu_bf16_sm90_general_split_##schedule##_##block_m##x##block_n(              \
            const __grid_constant__ struct gemm_tile_params params)                          \
    {                                                                                        \
        gemm_tile<general_split, schedule, block_m, block_n, num_stages, num_slots>(params); \
    }
GEMM_SWIGLU_GENERAL_SPLIT_VARIANTS(KERNEL)
