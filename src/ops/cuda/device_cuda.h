/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU as a device of ops/device.h, and what the cuda backend needs of it beyond that. */
#ifndef IMBREX_OPS_CUDA_DEVICE_CUDA_H
#define IMBREX_OPS_CUDA_DEVICE_CUDA_H

#include "ops/cuda/cuda_device.h"
#include "ops/device.h"

/* device_cuda_create with a table of calls, which the device takes over on success only. */
enum imbrex_status device_cuda_create_on(const struct driver *driver, int32_t device_idx,
                                         struct device **device, struct imbrex_error *err);

/* The kernels of a device that device_cuda_create made: a view. */
struct imbrex_device *device_cuda_kernels(struct device *device);

#endif
