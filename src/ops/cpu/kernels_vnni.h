/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that AVX-512 VNNI replace; signatures and axes are those of
 * struct cpu_kernels. */
#ifndef IMBREX_OPS_CPU_KERNELS_VNNI_H
#define IMBREX_OPS_CPU_KERNELS_VNNI_H

#include <stdint.h>

#include "ops/cpu/cpu_kernels.h"
#include "ops/ops.h"

void vnni_linear(const struct linear_params *params, const struct cpu_work *work, int64_t begin,
                 int64_t end);
void vnni_gemm_swiglu(const struct gemm_swiglu_params *params, const struct cpu_work *work,
                      int64_t begin, int64_t end);

#endif
