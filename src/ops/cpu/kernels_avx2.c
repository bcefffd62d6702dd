/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/kernels_avx2.h"

#include "ops/cpu/cpu_kernels.h"

#if defined(__x86_64__)
void avx2_kernels_fill(struct cpu_kernels *kernels)
{
    kernels->name = "avx2";
    kernels->rmsnorm = avx2_rmsnorm;
    kernels->linear = avx2_linear;
    kernels->rope_kv = avx2_rope_kv;
    kernels->attention = avx2_attention;
    kernels->attention_split = avx2_attention_split;
    kernels->attention_merge = avx2_attention_merge;
    kernels->gemm_swiglu = avx2_gemm_swiglu;
    kernels->has_few_ways = true;
    kernels->quantize = avx2_quantize;
    kernels->scan_logits = avx2_scan_logits;
    kernels->sum_exp = avx2_sum_exp;
}
#endif
