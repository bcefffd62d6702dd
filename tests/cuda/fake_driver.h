/* SPDX-License-Identifier: Apache-2.0 */
/* A driver without a GPU: counts what is taken and given back, fails the call it is told to, and
 * keeps the last launch. One state, since the driver's calls have no argument for it. */
#ifndef IMBREX_TESTS_CUDA_FAKE_DRIVER_H
#define IMBREX_TESTS_CUDA_FAKE_DRIVER_H

#include <stdbool.h>
#include <stdint.h>

#include "ops/cuda/driver.h"
#include "ops/cuda/kernels/gemm_swiglu_params.h"

#define FAKE_MAX_RANGES 8

struct fake_range {
    uint64_t base, num_bytes;
    unsigned int memory_type;
    int device_idx;
};

struct fake_driver {
    /* What the machine is. */
    int version, num_gpus, compute_major, compute_minor, num_sms, max_shared_bytes;
    int host_node;
    int reaches_host;    /* whether the GPU may use the host's addresses of registered memory */
    size_t params_bytes; /* that every kernel reports */
    CUresult init_result;
    struct fake_range ranges[FAKE_MAX_RANGES]; /* memory that the driver knows */
    int num_ranges;
    int stream_device; /* of every stream */
    bool is_capturing; /* so is every stream */

    /* Call number fail_at, from 1 on, fails with fail_result and does nothing. */
    int fail_at;
    CUresult fail_result;

    /* What happened. */
    int num_calls;
    const char *failed_call; /* NULL: none did */
    int num_retained, num_pushed, num_libraries, num_loads, num_encoded, num_launches;
    /* Given and not given back. */
    int num_allocated, num_registered, num_streams, num_events, num_graphs, num_execs;
    int num_copies, num_synchronized, num_elapsed;
    size_t max_allocated; /* bytes; 0: no limit */
    CUstreamCaptureMode capture_mode;
    CUlaunchConfig config; /* of the last launch; its attrs point to `attributes` */
    CUlaunchAttribute attributes[4];
    struct gemm_tile_params params;
    const char *kernel; /* name of the one launched last */
    /* Of the one with which num_launches became 1. */
    const char *first_kernel;
    uint32_t first_shared_bytes;
};

extern struct fake_driver fake;

/* One Hopper GPU with 132 SMs and no memory. */
void fake_reset(void);
void fake_add_range(const void *base, uint64_t num_bytes, unsigned int memory_type, int device_idx);
/* The table of fake calls. */
struct driver fake_table(void);

#endif
