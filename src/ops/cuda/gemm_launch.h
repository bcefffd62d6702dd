/* SPDX-License-Identifier: Apache-2.0 */
/* What the public functions of the matrix kernels share. */
#ifndef IMBREX_OPS_CUDA_GEMM_LAUNCH_H
#define IMBREX_OPS_CUDA_GEMM_LAUNCH_H

#include "imbrex_ops.h"
#include "ops/cuda/cuda_device.h"
#include "ops/cuda/tile_choice.h"

struct tile_machine cuda_device_machine(const struct imbrex_device *device);

/* The plan among the kernels [begin, end): a tuned one, else one that the library was measured
 * with, else that of the cost model. */
enum imbrex_status cuda_device_choose(const struct imbrex_device *device,
                                      const struct tile_problem *problem, int32_t begin,
                                      int32_t end, struct tile_plan *plan,
                                      struct imbrex_error *err);

/* Public numbers to those of the table and back. INVALID_ARGUMENT for an op or variant that does
 * not exist. */
enum imbrex_status kernel_shape_problem(const struct imbrex_kernel_shape *shape,
                                        struct tile_problem *problem, struct imbrex_error *err);
enum imbrex_status kernel_plan_tile(enum imbrex_kernel_op op, const struct imbrex_kernel_plan *plan,
                                    struct tile_plan *tile, struct imbrex_error *err);

#endif
