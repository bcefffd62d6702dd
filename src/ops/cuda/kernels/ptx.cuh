/* SPDX-License-Identifier: Apache-2.0 */
/* The only home of PTX: a function is an instruction (or the two that never stand apart). Names of
 * sections are those of the PTX ISA manual. Shared-memory addresses are 32-bit addresses of the
 * shared window of the executing CTA. */
#ifndef IMBREX_OPS_CUDA_KERNELS_PTX_CUH
#define IMBREX_OPS_CUDA_KERNELS_PTX_CUH

#include <cuda.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* ---- clusters, grids, registers ------------------------------------------------------------- */

/* Clusters and overlapping grids begin with compute capability 9.0. In code for less a CTA is the
 * whole of its cluster, and no grid begins before the one ahead of it has ended. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define HAS_CLUSTERS 0
#else
#define HAS_CLUSTERS 1
#endif

/* "%cluster_ctarank" */
__device__ __forceinline__ uint32_t cluster_cta_rank(void)
{
    uint32_t rank = 0;
#if HAS_CLUSTERS
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

/* "barrier.cluster", arrive (release) and wait (acquire) of all threads of a cluster. */
__device__ __forceinline__ void cluster_sync(void)
{
#if HAS_CLUSTERS
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

/* "mapa": the address that the same variable has in another CTA of the cluster. */
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank)
{
    uint32_t mapped = address;
#if HAS_CLUSTERS
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
#endif
    return mapped;
}

/* "griddepcontrol": no effect where the launch did not ask for programmatic serialization. */
__device__ __forceinline__ void grid_wait_for_previous(void)
{
#if HAS_CLUSTERS
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void grid_release_next(void)
{
#if HAS_CLUSTERS
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* "setmaxnreg" */
template <int REGISTERS> __device__ __forceinline__ void registers_shrink(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ __forceinline__ void registers_grow(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* ---- clocks --------------------------------------------------------------------------------- */

/* "%clock64": of this SM. */
__device__ __forceinline__ uint64_t sm_clock(void)
{
    uint64_t clock;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock)::"memory");
    return clock;
}

/* "%globaltimer": nanoseconds, the same on all SMs. */
__device__ __forceinline__ uint64_t device_time_ns(void)
{
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    return time;
}

/* "%smid" */
__device__ __forceinline__ uint32_t sm_number(void)
{
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    return sm;
}

/* ---- barriers ------------------------------------------------------------------------------- */

/* "bar": named barriers of a CTA; threads counts those who wait and those who only arrive. */
__device__ __forceinline__ void named_barrier_wait(int barrier, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/* "mbarrier.init" and the fence that shows it to the copy engine and to the cluster. */
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_init_fence(void)
{
#if HAS_CLUSTERS
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void mbarrier_expect_bytes(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* Takes an address from cluster_address. Not .release.cluster: what it orders are reads of the
 * tensor cores, over by then (wgmma_wait), and the fence in that form stalls for every store under
 * way. */
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

#if HAS_CLUSTERS
#define MBARRIER_WAIT "mbarrier.try_wait"
#else
#define MBARRIER_WAIT "mbarrier.test_wait"
#endif

/* "mbarrier.try_wait": returns when the phase of this parity is over. */
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n\t"
                 ".reg .pred done;\n"
                 "again:\n\t" MBARRIER_WAIT ".parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* ---- copy engine ---------------------------------------------------------------------------- */

/* "prefetch.tensormap" */
__device__ __forceinline__ void tensor_map_prefetch(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* "cp.async.bulk.tensor", global to shared; mask has a bit for each CTA of the cluster that gets
 * the box, at the same address, and whose barrier is told. */
__device__ __forceinline__ void tensor_load_2d(uint32_t shared, const CUtensorMap *map,
                                               uint32_t barrier, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(x), "r"(y)
                 : "memory");
}

__device__ __forceinline__ void tensor_load_2d_multicast(uint32_t shared, const CUtensorMap *map,
                                                         uint32_t barrier, int x, int y,
                                                         uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(mask)
                 : "memory");
}

/* Box at (x, 0, 0, w). */
__device__ __forceinline__ void tensor_load_4d(uint32_t shared, const CUtensorMap *map,
                                               uint32_t barrier, int x, int w)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %5, %5, %4}], [%2];" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(x), "r"(w), "r"(0)
                 : "memory");
}

__device__ __forceinline__ void tensor_load_4d_multicast(uint32_t shared, const CUtensorMap *map,
                                                         uint32_t barrier, int x, int w,
                                                         uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %5, %5, %4}], [%2], %6;" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(x), "r"(w), "r"(0), "h"(mask)
                 : "memory");
}

/* Shared to global, out-of-bounds elements dropped; counted by the executing thread. */
__device__ __forceinline__ void tensor_store_2d(const CUtensorMap *map, uint32_t shared, int x,
                                                int y)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
                 " [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared), "r"(x), "r"(y)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* "cp.reduce.async.bulk.tensor": the same, added to what is there; fp32 maps. One rounding an
 * element, in no order between copies that meet at one. */
__device__ __forceinline__ void tensor_add_2d(const CUtensorMap *map, uint32_t shared, int x, int y)
{
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
                 " [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared), "r"(x), "r"(y)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* A turn in which nothing was stored, for those who count turns by tensor_store_wait_read. */
__device__ __forceinline__ void tensor_store_none(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Until at most PENDING stores of this thread still read shared memory. */
template <int PENDING> __device__ __forceinline__ void tensor_store_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* "fence.proxy.async": shared memory written by this thread before, read by the copy engine
 * after. */
__device__ __forceinline__ void fence_to_copy_engine(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* "st.shared.v2" */
__device__ __forceinline__ void shared_store_f32x2(uint32_t shared, float x, float y)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(x), "f"(y) : "memory");
}

/* "ld.shared.v4" */
__device__ __forceinline__ uint4 shared_load_16(uint32_t shared)
{
    uint4 bits;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(shared)
                 : "memory");
    return bits;
}

/* "stmatrix": 8x8 tiles of 16-bit elements; lane l addresses row l % 8 of tile l / 8. */
__device__ __forceinline__ void matrix_store_x4(uint32_t shared, const uint32_t (&tiles)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
                 "r"(tiles[0]), "r"(tiles[1]), "r"(tiles[2]), "r"(tiles[3])
                 : "memory");
}

__device__ __forceinline__ void matrix_store_x2(uint32_t shared, uint32_t tile0, uint32_t tile1)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared),
                 "r"(tile0), "r"(tile1)
                 : "memory");
}

/* ---- arithmetic ----------------------------------------------------------------------------- */

__device__ __forceinline__ float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* "min", "max": NaN if either is. */
__device__ __forceinline__ float min_nan(float x, float y)
{
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ __forceinline__ float max_nan(float x, float y)
{
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

/* Rounded to nearest even; low in the lower half. */
__device__ __forceinline__ uint32_t bf16x2_round(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* ---- tensor cores: wgmma -------------------------------------------------------------------- */

/* "Matrix descriptor": K-major, 128-byte swizzle, so the leading offset is unused (1) and groups of
 * 8 rows are 1,024 bytes apart. All in units of 16 bytes. */
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared)
{
    return (uint64_t)((shared & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> __device__ __forceinline__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Operand lists of n columns are n / 2 registers; WGMMA_NAMES_n names them, WGMMA_REGISTERS_n binds
 * them, each built on the list before it. */
/* clang-format off */
#define WGMMA_NAMES_8 "%0, %1, %2, %3"
#define WGMMA_NAMES_16 WGMMA_NAMES_8 ", %4, %5, %6, %7"
#define WGMMA_NAMES_24 WGMMA_NAMES_16 ", %8, %9, %10, %11"
#define WGMMA_NAMES_32 WGMMA_NAMES_24 ", %12, %13, %14, %15"
#define WGMMA_NAMES_40 WGMMA_NAMES_32 ", %16, %17, %18, %19"
#define WGMMA_NAMES_48 WGMMA_NAMES_40 ", %20, %21, %22, %23"
#define WGMMA_NAMES_56 WGMMA_NAMES_48 ", %24, %25, %26, %27"
#define WGMMA_NAMES_64 WGMMA_NAMES_56 ", %28, %29, %30, %31"
#define WGMMA_NAMES_72 WGMMA_NAMES_64 ", %32, %33, %34, %35"
#define WGMMA_NAMES_80 WGMMA_NAMES_72 ", %36, %37, %38, %39"
#define WGMMA_NAMES_88 WGMMA_NAMES_80 ", %40, %41, %42, %43"
#define WGMMA_NAMES_96 WGMMA_NAMES_88 ", %44, %45, %46, %47"
#define WGMMA_NAMES_104 WGMMA_NAMES_96 ", %48, %49, %50, %51"
#define WGMMA_NAMES_112 WGMMA_NAMES_104 ", %52, %53, %54, %55"
#define WGMMA_NAMES_120 WGMMA_NAMES_112 ", %56, %57, %58, %59"
#define WGMMA_NAMES_128 WGMMA_NAMES_120 ", %60, %61, %62, %63"
#define WGMMA_NAMES_136 WGMMA_NAMES_128 ", %64, %65, %66, %67"
#define WGMMA_NAMES_144 WGMMA_NAMES_136 ", %68, %69, %70, %71"
#define WGMMA_NAMES_152 WGMMA_NAMES_144 ", %72, %73, %74, %75"
#define WGMMA_NAMES_160 WGMMA_NAMES_152 ", %76, %77, %78, %79"
#define WGMMA_NAMES_168 WGMMA_NAMES_160 ", %80, %81, %82, %83"
#define WGMMA_NAMES_176 WGMMA_NAMES_168 ", %84, %85, %86, %87"
#define WGMMA_NAMES_184 WGMMA_NAMES_176 ", %88, %89, %90, %91"
#define WGMMA_NAMES_192 WGMMA_NAMES_184 ", %92, %93, %94, %95"
#define WGMMA_NAMES_200 WGMMA_NAMES_192 ", %96, %97, %98, %99"
#define WGMMA_NAMES_208 WGMMA_NAMES_200 ", %100, %101, %102, %103"
#define WGMMA_NAMES_216 WGMMA_NAMES_208 ", %104, %105, %106, %107"
#define WGMMA_NAMES_224 WGMMA_NAMES_216 ", %108, %109, %110, %111"
#define WGMMA_NAMES_232 WGMMA_NAMES_224 ", %112, %113, %114, %115"
#define WGMMA_NAMES_240 WGMMA_NAMES_232 ", %116, %117, %118, %119"
#define WGMMA_NAMES_248 WGMMA_NAMES_240 ", %120, %121, %122, %123"
#define WGMMA_NAMES_256 WGMMA_NAMES_248 ", %124, %125, %126, %127"
#define WGMMA_BIND(mode, i) \
    mode(accum[i]), mode(accum[i + 1]), mode(accum[i + 2]), mode(accum[i + 3])
#define WGMMA_REGISTERS_8(mode) WGMMA_BIND(mode, 0)
#define WGMMA_REGISTERS_16(mode) WGMMA_REGISTERS_8(mode), WGMMA_BIND(mode, 4)
#define WGMMA_REGISTERS_24(mode) WGMMA_REGISTERS_16(mode), WGMMA_BIND(mode, 8)
#define WGMMA_REGISTERS_32(mode) WGMMA_REGISTERS_24(mode), WGMMA_BIND(mode, 12)
#define WGMMA_REGISTERS_40(mode) WGMMA_REGISTERS_32(mode), WGMMA_BIND(mode, 16)
#define WGMMA_REGISTERS_48(mode) WGMMA_REGISTERS_40(mode), WGMMA_BIND(mode, 20)
#define WGMMA_REGISTERS_56(mode) WGMMA_REGISTERS_48(mode), WGMMA_BIND(mode, 24)
#define WGMMA_REGISTERS_64(mode) WGMMA_REGISTERS_56(mode), WGMMA_BIND(mode, 28)
#define WGMMA_REGISTERS_72(mode) WGMMA_REGISTERS_64(mode), WGMMA_BIND(mode, 32)
#define WGMMA_REGISTERS_80(mode) WGMMA_REGISTERS_72(mode), WGMMA_BIND(mode, 36)
#define WGMMA_REGISTERS_88(mode) WGMMA_REGISTERS_80(mode), WGMMA_BIND(mode, 40)
#define WGMMA_REGISTERS_96(mode) WGMMA_REGISTERS_88(mode), WGMMA_BIND(mode, 44)
#define WGMMA_REGISTERS_104(mode) WGMMA_REGISTERS_96(mode), WGMMA_BIND(mode, 48)
#define WGMMA_REGISTERS_112(mode) WGMMA_REGISTERS_104(mode), WGMMA_BIND(mode, 52)
#define WGMMA_REGISTERS_120(mode) WGMMA_REGISTERS_112(mode), WGMMA_BIND(mode, 56)
#define WGMMA_REGISTERS_128(mode) WGMMA_REGISTERS_120(mode), WGMMA_BIND(mode, 60)
#define WGMMA_REGISTERS_136(mode) WGMMA_REGISTERS_128(mode), WGMMA_BIND(mode, 64)
#define WGMMA_REGISTERS_144(mode) WGMMA_REGISTERS_136(mode), WGMMA_BIND(mode, 68)
#define WGMMA_REGISTERS_152(mode) WGMMA_REGISTERS_144(mode), WGMMA_BIND(mode, 72)
#define WGMMA_REGISTERS_160(mode) WGMMA_REGISTERS_152(mode), WGMMA_BIND(mode, 76)
#define WGMMA_REGISTERS_168(mode) WGMMA_REGISTERS_160(mode), WGMMA_BIND(mode, 80)
#define WGMMA_REGISTERS_176(mode) WGMMA_REGISTERS_168(mode), WGMMA_BIND(mode, 84)
#define WGMMA_REGISTERS_184(mode) WGMMA_REGISTERS_176(mode), WGMMA_BIND(mode, 88)
#define WGMMA_REGISTERS_192(mode) WGMMA_REGISTERS_184(mode), WGMMA_BIND(mode, 92)
#define WGMMA_REGISTERS_200(mode) WGMMA_REGISTERS_192(mode), WGMMA_BIND(mode, 96)
#define WGMMA_REGISTERS_208(mode) WGMMA_REGISTERS_200(mode), WGMMA_BIND(mode, 100)
#define WGMMA_REGISTERS_216(mode) WGMMA_REGISTERS_208(mode), WGMMA_BIND(mode, 104)
#define WGMMA_REGISTERS_224(mode) WGMMA_REGISTERS_216(mode), WGMMA_BIND(mode, 108)
#define WGMMA_REGISTERS_232(mode) WGMMA_REGISTERS_224(mode), WGMMA_BIND(mode, 112)
#define WGMMA_REGISTERS_240(mode) WGMMA_REGISTERS_232(mode), WGMMA_BIND(mode, 116)
#define WGMMA_REGISTERS_248(mode) WGMMA_REGISTERS_240(mode), WGMMA_BIND(mode, 120)
#define WGMMA_REGISTERS_256(mode) WGMMA_REGISTERS_248(mode), WGMMA_BIND(mode, 124)

/* 16 of k: A [64, 16], B [columns, 16]. a and b are the operands after the accumulators, whose
 * numbers are passed in; so is how the accumulators take part: "=f" written, "+f" added to. */
#define WGMMA(columns, number_a, number_b, mode, add)                                              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 "                 \
                 "{" WGMMA_NAMES_##columns "}, %" #number_a ", %" #number_b ", " add               \
                 ", 1, 1, 0, 0;"                                                                   \
                 : WGMMA_REGISTERS_##columns(mode)                                                 \
                 : "l"(a), "l"(b))
#define WGMMA_CASE(columns, number_a, number_b)                                                    \
    if constexpr (COLUMNS == columns && FIRST)                                                     \
        WGMMA(columns, number_a, number_b, "=f", "0");                                             \
    else if constexpr (COLUMNS == columns)                                                         \
        WGMMA(columns, number_a, number_b, "+f", "1");
/* clang-format on */

/* "wgmma.mma_async": accum = A · Bᵀ + (FIRST ? 0 : accum). That FIRST is known to the compiler
 * matters: accumulators that may be read before they are written would live from tile to tile. */
template <int COLUMNS, bool FIRST>
__device__ __forceinline__ void wgmma(float (&accum)[COLUMNS / 2], uint64_t a, uint64_t b)
{
    static_assert(COLUMNS % 8 == 0 && (COLUMNS <= 192 ? COLUMNS >= 32 : COLUMNS % 16 == 0),
                  "no instruction of this width is listed");
    WGMMA_CASE(32, 16, 17)
    WGMMA_CASE(40, 20, 21)
    WGMMA_CASE(48, 24, 25)
    WGMMA_CASE(56, 28, 29)
    WGMMA_CASE(64, 32, 33)
    WGMMA_CASE(72, 36, 37)
    WGMMA_CASE(80, 40, 41)
    WGMMA_CASE(88, 44, 45)
    WGMMA_CASE(96, 48, 49)
    WGMMA_CASE(104, 52, 53)
    WGMMA_CASE(112, 56, 57)
    WGMMA_CASE(120, 60, 61)
    WGMMA_CASE(128, 64, 65)
    WGMMA_CASE(136, 68, 69)
    WGMMA_CASE(144, 72, 73)
    WGMMA_CASE(152, 76, 77)
    WGMMA_CASE(160, 80, 81)
    WGMMA_CASE(168, 84, 85)
    WGMMA_CASE(176, 88, 89)
    WGMMA_CASE(184, 92, 93)
    WGMMA_CASE(192, 96, 97)
    WGMMA_CASE(208, 104, 105)
    WGMMA_CASE(224, 112, 113)
    WGMMA_CASE(240, 120, 121)
    WGMMA_CASE(256, 128, 129)
}

#endif
