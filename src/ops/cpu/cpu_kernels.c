/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/cpu_kernels.h"

#include <stddef.h>

#if defined(__x86_64__)
#include <cpuid.h>

#include "ops/cpu/kernels_amx.h"
#endif

#define VNNI_FEATURES (IMBREX_CPU_AVX2 | IMBREX_CPU_AVX512 | IMBREX_CPU_AVX512_VNNI)
#define AMX_FEATURES (IMBREX_CPU_AMX_INT8 | IMBREX_CPU_AMX_BF16)

const struct cpu_path cpu_paths[CPU_NUM_PATHS] = {
    {"ref", 0},
    {"avx2", IMBREX_CPU_AVX2},
    {"avx512", IMBREX_CPU_AVX2 | IMBREX_CPU_AVX512},
    {"vnni", VNNI_FEATURES},
    {"amx-int8", VNNI_FEATURES | IMBREX_CPU_AMX_INT8},
    {"avx512-bf16", VNNI_FEATURES | IMBREX_CPU_AVX512_BF16},
    {"amx-bf16", VNNI_FEATURES | IMBREX_CPU_AMX_BF16},
};

#if defined(__x86_64__)
/* XCR0: the register states that the system saves on a thread switch. */
static uint64_t read_xcr0(void)
{
    uint32_t low, high;
    __asm__ __volatile__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* The bits of AMX, on a CPU that has AVX-512. Bits of leaf 7 by their numbers: compilers name them
 * differently. */
static uint32_t detect_amx(unsigned leaf_7_edx, bool has_avx512_bf16)
{
    const uint64_t tile_shapes_and_contents = 0x60000;
    const unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24, amx_int8 = 1u << 25;
    uint32_t features = 0;
    if ((leaf_7_edx & amx_tile) == 0 ||
        (read_xcr0() & tile_shapes_and_contents) != tile_shapes_and_contents) {
        return 0;
    }
    features |= (leaf_7_edx & amx_int8) != 0 ? IMBREX_CPU_AMX_INT8 : 0;
    /* Activations are rounded by AVX-512's conversion. */
    if ((leaf_7_edx & amx_bf16) != 0 && has_avx512_bf16) {
        features |= IMBREX_CPU_AMX_BF16;
    }
    return features;
}

static uint32_t detect_all(void)
{
    const unsigned leaf_1_bits = bit_FMA | bit_F16C | bit_AVX | bit_OSXSAVE;
    const uint64_t xmm_and_ymm = 0x6, masks_and_zmm = 0xe0;
    const unsigned avx512_bf16 = 1u << 5; /* leaf 7, 1 */
    const unsigned avx512_bits = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    uint32_t features = IMBREX_CPU_AVX2;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & leaf_1_bits) != leaf_1_bits ||
        (read_xcr0() & xmm_and_ymm) != xmm_and_ymm) {
        return 0;
    }
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (ebx & bit_AVX2) == 0) {
        return 0;
    }
    if ((ebx & avx512_bits) == avx512_bits && (read_xcr0() & masks_and_zmm) == masks_and_zmm) {
        features |= IMBREX_CPU_AVX512;
        features |= (ecx & bit_AVX512VNNI) != 0 ? IMBREX_CPU_AVX512_VNNI : 0;
        unsigned leaf_7_edx = edx;
        bool has_bf16 = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & avx512_bf16) != 0;
        features |= has_bf16 ? IMBREX_CPU_AVX512_BF16 : 0;
        features |= detect_amx(leaf_7_edx, has_bf16);
    }
    return features;
}

uint32_t cpu_features_detect(uint32_t wanted)
{
    uint32_t features = wanted & detect_all();
    if ((features & AMX_FEATURES) != 0 && !amx_request_tiles()) {
        features &= ~(uint32_t)AMX_FEATURES;
    }
    return features;
}
#else
uint32_t cpu_features_detect(uint32_t wanted)
{
    (void)wanted;
    return 0;
}
#endif

void cpu_kernels_select(uint32_t cpu_features, struct cpu_kernels *kernels)
{
    ref_kernels_fill(kernels);
    cpu_features = cpu_features_detect(cpu_features);
#if defined(__x86_64__)
    void (*const fills[CPU_NUM_PATHS])(struct cpu_kernels *) = {NULL,
                                                                avx2_kernels_fill,
                                                                avx512_kernels_fill,
                                                                vnni_kernels_fill,
                                                                amx_int8_kernels_fill,
                                                                avx512_bf16_kernels_fill,
                                                                amx_bf16_kernels_fill};
    for (int path = 1; path < CPU_NUM_PATHS; path++) {
        if ((cpu_features & cpu_paths[path].features) == cpu_paths[path].features) {
            fills[path](kernels);
        }
    }
#endif
}
