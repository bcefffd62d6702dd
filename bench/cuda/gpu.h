/* SPDX-License-Identifier: Apache-2.0 */
/* The GPU as a benchmark uses it: memory, one stream, events, graphs, and kernels of its own. The
 * library's kernels are measured through imbrex_ops.h, as any program would call them. */
#ifndef IMBREX_BENCH_CUDA_GPU_H
#define IMBREX_BENCH_CUDA_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda.h>

#define GPU_CALL_LIST(X)                          \
    X(init, cuInit)                               \
    X(get_error_name, cuGetErrorName)             \
    X(device_get, cuDeviceGet)                    \
    X(device_get_pci_bus_id, cuDeviceGetPCIBusId) \
    X(primary_retain, cuDevicePrimaryCtxRetain)   \
    X(primary_release, cuDevicePrimaryCtxRelease) \
    X(ctx_get_current, cuCtxGetCurrent)           \
    X(ctx_set_current, cuCtxSetCurrent)           \
    X(mem_alloc, cuMemAlloc)                      \
    X(mem_free, cuMemFree)                        \
    X(mem_get_info, cuMemGetInfo)                 \
    X(memset_d8_async, cuMemsetD8Async)           \
    X(memcpy_htod, cuMemcpyHtoD)                  \
    X(memcpy_dtoh, cuMemcpyDtoH)                  \
    X(stream_create, cuStreamCreate)              \
    X(stream_destroy, cuStreamDestroy)            \
    X(stream_synchronize, cuStreamSynchronize)    \
    X(stream_wait_event, cuStreamWaitEvent)       \
    X(stream_begin_capture, cuStreamBeginCapture) \
    X(stream_end_capture, cuStreamEndCapture)     \
    X(event_create, cuEventCreate)                \
    X(event_destroy, cuEventDestroy)              \
    X(event_record, cuEventRecord)                \
    X(event_query, cuEventQuery)                  \
    X(event_synchronize, cuEventSynchronize)      \
    X(event_elapsed_time, cuEventElapsedTime)     \
    X(graph_instantiate, cuGraphInstantiate)      \
    X(graph_launch, cuGraphLaunch)                \
    X(graph_exec_destroy, cuGraphExecDestroy)     \
    X(graph_destroy, cuGraphDestroy)              \
    X(library_load_data, cuLibraryLoadData)       \
    X(library_unload, cuLibraryUnload)            \
    X(library_get_kernel, cuLibraryGetKernel)     \
    X(launch_kernel, cuLaunchKernel)              \
    X(launch_kernel_ex, cuLaunchKernelEx)         \
    X(kernel_set_attribute, cuKernelSetAttribute) \
    X(tensor_map_encode, cuTensorMapEncodeTiled)

struct gpu {
    void *library; /* libcuda */
#define GPU_FIELD(field, call) __typeof__(call) *field;
    GPU_CALL_LIST(GPU_FIELD)
#undef GPU_FIELD
    CUdevice device;
    CUcontext context; /* primary */
    CUstream stream;
    CUlibrary kernels;
    char pci_bus_id[32];
};

/* Reported on failure, like everything below. */
bool gpu_open(int device_idx, struct gpu *gpu);
/* Safe on a zeroed struct. */
void gpu_close(struct gpu *gpu);

bool gpu_check(const struct gpu *gpu, CUresult result, const char *call);
#define GPU_CALL(gpu, field, ...) gpu_check((gpu), (gpu)->field(__VA_ARGS__), #field)

/* Launches a kernel of bench_kernels.cu over num_blocks x num_threads on the stream. */
bool gpu_launch(struct gpu *gpu, const char *kernel, int64_t num_blocks, int num_threads,
                void **arguments);

#endif
