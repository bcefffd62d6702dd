/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that AVX-512 BF16 replaces; signatures and axes are those of struct cpu_kernels. */
#ifndef IMBREX_OPS_CPU_KERNELS_BF16_H
#define IMBREX_OPS_CPU_KERNELS_BF16_H

#include <stdint.h>

#include "ops/cpu/cpu_kernels.h"

void avx512_bf16_linear(const struct linear_params *params, const struct cpu_work *work,
                        int64_t begin, int64_t end);
void avx512_bf16_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                             int64_t begin, int64_t end);
void avx512_bf16_pack(const float *a, int64_t a_stride, int32_t num_tokens, int32_t num_features,
                      unsigned char *packed);

#endif
