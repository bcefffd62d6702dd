/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/cuda/gpu.h"

#include <dlfcn.h>
#include <string.h>

#include "base/symbol.h"
#include "bench/cuda/bench_image.h"
#include "cli/output.h"

#define GPU_TEXT_OF(text) #text
#define GPU_TEXT(call) GPU_TEXT_OF(call)

static const struct {
    const char *symbol;
    size_t offset;
} gpu_calls[] = {
#define GPU_ROW(field, call) {GPU_TEXT(call), offsetof(struct gpu, field)},
    GPU_CALL_LIST(GPU_ROW)
#undef GPU_ROW
};

bool gpu_check(const struct gpu *gpu, CUresult result, const char *call)
{
    const char *name = NULL;
    if (result == CUDA_SUCCESS) {
        return true;
    }
    if (gpu->get_error_name(result, &name) != CUDA_SUCCESS || name == NULL) {
        name = "unknown error";
    }
    output_error("CUDA: %s: %s (%d)", call, name, (int)result);
    return false;
}

bool gpu_open(int device_idx, struct gpu *gpu)
{
    struct gpu opened = {.library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)};

    if (opened.library == NULL) {
        output_error("CUDA: no driver: %s", dlerror());
        return false;
    }
    for (size_t i = 0; i < sizeof(gpu_calls) / sizeof(gpu_calls[0]); i++) {
        if (!symbol_find(opened.library, gpu_calls[i].symbol,
                         (unsigned char *)&opened + gpu_calls[i].offset)) {
            output_error("CUDA: the driver has no %s", gpu_calls[i].symbol);
            dlclose(opened.library);
            return false;
        }
    }
    bool is_ok = GPU_CALL(&opened, init, 0) &&
                 GPU_CALL(&opened, device_get, &opened.device, device_idx) &&
                 GPU_CALL(&opened, device_get_pci_bus_id, opened.pci_bus_id,
                          (int)sizeof(opened.pci_bus_id), opened.device) &&
                 GPU_CALL(&opened, primary_retain, &opened.context, opened.device) &&
                 GPU_CALL(&opened, ctx_set_current, opened.context) &&
                 GPU_CALL(&opened, stream_create, &opened.stream, CU_STREAM_NON_BLOCKING) &&
                 GPU_CALL(&opened, library_load_data, &opened.kernels, bench_image(), NULL, NULL, 0,
                          NULL, NULL, 0);
    if (!is_ok) {
        gpu_close(&opened);
        return false;
    }
    *gpu = opened;
    return true;
}

void gpu_close(struct gpu *gpu)
{
    if (gpu->library == NULL) {
        return;
    }
    if (gpu->kernels != NULL) {
        (void)gpu->library_unload(gpu->kernels);
    }
    if (gpu->stream != NULL) {
        (void)gpu->stream_destroy(gpu->stream);
    }
    if (gpu->context != NULL) {
        (void)gpu->ctx_set_current(NULL);
        (void)gpu->primary_release(gpu->device);
    }
    dlclose(gpu->library);
    *gpu = (struct gpu){0};
}

bool gpu_launch(struct gpu *gpu, const char *kernel, int64_t num_blocks, int num_threads,
                void **arguments)
{
    CUkernel found = NULL;
    return GPU_CALL(gpu, library_get_kernel, &found, gpu->kernels, kernel) &&
           GPU_CALL(gpu, launch_kernel, (CUfunction)found, (unsigned int)num_blocks, 1, 1,
                    (unsigned int)num_threads, 1, 1, 0, gpu->stream, arguments, NULL);
}
