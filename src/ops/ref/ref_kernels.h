/* SPDX-License-Identifier: Apache-2.0 */
/* The reference kernels: plain C that says what each op computes. Signatures and axes are those of
 * struct cpu_kernels; faster kernels fall back on these where they have no code of their own. */
#ifndef IMBREX_OPS_REF_REF_KERNELS_H
#define IMBREX_OPS_REF_REF_KERNELS_H

#include <stdint.h>

#include "ops/cpu/cpu_kernels.h"
#include "ops/ops.h"
#include "ops/sample.h"

void ref_embedding(const struct embedding_params *params, int64_t begin, int64_t end);
void ref_rmsnorm(const struct rmsnorm_params *params, int64_t begin, int64_t end);
void ref_linear(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                int64_t end);
void ref_rope_kv(const struct rope_kv_params *params, int64_t begin, int64_t end);
void ref_attention(const struct attention_params *params, const struct cpu_work *work,
                   int64_t begin, int64_t end);
void ref_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                     int64_t begin, int64_t end);

/* One row of the KV cache, as kv_dtype.h defines it; x: [head_dim]. */
void ref_kv_store(enum kv_dtype dtype, const float *x, int32_t head_dim, struct kv_row row);
void ref_kv_load(enum kv_dtype dtype, struct kv_row row, int32_t head_dim, float *x);

bool ref_scan_logits(const float *logits, int32_t num_ids, int32_t *best_id);
double ref_sum_exp(const float *logits, int32_t num_ids, float max_logit);

/* Rows [begin, end) of ops_sample, whose long loops are kernels of the table. scratch is one
 * thread's: [ref_sample_scratch_bytes], 64-byte aligned, of any contents. */
void ref_sample(const struct sample_params *params, const struct cpu_kernels *kernels,
                int64_t begin, int64_t end, void *scratch);
/* A multiple of 64; SIZE_MAX if it does not fit. */
size_t ref_sample_scratch_bytes(int32_t vocab_size);

/* Sum over k of a[k] * weight[row_idx, k], k in [0, row_elements). Four partial sums, k modulo 4,
 * added as (0 + 1) + (2 + 3). */
float ref_dot(const float *a, struct weight_view weight, int64_t row_idx, int32_t row_elements);

/* The same for row `token` of activations a [num_tokens, row_elements] and a weight of any dtype: a
 * quantised one meets the row's blocks instead (quant_dot). */
float ref_product(const float *a, int64_t a_stride, const struct quant_rows *quant_rows,
                  int64_t token, struct weight_view weight, int64_t row_idx, int32_t row_elements);

#endif
