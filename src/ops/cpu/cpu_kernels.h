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
    /* For bf16 weights, by kernels->pack_bf16: groups of tokens, the bytes of each as many as those
     * of its tokens in whole tiles; 64-byte aligned. NULL: not needed. */
    unsigned char *bf16_groups;
};

#define BF16_GROUP_TOKENS 16 /* of every group but the last */
#define BF16_TILE_FEATURES 32

/* Memory of one thread for the length of one call, 64-byte aligned, of any contents. */
#define CPU_SCRATCH_BYTES (1 << 20)

/* How linear and gemm_swiglu may read weights for few rows, with the same bits: see
 * ops/cpu/dot_few.h. */
enum few_way { FEW_WAY_STREAMS, FEW_WAY_ORDERED, FEW_WAY_COUNT };

/* What a piece of a loop gets beside its params. */
struct cpu_work {
    const struct quant_rows *quant_rows; /* linear and gemm_swiglu; else NULL */
    enum few_way few_way;                /* linear and gemm_swiglu, if there are several */
    unsigned char *scratch;              /* [CPU_SCRATCH_BYTES] */
};

struct attention_parts; /* attention_split.h */

struct cpu_kernels {
    const char *name;
    void (*embedding)(const struct embedding_params *params, int64_t begin,
                      int64_t end);                                                   /* tokens */
    void (*rmsnorm)(const struct rmsnorm_params *params, int64_t begin, int64_t end); /* tokens */
    void (*linear)(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                   int64_t end); /* out_features */
    void (*rope_kv)(const struct rope_kv_params *params, int64_t begin, int64_t end); /* tokens */
    void (*attention)(const struct attention_params *params, const struct cpu_work *work,
                      int64_t begin, int64_t end); /* kv head * num_tokens + token */
    /* The same in two loops, of which the first has more pieces (attention_split.h). Both are NULL
     * where the keys of a row are not split. */
    void (*attention_split)(const struct attention_params *params,
                            const struct attention_parts *parts, const struct cpu_work *work,
                            int64_t begin, int64_t end); /* parts */
    void (*attention_merge)(const struct attention_params *params,
                            const struct attention_parts *parts, const struct cpu_work *work,
                            int64_t begin, int64_t end); /* token * num_heads + head */
    void (*gemm_swiglu)(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                        int64_t begin, int64_t end); /* intermediate_size */
    /* linear and gemm_swiglu go by work->few_way: of plain weights, and for one row of quantised
     * ones. */
    bool has_few_ways, has_quant_ways;
    /* `count` activations into blocks of a form, as quant_quantize_activations defines. */
    void (*quantize)(enum activation_form form, const float *a, void *blocks, int64_t count);
    /* A group of activations rounded to bf16, zeros up to a multiple of BF16_TILE_FEATURES, in the
     * order that the path's kernels take. NULL: bf16 weights meet fp32 activations. */
    void (*pack_bf16)(const float *a, int64_t a_stride, int32_t num_tokens, int32_t num_features,
                      unsigned char *packed);
    /* One row of sampling, num_ids >= 1. best_id has the largest logit, and is the lowest such id;
     * it is any id if there is a NaN. False if a logit is NaN or infinite. */
    bool (*scan_logits)(const float *logits, int32_t num_ids, int32_t *best_id);
    /* Of one row too: the sum of exp(logit - max_logit), max_logit the largest. Relative error
     * below 1e-12. */
    double (*sum_exp)(const float *logits, int32_t num_ids, float max_logit);
};

/* Fills every entry with the reference. */
void ref_kernels_fill(struct cpu_kernels *kernels);
/* Each replaces the entries that its instructions speed up. Present on x86-64 only; the caller has
 * checked the CPU. */
void avx2_kernels_fill(struct cpu_kernels *kernels);
void avx512_kernels_fill(struct cpu_kernels *kernels);
void vnni_kernels_fill(struct cpu_kernels *kernels);
void amx_int8_kernels_fill(struct cpu_kernels *kernels);
void avx512_bf16_kernels_fill(struct cpu_kernels *kernels);
void amx_bf16_kernels_fill(struct cpu_kernels *kernels);

/* The kernel paths, slowest first: what each is called and the features it needs, those of the
 * paths below it included. The last ones round activations to bf16. */
struct cpu_path {
    const char *name;
    uint32_t features;
};
#define CPU_NUM_PATHS 7
#define CPU_NUM_FP32_PATHS (CPU_NUM_PATHS - 2) /* all but those that round */
extern const struct cpu_path cpu_paths[CPU_NUM_PATHS];

/* Reference, then everything that both the machine and the mask allow, in ascending order. */
void cpu_kernels_select(uint32_t cpu_features, struct cpu_kernels *kernels);
/* The bits of `wanted`, of enum imbrex_cpu_features, that this machine has and whose registers the
 * system saves. With a bit of AMX among them the system is asked for the tile registers, which
 * makes the signal frames of this process larger. */
uint32_t cpu_features_detect(uint32_t wanted);

#endif
