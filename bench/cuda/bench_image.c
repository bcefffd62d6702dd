/* SPDX-License-Identifier: Apache-2.0 */
/* Embedded as the library embeds its own kernels, see src/ops/cuda/kernel_image.c. */
#include "bench/cuda/bench_image.h"

__asm__(".pushsection .rodata, \"a\", %progbits\n"
        ".balign 64\n"
        ".globl imbrex_bench_kernels\n"
        ".hidden imbrex_bench_kernels\n"
        ".type imbrex_bench_kernels, %object\n"
        "imbrex_bench_kernels:\n"
        ".incbin \"" KERNEL_FOLDER "/bench_kernels.fatbin\"\n"
        ".size imbrex_bench_kernels, . - imbrex_bench_kernels\n"
        ".balign 64\n"
        ".globl imbrex_bench_gate_first\n"
        ".hidden imbrex_bench_gate_first\n"
        "imbrex_bench_gate_first:\n"
        ".incbin \"" KERNEL_FOLDER "/gate_first_kernels.fatbin\"\n"
        ".size imbrex_bench_gate_first, . - imbrex_bench_gate_first\n"
        ".globl imbrex_bench_commit\n"
        ".hidden imbrex_bench_commit\n"
        "imbrex_bench_commit:\n"
        ".incbin \"" KERNEL_FOLDER "/commit\"\n"
        ".byte 0\n"
        ".popsection\n");
extern const char imbrex_bench_commit[] __attribute__((visibility("hidden")));
extern const unsigned char imbrex_bench_gate_first[] __attribute__((visibility("hidden")));
extern const unsigned char imbrex_bench_kernels[] __attribute__((visibility("hidden")));

const void *bench_image(void)
{
    return imbrex_bench_kernels;
}

const void *bench_gate_first_image(void)
{
    return imbrex_bench_gate_first;
}

const char *bench_commit(void)
{
    return imbrex_bench_commit;
}
