/* SPDX-License-Identifier: Apache-2.0 */
/* A small copy over the bus by the SMs: it does not wait for the large ones that the copy engines
 * have before it. Launched without programmatic overlap, so it needs no waiting of its own. */
#include "ops/cuda/kernels/host_copy_params.h"

extern "C" __global__ void host_copy(const __grid_constant__ struct host_copy_kernel_params params)
{
    int64_t begin = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * HOST_COPY_THREAD_BYTES;
    const unsigned char *a = (const unsigned char *)params.a + begin;
    unsigned char *d = (unsigned char *)params.d + begin;
    int64_t num_left = params.num_bytes - begin;
    if (num_left >= HOST_COPY_THREAD_BYTES) {
        /* Not what a cache has of it: the host has written there since the last step. */
        *(uint4 *)d = __ldcv((const uint4 *)a);
        return;
    }
    for (int64_t i = 0; i < num_left; i++) {
        d[i] = __ldcv(a + i);
    }
}
