/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/gemm_mma_launch.h"

static uint32_t num_parts(int32_t count, int32_t part)
{
    return (uint32_t)((count - 1) / part + 1);
}

enum imbrex_status gemm_mma_launch(struct imbrex_device *device, const struct tile_plan *plan,
                                   const struct gemm_mma_params *params, CUstream stream,
                                   struct imbrex_error *err)
{
    const struct kernel_variant *kernel = kernel_table_at(plan->kernel_idx);
    struct gemm_mma_params told = *params;
    CUfunction function = NULL;

    told.group_m = plan->group_m;
    TRY(cuda_device_function(device, plan->kernel_idx, &function, err));
    CUlaunchConfig config = {
        .gridDimX = num_parts(told.m, kernel->block_m) * num_parts(told.n, tile_columns(kernel)),
        .gridDimY = 1,
        .gridDimZ = 1,
        .blockDimX = (unsigned int)kernel->num_threads,
        .blockDimY = 1,
        .blockDimZ = 1,
        .sharedMemBytes = (unsigned int)kernel->shared_bytes,
        .hStream = stream,
    };
    void *arguments[] = {&told};
    return DRIVER_CALL(&device->driver, err, launch_kernel_ex, &config, function, arguments, NULL);
}
