/* SPDX-License-Identifier: Apache-2.0 */
#include "gate_first_kernels.h"

#include "ops/cuda/kernels/gemm_swiglu_gate_first.cuh"

#define SWISH_KERNEL(swish, block_m, block_n, num_stages, num_slots)                             \
    extern "C" __global__ void __launch_bounds__(GEMM_TILE_THREADS, 1)                           \
        bench_gate_first_##swish##_##block_m##x##block_n(                                        \
            const __grid_constant__ struct gemm_tile_params params)                              \
    {                                                                                            \
        gate_first_gemm<block_m, block_n, num_stages, num_slots, swish, false>(params, nullptr); \
    }

#define TILE_KERNELS(block_m, block_n, num_stages, num_slots)                   \
    SWISH_KERNEL(hidden, block_m, block_n, num_stages, num_slots)               \
    SWISH_KERNEL(serialised, block_m, block_n, num_stages, num_slots)           \
    SWISH_KERNEL(removed, block_m, block_n, num_stages, num_slots)              \
    SWISH_KERNEL(held, block_m, block_n, num_stages, num_slots)                 \
    extern "C" __global__ void __launch_bounds__(GEMM_TILE_THREADS, 1)          \
        bench_gate_first_traced_##block_m##x##block_n(                          \
            const __grid_constant__ struct gate_first_traced_params params)     \
    {                                                                           \
        gate_first_gemm<block_m, block_n, num_stages, num_slots, hidden, true>( \
            params.gemm, &params.trace);                                        \
    }
GATE_FIRST_BENCH_TILES(TILE_KERNELS)
