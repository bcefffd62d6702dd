/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/kernels_vnni.h"

#if defined(__x86_64__)
void vnni_kernels_fill(struct cpu_kernels *kernels)
{
    kernels->name = "vnni";
    kernels->has_quant_ways = true;
    kernels->linear = vnni_linear;
    kernels->gemm_swiglu = vnni_gemm_swiglu;
}
#endif
