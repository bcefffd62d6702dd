/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/ref/ref_kernels.h"

#include "ops/cpu/cpu_kernels.h"

void ref_kernels_fill(struct cpu_kernels *kernels)
{
    *kernels = (struct cpu_kernels){
        .name = "ref",
        .embedding = ref_embedding,
        .rmsnorm = ref_rmsnorm,
        .linear = ref_linear,
        .rope_kv = ref_rope_kv,
        .attention = ref_attention,
        .gemm_swiglu = ref_gemm_swiglu,
        .quantize = quant_quantize_activations,
        .scan_logits = ref_scan_logits,
        .sum_exp = ref_sum_exp,
    };
}
