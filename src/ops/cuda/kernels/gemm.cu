/* SPDX-License-Identifier: Apache-2.0 */
/* The plain GEMM on the same mainloop. */
#include "ops/cuda/kernels/gemm_swiglu_variants.h"
#include "ops/cuda/kernels/gemm_tile.cuh"

#define KERNEL(schedule, block_m, block_n, num_stages, num_slots)                    \
    extern "C" __global__ void __launch_bounds__(GEMM_TILE_THREADS, 1)               \
        gemm_bf16_sm90_plain_##schedule##_##block_m##x##block_n(                     \
            const __grid_constant__ struct gemm_tile_params params)                  \
    {                                                                                \
        gemm_tile<plain, schedule, block_m, block_n, num_stages, num_slots>(params); \
    }
GEMM_VARIANTS(KERNEL)
