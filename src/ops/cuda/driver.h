/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA driver API as a table of calls, looked up at run time: nothing of CUDA is linked, so one
 * library serves hosts with and without a GPU, and a test can put its own calls in the table.
 *
 * Only files below src/ops/cuda/ name a CUDA type. */
#ifndef IMBREX_OPS_CUDA_DRIVER_H
#define IMBREX_OPS_CUDA_DRIVER_H

#include <stdint.h>

#include <cuda.h>

#include "base/status.h"

#if CUDA_VERSION < 13000
#error "imbrex needs the CUDA toolkit 13.0 or newer; make CUDA=0 builds without CUDA"
#endif

/* Code built by the toolkit 13.0 runs on drivers from 580 on, which report this version. */
#define DRIVER_MIN_VERSION 13000
#define DRIVER_MIN_RELEASE 580

/* X(field, call). cuda.h redefines some names (cuMemAlloc is cuMemAlloc_v2, and the plain name is
 * an older ABI), so the name to look up is made of the macro's expansion. */
#define DRIVER_CALL_LIST(X)                                                   \
    X(init, cuInit)                                                           \
    X(driver_get_version, cuDriverGetVersion)                                 \
    X(get_error_name, cuGetErrorName)                                         \
    X(get_error_string, cuGetErrorString)                                     \
    X(device_get_count, cuDeviceGetCount)                                     \
    X(device_get, cuDeviceGet)                                                \
    X(device_get_name, cuDeviceGetName)                                       \
    X(device_get_attribute, cuDeviceGetAttribute)                             \
    X(device_primary_ctx_retain, cuDevicePrimaryCtxRetain)                    \
    X(device_primary_ctx_release, cuDevicePrimaryCtxRelease)                  \
    X(ctx_push_current, cuCtxPushCurrent)                                     \
    X(ctx_pop_current, cuCtxPopCurrent)                                       \
    X(ctx_get_stream_priority_range, cuCtxGetStreamPriorityRange)             \
    X(thread_exchange_stream_capture_mode, cuThreadExchangeStreamCaptureMode) \
    X(mem_get_info, cuMemGetInfo)                                             \
    X(mem_alloc, cuMemAlloc)                                                  \
    X(mem_free, cuMemFree)                                                    \
    X(mem_host_register, cuMemHostRegister)                                   \
    X(mem_host_unregister, cuMemHostUnregister)                               \
    X(memset_d8_async, cuMemsetD8Async)                                       \
    X(memcpy_async, cuMemcpyAsync)                                            \
    X(memcpy_batch_async, cuMemcpyBatchAsync)                                 \
    X(stream_create_with_priority, cuStreamCreateWithPriority)                \
    X(stream_destroy, cuStreamDestroy)                                        \
    X(stream_synchronize, cuStreamSynchronize)                                \
    X(stream_wait_event, cuStreamWaitEvent)                                   \
    X(stream_begin_capture, cuStreamBeginCapture)                             \
    X(stream_end_capture, cuStreamEndCapture)                                 \
    X(event_create, cuEventCreate)                                            \
    X(event_destroy, cuEventDestroy)                                          \
    X(event_record, cuEventRecord)                                            \
    X(event_query, cuEventQuery)                                              \
    X(event_synchronize, cuEventSynchronize)                                  \
    X(event_elapsed_time, cuEventElapsedTime)                                 \
    X(graph_instantiate, cuGraphInstantiate)                                  \
    X(graph_upload, cuGraphUpload)                                            \
    X(graph_launch, cuGraphLaunch)                                            \
    X(graph_exec_destroy, cuGraphExecDestroy)                                 \
    X(graph_destroy, cuGraphDestroy)                                          \
    X(library_load_data, cuLibraryLoadData)                                   \
    X(library_unload, cuLibraryUnload)                                        \
    X(library_get_kernel, cuLibraryGetKernel)                                 \
    X(kernel_get_param_info, cuKernelGetParamInfo)                            \
    X(kernel_set_attribute, cuKernelSetAttribute)                             \
    X(kernel_get_function, cuKernelGetFunction)                               \
    X(pointer_get_attributes, cuPointerGetAttributes)                         \
    X(stream_is_capturing, cuStreamIsCapturing)                               \
    X(stream_get_device, cuStreamGetDevice)                                   \
    X(tensor_map_encode_tiled, cuTensorMapEncodeTiled)                        \
    X(launch_kernel_ex, cuLaunchKernelEx)

struct driver {
#define DRIVER_FIELD(field, call) __typeof__(call) *field;
    DRIVER_CALL_LIST(DRIVER_FIELD)
#undef DRIVER_FIELD
    void *library; /* of dlopen; NULL in a table that a test filled */
    int version;   /* 13000 is CUDA 13.0 */
};

/* Opens libcuda.so.1, looks up every call, checks the version and initialises the driver.
 * UNSUPPORTED, with the reason, where there is no driver, an older one, or no GPU. */
enum imbrex_status driver_open(struct driver *driver, struct imbrex_error *err);
/* The part of driver_open that comes after the look-up. */
enum imbrex_status driver_init(struct driver *driver, struct imbrex_error *err);
/* Safe on a zeroed table. Nothing that came from the driver may be in use. */
void driver_close(struct driver *driver);

/* Turns the result of a driver call into a status. `call` is its name. Out of memory is
 * OUT_OF_MEMORY, every other failure DEVICE. */
enum imbrex_status driver_check(const struct driver *driver, CUresult result, const char *call,
                                struct imbrex_error *err);

/* Calls one entry of the table and names it in the error. */
#define DRIVER_CALL(driver, err, field, ...) \
    driver_check((driver), (driver)->field(__VA_ARGS__), #field, (err))

#endif
