/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/kernels_amx.h"

#if defined(__x86_64__)

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

bool amx_request_tiles(void)
{
#if defined(__linux__) && defined(SYS_arch_prctl)
    /* Source: Documentation/arch/x86/xstate.rst of Linux. It refuses where a thread's alternate
     * signal stack is too small for the larger frames. */
    const long request_permission = 0x1023, tile_contents = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_contents) == 0;
#else
    return false;
#endif
}

void amx_int8_kernels_fill(struct cpu_kernels *kernels)
{
    kernels->name = "amx-int8";
    kernels->linear = amx_int8_linear;
    kernels->gemm_swiglu = amx_int8_gemm_swiglu;
}

void amx_bf16_kernels_fill(struct cpu_kernels *kernels)
{
    kernels->name = "amx-bf16";
    kernels->linear = amx_bf16_linear;
    kernels->gemm_swiglu = amx_bf16_gemm_swiglu;
    kernels->pack_bf16 = amx_bf16_pack;
}

#endif
