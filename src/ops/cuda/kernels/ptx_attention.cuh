/* SPDX-License-Identifier: Apache-2.0 */
/* PTX that attention alone needs, beside ptx.cuh and by its rules: products whose A operand is in
 * registers and whose B operand has its columns contiguous, and boxes at four coordinates. */
#ifndef IMBREX_OPS_CUDA_KERNELS_PTX_ATTENTION_CUH
#define IMBREX_OPS_CUDA_KERNELS_PTX_ATTENTION_CUH

#include "ops/cuda/kernels/ptx.cuh"

/* "cp.async.bulk.tensor", global to shared: the box at (x, y, z, w). */
__device__ __forceinline__ void tensor_load_box_4d(uint32_t shared, const CUtensorMap *map,
                                                   uint32_t barrier, int x, int y, int z, int w)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* "cp.async.bulk", global to shared: bytes as they lie, a multiple of 16 at multiples of 16. */
__device__ __forceinline__ void bulk_load(uint32_t shared, const void *global, uint32_t num_bytes,
                                          uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(global), "r"(num_bytes), "r"(barrier)
                 : "memory");
}

/* "ld.shared" of 2 bytes, zeros above. */
__device__ __forceinline__ uint32_t shared_load_2(uint32_t shared)
{
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(shared) : "memory");
    return bits;
}

/* "ld.shared" of 4 bytes and of 8. */
__device__ __forceinline__ uint32_t shared_load_4(uint32_t shared)
{
    uint32_t bits;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(shared) : "memory");
    return bits;
}

__device__ __forceinline__ uint2 shared_load_8(uint32_t shared)
{
    uint2 bits;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(bits.x), "=r"(bits.y)
                 : "r"(shared)
                 : "memory");
    return bits;
}

/* "st.shared" of 16 bytes. */
__device__ __forceinline__ void shared_store(uint32_t shared, uint4 value)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

/* "Matrix descriptor" of B with contiguous columns, 128-byte swizzle: pieces of 8 rows x 64 columns
 * of 1,024 bytes. The next 8 rows (k) lie 1,024 bytes on, the next 64 columns panel_bytes on. */
__device__ __forceinline__ uint64_t wgmma_descriptor_columns(uint32_t shared, uint32_t panel_bytes)
{
    return (uint64_t)((shared & 0x3FFFF) >> 4) | (uint64_t)(panel_bytes >> 4) << 16 | 64ull << 32 |
           1ull << 62;
}

/* No instruction, bounds for the compiler. What it computes of these registers before stays before,
 * what it does with them after stays after: products under way read and write them unseen. */
template <int WIDTH> __device__ __forceinline__ void wgmma_pin(float (&accum)[WIDTH])
{
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
        asm volatile("" : "+f"(accum[i])::"memory");
}

template <int STEPS> __device__ __forceinline__ void wgmma_pin(uint32_t (&a)[STEPS][4])
{
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            asm volatile("" : "+r"(a[i][j])::"memory");
}

/* clang-format off */
#define WGMMA_FROM_REGISTERS(columns, a0, a1, a2, a3, number_b)                            \
    if constexpr (COLUMNS == columns)                                                      \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 "     \
                     "{" WGMMA_NAMES_##columns "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, " \
                     "%" #number_b ", 1, 1, 1, 1;"                                         \
                     : WGMMA_REGISTERS_##columns("+f")                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
/* clang-format on */

/* "wgmma.mma_async": accum += A · B, 16 of k. A [64, 16] in registers: thread l of a warp has of
 * its rows l / 4 (a[0], a[2]) and l / 4 + 8 (a[1], a[3]) the columns l % 4 * 2 and the one after
 * it, then (a[2], a[3]) those 8 further on. B [16, columns] by wgmma_descriptor_columns. */
template <int COLUMNS>
__device__ __forceinline__ void wgmma_from_registers(float (&accum)[COLUMNS / 2],
                                                     const uint32_t (&a)[4], uint64_t b)
{
    static_assert(COLUMNS == 64 || COLUMNS == 128, "no instruction of this width is listed");
    WGMMA_FROM_REGISTERS(64, 32, 33, 34, 35, 36);
    WGMMA_FROM_REGISTERS(128, 64, 65, 66, 67, 68);
}

#endif
