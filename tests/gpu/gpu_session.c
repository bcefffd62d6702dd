/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/gpu_session.h"

#include <stdio.h>

struct imbrex_device *device;
struct gpu gpu;

bool check_begin(int *exit_code)
{
    struct imbrex_error err = {0};
    /* A run that is cut short has said what it found. */
    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    if (imbrex_device_open(0, NULL, &device, &err) != IMBREX_STATUS_OK) {
        printf("%s\n", err.message);
        *exit_code = err.status == IMBREX_STATUS_UNSUPPORTED ? SKIPPED : 1;
        return false;
    }
    require(gpu_open(0, &gpu), "GPU");
    return true;
}

bool copied_to_gpu(CUdeviceptr to, const void *from, size_t num_bytes)
{
    return GPU_CALL(&gpu, memcpy_htod, to, from, num_bytes) &&
           GPU_CALL(&gpu, stream_synchronize, NULL);
}

int check_end(void)
{
    imbrex_device_close(device);
    gpu_close(&gpu);
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed > 0 ? 1 : 0;
}
