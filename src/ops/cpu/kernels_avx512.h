/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that AVX-512 F, BW, DQ and VL replace; signatures and axes are those of
 * struct cpu_kernels. */
#ifndef IMBREX_OPS_CPU_KERNELS_AVX512_H
#define IMBREX_OPS_CPU_KERNELS_AVX512_H

#include <stdint.h>

#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/dot_job.h"
#include "ops/ops.h"

void avx512_linear(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                   int64_t end);
void avx512_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                        int64_t begin, int64_t end);
void avx512_attention(const struct attention_params *params, const struct cpu_work *work,
                      int64_t begin, int64_t end);
void avx512_attention_split(const struct attention_params *params,
                            const struct attention_parts *parts, const struct cpu_work *work,
                            int64_t begin, int64_t end);
void avx512_attention_merge(const struct attention_params *params,
                            const struct attention_parts *parts, const struct cpu_work *work,
                            int64_t begin, int64_t end);
double avx512_sum_exp(const float *logits, int32_t num_ids, float max_logit);

/* The same for plain weights with activations and a walk of the caller's. */
void avx512_linear_by(dot_walk_fn *walk, const void *a, int64_t a_stride_bytes,
                      const struct linear_params *params, const struct cpu_work *work,
                      int64_t begin, int64_t end);
void avx512_gemm_swiglu_by(dot_walk_fn *walk, const void *a, int64_t a_stride_bytes,
                           const struct gemm_swiglu_params *params, const struct cpu_work *work,
                           int64_t begin, int64_t end);

#endif
