/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernel is told that copies between device memory and host memory that the device
 * reaches. Compiled by gcc and by nvcc. */
#ifndef IMBREX_OPS_CUDA_KERNELS_HOST_COPY_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_HOST_COPY_PARAMS_H

#include <stdint.h>

/* d = a, a thread each 16 bytes; both begin at multiples of 16. */
#define HOST_COPY_THREADS 256
#define HOST_COPY_THREAD_BYTES 16
struct host_copy_kernel_params {
    void *d;
    const void *a;
    int64_t num_bytes;
};

#define HOST_COPY_KERNELS(X) X(host_copy, host_copy, struct host_copy_kernel_params, 0)

#endif
