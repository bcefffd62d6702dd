/* SPDX-License-Identifier: Apache-2.0 */
/* The GPU of a program that checks kernels: as the library opens it, and as a benchmark does. */
#ifndef IMBREX_TESTS_GPU_GPU_SESSION_H
#define IMBREX_TESTS_GPU_GPU_SESSION_H

#include "bench/cuda/gpu.h"
#include "imbrex_ops.h"
#include "tests/gpu/gpu_check.h"

extern struct imbrex_device *device;
extern struct gpu gpu;

/* Opens both. False, with the exit code, where there is no GPU. */
bool check_begin(int *exit_code);
/* The copy is over when this returns: cuMemcpyHtoD alone may still be writing then, and the stream
 * of the kernels does not wait for it. */
bool copied_to_gpu(CUdeviceptr to, const void *from, size_t num_bytes);
/* Closes both and prints the counts. Returns the exit code. */
int check_end(void);

#endif
