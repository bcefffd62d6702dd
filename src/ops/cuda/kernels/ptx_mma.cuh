/* SPDX-License-Identifier: Apache-2.0 */
/* PTX of kernels whose products are warps' own, beside ptx.cuh: what they do is not Hopper's alone,
 * and the matrix kernels need not be compiled again when it changes. */
#ifndef IMBREX_OPS_CUDA_KERNELS_PTX_MMA_CUH
#define IMBREX_OPS_CUDA_KERNELS_PTX_MMA_CUH

#include "ops/cuda/kernels/ptx.cuh"

/* "mbarrier.arrive": what this thread wrote to shared memory before is seen by those who wait. */
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* "cp.async", 16 bytes from global to shared memory past L1; both cache lines' halves are fetched
 * into L2. */
__device__ __forceinline__ void copy_async(uint32_t shared, const void *global)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global)
                 : "memory");
}

/* The same of the first num_bytes, the rest zero. */
__device__ __forceinline__ void copy_async_or_zero(uint32_t shared, const void *global,
                                                   int num_bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(num_bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most PENDING of this thread's groups, the newest, are under way. */
template <int PENDING> __device__ __forceinline__ void copy_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* "%cluster_nctarank"; 1 where the launch has no clusters. */
__device__ __forceinline__ uint32_t cluster_num_ctas(void)
{
    uint32_t count;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    return count;
}

/* "ld.shared::cluster", an address from cluster_address. */
__device__ __forceinline__ float4 cluster_load(uint32_t address)
{
    float4 value;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

/* "mma.m16n8k16", bf16: sums += A [16, 16] · B [8, 16]ᵀ. With g = lane / 4 and c = lane % 4, sums.x
 * and .y are row g, columns 2 c and 2 c + 1, sums.z and .w the same of row g + 8; a0 and a2 are k 2
 * c, 2 c + 1 and 2 c + 8, 2 c + 9 of row g, a1 and a3 of row g + 8; b0 and b1 the same k of column
 * g. In order with the asynchronous copies around it. */
__device__ __forceinline__ void mma_bf16(float4 &sums, uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums.x), "+f"(sums.y), "+f"(sums.z), "+f"(sums.w)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#endif
