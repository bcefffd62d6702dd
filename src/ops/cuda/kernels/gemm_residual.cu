/* SPDX-License-Identifier: Apache-2.0 */
/* The GEMM with an fp32 result, on the mainloop of the plain one. */
#include "ops/cuda/kernels/gemm_residual.cuh"

#define KERNEL(with, schedule, block_m, block_n, num_stages, num_slots)           \
    extern "C" __global__ void __launch_bounds__(GEMM_TILE_THREADS, 1)            \
        gemm_residual_bf16_sm90_##schedule##_##block_m##x##block_n(               \
            const __grid_constant__ struct gemm_residual_params params)           \
    {                                                                             \
        gemm_residual<schedule, block_m, block_n, num_stages, num_slots>(params); \
    }
GEMM_RESIDUAL_VARIANTS(KERNEL, )
