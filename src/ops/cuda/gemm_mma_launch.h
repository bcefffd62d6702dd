/* SPDX-License-Identifier: Apache-2.0 */
/* Launching the portable matrix kernels. */
#ifndef IMBREX_OPS_CUDA_GEMM_MMA_LAUNCH_H
#define IMBREX_OPS_CUDA_GEMM_MMA_LAUNCH_H

#include "ops/cuda/cuda_device.h"
#include "ops/cuda/kernels/gemm_mma_params.h"

/* A plan of a portable kernel that tile_check took for the params' sizes; group_m is the plan's.
 * The device has been entered, the caller has checked the rest. */
enum imbrex_status gemm_mma_launch(struct imbrex_device *device, const struct tile_plan *plan,
                                   const struct gemm_mma_params *params, CUstream stream,
                                   struct imbrex_error *err);

#endif
