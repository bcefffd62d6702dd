/* SPDX-License-Identifier: Apache-2.0 */
/* The table of CPU kernels behind ops.h. Each entry works on [begin, end) of its op's parallel
 * axis, named beside it, and touches no output outside of it. */
#ifndef IMBREX_OPS_CPU_CPU_KERNELS_H
#define IMBREX_OPS_CPU_CPU_KERNELS_H

#include <stdint.h>

#include "ops/ops.h"
#include "ops/quant.h"

/* The activations of an op call in the forms that its weights take. */
struct quant_rows {
    unsigned char *rows[ACTIVATION_FORM_COUNT]; /* [num_tokens]; NULL: not needed */
    size_t row_bytes[ACTIVATION_FORM_COUNT];
};

struct cpu_kernels {
    const char *name;
    void (*embedding)(const struct embedding_params *params, int64_t begin,
                      int64_t end);                                                   /* tokens */
    void (*rmsnorm)(const struct rmsnorm_params *params, int64_t begin, int64_t end); /* tokens */
    void (*linear)(const struct linear_params *params, const struct quant_rows *quant_rows,
                   int64_t begin, int64_t end); /* out_features */
    void (*rope_kv)(const struct rope_kv_params *params, int64_t begin, int64_t end); /* tokens */
    void (*attention)(const struct attention_params *params, int64_t begin,
                      int64_t end); /* token * num_kv_heads + kv head */
    void (*gemm_swiglu)(const struct gemm_swiglu_params *params,
                        const struct quant_rows *quant_rows, int64_t begin,
                        int64_t end); /* intermediate_size */
    /* One row of sampling, num_ids >= 1. best_id has the largest logit, and is the lowest such id;
     * it is any id if there is a NaN. False if a logit is NaN or infinite. */
    bool (*scan_logits)(const float *logits, int32_t num_ids, int32_t *best_id);
    /* Of one row too: the sum of exp(logit - max_logit), max_logit the largest. Relative error
     * below 1e-12. */
    double (*sum_exp)(const float *logits, int32_t num_ids, float max_logit);
};

/* Fills every entry with the reference. */
void ref_kernels_fill(struct cpu_kernels *kernels);
/* Replaces the entries that AVX2 + FMA + F16C speed up. Present on x86-64 only; the caller has
 * checked the CPU. */
void avx2_kernels_fill(struct cpu_kernels *kernels);

/* Reference, then everything that both the machine and the mask allow, in ascending order. */
void cpu_kernels_select(uint32_t cpu_features, struct cpu_kernels *kernels);
/* Bits of enum imbrex_cpu_features that this machine has (and whose registers the system saves). */
uint32_t cpu_features_detect(void);

#endif
