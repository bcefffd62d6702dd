/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that AMX replaces; signatures and axes are those of struct cpu_kernels. */
#ifndef IMBREX_OPS_CPU_KERNELS_AMX_H
#define IMBREX_OPS_CPU_KERNELS_AMX_H

#include <stdbool.h>
#include <stdint.h>

#include "ops/cpu/cpu_kernels.h"

/* Asks the system for this process to use the tile registers: once is enough, for threads that run
 * already and for those to come. False if it refuses. */
bool amx_request_tiles(void);

void amx_int8_linear(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                     int64_t end);
void amx_int8_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                          int64_t begin, int64_t end);

void amx_bf16_linear(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                     int64_t end);
void amx_bf16_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                          int64_t begin, int64_t end);
void amx_bf16_pack(const float *a, int64_t a_stride, int32_t num_tokens, int32_t num_features,
                   unsigned char *packed);

#endif
