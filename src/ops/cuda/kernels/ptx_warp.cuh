/* SPDX-License-Identifier: Apache-2.0 */
/* PTX of single warps and threads, with which kernels work that use neither warpgroups nor the copy
 * engine; the rest is in ptx.cuh, whose rules hold. Apart, so that the matrix kernels need not be
 * compiled again when it changes. */
#ifndef IMBREX_OPS_CUDA_KERNELS_PTX_WARP_CUH
#define IMBREX_OPS_CUDA_KERNELS_PTX_WARP_CUH

#include "ops/cuda/kernels/ptx.cuh"

/* ---- copies --------------------------------------------------------------------------------- */

/* "cp.async", 16 bytes from global to shared memory past L1; both cache lines' halves are fetched
 * into L2. */
__device__ __forceinline__ void copy_async(uint32_t shared, const void *global)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global)
                 : "memory");
}

/* "cp.async": 16 bytes, of which the first num_bytes are read and the rest become zeros. */
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void *global,
                                              uint32_t num_bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(num_bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most PENDING groups of this thread are under way. */
template <int PENDING> __device__ __forceinline__ void copy_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* "st.shared" of 16 bytes. */
__device__ __forceinline__ void shared_store_16(uint32_t shared, const uint32_t (&bits)[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(bits[0]),
                 "r"(bits[1]), "r"(bits[2]), "r"(bits[3])
                 : "memory");
}

/* "ld" of 16 bytes that are read once: they stay out of L1. */
__device__ __forceinline__ void load_once_16(uint32_t (&d)[4], const void *global)
{
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "l"(global)
                 : "memory");
}

/* The same of 8 bytes and of 4. */
__device__ __forceinline__ void load_once_8(uint32_t (&d)[2], const void *global)
{
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "l"(global)
                 : "memory");
}

__device__ __forceinline__ void load_once_4(uint32_t &d, const void *global)
{
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(d) : "l"(global) : "memory");
}

/* "cp.async.bulk.prefetch": asks for bytes (multiple of 16, 16-byte aligned) without waiting; they
 * are in L2 when they come. */
__device__ __forceinline__ void prefetch_to_l2(const void *global, uint32_t num_bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(num_bytes)
                 : "memory");
}

/* The same, not read but zeros if !is_there. */
__device__ __forceinline__ void load_once_16_if(uint32_t (&d)[4], const void *global, bool is_there)
{
    asm volatile("{\n\t"
                 ".reg .pred there;\n\t"
                 "setp.ne.u32 there, %5, 0;\n\t"
                 "mov.u32 %0, 0;\n\t"
                 "mov.u32 %1, 0;\n\t"
                 "mov.u32 %2, 0;\n\t"
                 "mov.u32 %3, 0;\n\t"
                 "@there ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
                 "}"
                 : "=&r"(d[0]), "=&r"(d[1]), "=&r"(d[2]), "=&r"(d[3])
                 : "l"(global), "r"((uint32_t)is_there)
                 : "memory");
}

/* "%laneid", read where it is asked for: what follows from threadIdx.x may be computed ahead of a
 * loop and take registers all through it. */
__device__ __forceinline__ int lane_read(void)
{
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/* ---- barriers, clusters ---------------------------------------------------------------------- */

/* "mbarrier.arrive": what this thread wrote to shared memory before is seen by those who wait. */
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* "%cluster_nctarank"; 1 where the launch has no clusters. */
__device__ __forceinline__ uint32_t cluster_num_ctas(void)
{
    uint32_t count = 1;
#if HAS_CLUSTERS
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
#endif
    return count;
}

#if HAS_CLUSTERS
#define LOAD_OF_CLUSTER "ld.shared::cluster"
#else
#define LOAD_OF_CLUSTER "ld.shared"
#endif

/* "ld.shared::cluster", an address from cluster_address. */
__device__ __forceinline__ float4 cluster_load(uint32_t address)
{
    float4 value;
    asm volatile(LOAD_OF_CLUSTER ".v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

/* "barrier.cluster", its two halves. */
__device__ __forceinline__ void cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

/* "st.async": into shared memory of another CTA, whose barrier is told of the bytes. Both addresses
 * from cluster_address. */
__device__ __forceinline__ void cluster_store_16(uint32_t address, const float (&values)[4],
                                                 uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
                 " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
                 "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void cluster_store_8(uint32_t address, float first, float second,
                                                uint32_t barrier)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"
                 " [%0], {%1, %2}, [%3];" ::"r"(address),
                 "f"(first), "f"(second), "r"(barrier)
                 : "memory");
}

/* ---- tensor cores: mma ---------------------------------------------------------------------- */

/* "ldmatrix": 8x8 tiles of 16-bit elements; lane l addresses row l % 8 of tile l / 8. Thread l gets
 * columns 2 (l % 4) and the next of row l / 4, transposed: rows 2 (l % 4) and the next of column
 * l / 4. */
__device__ __forceinline__ void matrix_load_x4(uint32_t (&tiles)[4], uint32_t shared)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(shared)
                 : "memory");
}

__device__ __forceinline__ void matrix_load_x4_transposed(uint32_t (&tiles)[4], uint32_t shared)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(shared)
                 : "memory");
}

/* "movmatrix": an 8x8 tile, a row a quad, transposed between the threads of a warp. */
__device__ __forceinline__ uint32_t matrix_transpose(uint32_t tile)
{
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(tile));
    return d;
}

/* "prmt": the lower halves of two registers, or the upper ones; first in the lower half. */
__device__ __forceinline__ uint32_t halves_low(uint32_t first, uint32_t second)
{
    return __byte_perm(first, second, 0x5410);
}

__device__ __forceinline__ uint32_t halves_high(uint32_t first, uint32_t second)
{
    return __byte_perm(first, second, 0x7632);
}

/* "mma.m16n8k16": accum [16, 8] += A [16, 16] · B [8, 16]ᵀ in bf16. With quad = lane / 4 and pair =
 * 2 (lane % 4): a holds columns pair and the next of row quad, of row quad + 8, then columns pair +
 * 8 of both; b columns pair and pair + 8 of row quad; accum columns pair and the next of row quad,
 * then of row quad + 8. */
__device__ __forceinline__ void matrix_multiply_add(float (&accum)[4], const uint32_t (&a)[4],
                                                    uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(accum[0]), "+f"(accum[1]), "+f"(accum[2]), "+f"(accum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The same of single registers, and in order with the asynchronous copies around it: sums.x and .y
 * are row quad, sums.z and .w row quad + 8; a0 and a2 row quad of A, a1 and a3 row quad + 8. */
__device__ __forceinline__ void mma_bf16(float4 &sums, uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums.x), "+f"(sums.y), "+f"(sums.z), "+f"(sums.w)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#endif
