/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that AVX2 + FMA + F16C replace; signatures and axes are those of struct cpu_kernels.
 * Embedding stays with the reference: it moves a few kilobytes a token beside the megabytes of the
 * linear ops. */
#ifndef IMBREX_OPS_CPU_KERNELS_AVX2_H
#define IMBREX_OPS_CPU_KERNELS_AVX2_H

#include <stdint.h>

#include "ops/cpu/cpu_kernels.h"
#include "ops/ops.h"

void avx2_rmsnorm(const struct rmsnorm_params *params, int64_t begin, int64_t end);
void avx2_linear(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                 int64_t end);
void avx2_rope_kv(const struct rope_kv_params *params, int64_t begin, int64_t end);
void avx2_attention(const struct attention_params *params, const struct cpu_work *work,
                    int64_t begin, int64_t end);
void avx2_attention_split(const struct attention_params *params,
                          const struct attention_parts *parts, const struct cpu_work *work,
                          int64_t begin, int64_t end);
void avx2_attention_merge(const struct attention_params *params,
                          const struct attention_parts *parts, const struct cpu_work *work,
                          int64_t begin, int64_t end);
void avx2_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                      int64_t begin, int64_t end);
/* Quantised weights: what the two ops above call for these. gate and up may differ, and one of them
 * may be plain. */
void avx2_quant_linear(const struct linear_params *params, const struct cpu_work *work,
                       int64_t begin, int64_t end);
void avx2_quant_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                            int64_t begin, int64_t end);
/* As ref_kv_store, with its bits, but for which NaN a NaN becomes. */
void avx2_kv_store(enum kv_dtype dtype, const float *x, int32_t head_dim, struct kv_row row);
void avx2_quantize(enum activation_form form, const float *a, void *blocks, int64_t count);
bool avx2_scan_logits(const float *logits, int32_t num_ids, int32_t *best_id);
double avx2_sum_exp(const float *logits, int32_t num_ids, float max_logit);

#endif
