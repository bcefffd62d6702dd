/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU that was opened: the driver's calls, its primary context, the kernels loaded so far and the
 * descriptors of the matrices they were launched on. One thread at a time. */
#ifndef IMBREX_OPS_CUDA_CUDA_DEVICE_H
#define IMBREX_OPS_CUDA_CUDA_DEVICE_H

#include "imbrex_ops.h"
#include "ops/cuda/driver.h"
#include "ops/cuda/kernel_image.h"
#include "ops/cuda/kernel_table.h"
#include "ops/cuda/op_kernels.h"
#include "ops/cuda/tensor_map.h"
#include "ops/cuda/tile_choice.h"
#include "ops/cuda/tune_table.h"

/* What was chosen for a problem, so that a launch of the same shape does not choose again. */
struct tile_choice_entry {
    struct tile_problem problem; /* m 0: free */
    bool is_portable;            /* the device was when this was chosen */
    struct tile_plan plan;
};
#define NUM_TILE_CHOICES 256

struct imbrex_device {
    struct driver driver;
    CUdevice gpu;
    CUcontext context; /* primary, retained */
    struct imbrex_device_info description;
    int32_t max_shared_bytes; /* of one thread block */
    bool overlap_launches;
    /* Kernels of the portable images alone: the GPU is no Hopper, or its own are not wanted. */
    bool only_portable;
    /* What launches take now: a backend may have ablated Hopper's kernels. Both kinds may have been
     * loaded. */
    bool is_portable;
    struct tensor_map_cache maps;
    struct tile_choice_entry choices[NUM_TILE_CHOICES]; /* by a hash of the problem */
    struct imbrex_tune_table *tuned;                    /* NULL: no plans that were tuned */
    char *tuned_path;                                   /* of its file */
    /* [0] for Hopper, [1] portable; NULL: not loaded yet */
    CUlibrary libraries[2][KERNEL_IMAGE_COUNT];
    CUfunction *functions;                           /* [kernel_table_count()], likewise */
    CUfunction op_functions[2][OP_KERNEL_COUNT + 1]; /* likewise, by kind as the libraries */
    struct imbrex_error work_error; /* what the last work of a backend that failed said */
};

/* imbrex_device_open with a table of calls, which the device takes over on success only. */
enum imbrex_status cuda_device_create(const struct driver *driver, int32_t device_idx,
                                      const struct imbrex_device_options *options,
                                      struct imbrex_device **device, struct imbrex_error *err);

/* Makes the device's context the calling thread's; every enter that was OK is followed by a leave,
 * which passes on `status`, or says what went wrong in leaving. */
enum imbrex_status cuda_device_enter(struct imbrex_device *device, struct imbrex_error *err);
enum imbrex_status cuda_device_leave(struct imbrex_device *device, enum imbrex_status status,
                                     struct imbrex_error *err);

/* The function of kernel number kernel_idx of the table, loaded on first use and checked against
 * the table: INTERNAL if the image has no such kernel or its params have another size. The device
 * has been entered. May be called while a stream is being captured. */
enum imbrex_status cuda_device_function(struct imbrex_device *device, int32_t kernel_idx,
                                        CUfunction *function, struct imbrex_error *err);
/* The same of a kernel of op_kernels.h, of the kind that is_portable says; UNSUPPORTED if it is
 * made for the other one alone. */
enum imbrex_status cuda_device_op_function(struct imbrex_device *device, enum op_kernel kernel,
                                           CUfunction *function, struct imbrex_error *err);

#endif
