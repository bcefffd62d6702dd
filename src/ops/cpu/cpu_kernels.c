/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/cpu_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(__x86_64__)
/* XCR0: the register states that the system saves on a thread switch. */
static uint64_t read_xcr0(void)
{
    uint32_t low, high;
    __asm__ __volatile__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

uint32_t cpu_features_detect(void)
{
    const unsigned leaf_1_bits = bit_FMA | bit_F16C | bit_AVX | bit_OSXSAVE;
    const uint64_t xmm_and_ymm = 0x6;
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & leaf_1_bits) != leaf_1_bits ||
        (read_xcr0() & xmm_and_ymm) != xmm_and_ymm) {
        return 0;
    }
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (ebx & bit_AVX2) == 0) {
        return 0;
    }
    return IMBREX_CPU_AVX2;
}
#else
uint32_t cpu_features_detect(void)
{
    return 0;
}
#endif

void cpu_kernels_select(uint32_t cpu_features, struct cpu_kernels *kernels)
{
    ref_kernels_fill(kernels);
    cpu_features &= cpu_features_detect();
#if defined(__x86_64__)
    if ((cpu_features & IMBREX_CPU_AVX2) != 0) {
        avx2_kernels_fill(kernels);
    }
#endif
}
