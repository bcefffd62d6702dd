/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/kernels_avx512.h"

#include "ops/cpu/cpu_kernels.h"

#if defined(__x86_64__)
void avx512_kernels_fill(struct cpu_kernels *kernels)
{
    kernels->name = "avx512";
    kernels->linear = avx512_linear;
    kernels->gemm_swiglu = avx512_gemm_swiglu;
    kernels->attention = avx512_attention;
    kernels->attention_split = avx512_attention_split;
    kernels->attention_merge = avx512_attention_merge;
    kernels->sum_exp = avx512_sum_exp;
}
#endif
