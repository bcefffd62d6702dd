/* SPDX-License-Identifier: Apache-2.0 */
/* Streams, copies, events and graphs are the driver's. What the driver refuses is told by the call
 * that it refused; what fails on the GPU later makes the device unusable, since CUDA gives no
 * context back after such a failure. */
#include "ops/cuda/device_cuda.h"

#include <stdlib.h>

/* Whole pages of the GPU: what is smaller would neither begin at a multiple of 4 KiB. */
#define ALLOCATION_UNIT ((size_t)2 << 20)

/* Copies that one call of the driver takes; their arrays lie on the stack. */
#define MAX_BATCH_COPIES 64

/* A step's inputs and results; about 20 us of the bus. */
#define MAX_KERNEL_COPY_BYTES ((size_t)1 << 20)

struct device_event {
    CUevent event;
};

struct device_graph {
    CUgraphExec exec;
};

/* Host memory that the GPU knows. */
struct host_range {
    uintptr_t begin, end;
};

struct device_cuda {
    struct device device; /* first: the table's functions get it */
    struct imbrex_device *kernels;
    const struct driver *driver; /* of `kernels` */
    CUstream streams[DEVICE_STREAM_COUNT];
    CUstream capturing; /* where graphs are captured, which is no stream of the device's */
    struct host_range *registered; /* [num_registered], room for max_registered */
    int32_t num_registered, max_registered;
    bool reaches_host; /* kernels may use the host's addresses of it */
};

static struct device_cuda *cuda_of(struct device *device)
{
    return (struct device_cuda *)(void *)device;
}

/* Why the device failed, the first time. */
static void keep_failure(struct device_cuda *cuda, const struct imbrex_error *err)
{
    if (!cuda->device.has_failed) {
        cuda->device.failure = *err;
    }
    cuda->device.has_failed = true;
}

/* Back out of the context. A call that did its work has done it: that leaving went wrong is for the
 * next one to tell. */
static enum imbrex_status leave(struct device_cuda *cuda, enum imbrex_status status)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    if (cuda_device_leave(cuda->kernels, IMBREX_STATUS_OK, &err) != IMBREX_STATUS_OK) {
        keep_failure(cuda, &err);
    }
    return status;
}

/* A call in the device's context. */
#define IN_CONTEXT(cuda, err, call)                                                       \
    (cuda_device_enter((cuda)->kernels, (err)) != IMBREX_STATUS_OK ? IMBREX_STATUS_DEVICE \
                                                                   : leave((cuda), (call)))

/* Gives something back: tried even where the context cannot be entered, since nobody is left who
 * could try again. */
#define GIVE_BACK(cuda, field, ...)                                                     \
    do {                                                                                \
        bool is_entered = cuda_device_enter((cuda)->kernels, NULL) == IMBREX_STATUS_OK; \
        (void)(cuda)->driver->field(__VA_ARGS__);                                       \
        if (is_entered) {                                                               \
            (void)cuda_device_leave((cuda)->kernels, IMBREX_STATUS_OK, NULL);           \
        }                                                                               \
    } while (0)

static void cuda_destroy(struct device *device)
{
    struct device_cuda *cuda = cuda_of(device);
    const struct driver *driver = cuda->driver;
    /* Whoever destroys a device that has failed can do nothing about another failure. */
    bool is_entered = cuda_device_enter(cuda->kernels, NULL) == IMBREX_STATUS_OK;
    for (int i = 0; i < DEVICE_STREAM_COUNT; i++) {
        if (cuda->streams[i] != NULL) {
            (void)driver->stream_synchronize(cuda->streams[i]);
            (void)driver->stream_destroy(cuda->streams[i]);
        }
    }
    if (cuda->capturing != NULL) {
        (void)driver->stream_destroy(cuda->capturing);
    }
    if (is_entered) {
        (void)leave(cuda, IMBREX_STATUS_OK);
    }
    imbrex_device_close(cuda->kernels);
    free(cuda->registered);
    free(cuda);
}

static enum imbrex_status alloc_entered(struct device_cuda *cuda, const char *what,
                                        size_t num_bytes, CUdeviceptr *memory,
                                        struct imbrex_error *err)
{
    const struct driver *driver = cuda->driver;
    CUstream stream = cuda->streams[DEVICE_STREAM_KV_MANAGE];
    size_t num_free = 0, num_total = 0;
    CUdeviceptr allocated = 0;
    size_t rounded = (num_bytes + ALLOCATION_UNIT - 1) / ALLOCATION_UNIT * ALLOCATION_UNIT;
    CUresult result =
        rounded < num_bytes ? CUDA_ERROR_OUT_OF_MEMORY : driver->mem_alloc(&allocated, rounded);
    if (result == CUDA_ERROR_OUT_OF_MEMORY &&
        driver->mem_get_info(&num_free, &num_total) == CUDA_SUCCESS) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY,
                         "%s: expected %zu bytes of device memory, found %zu free of %zu", what,
                         num_bytes, num_free, num_total);
    }
    TRY(driver_check(driver, result, what, err));
    enum imbrex_status status =
        DRIVER_CALL(driver, err, memset_d8_async, allocated, 0, rounded, stream);
    if (status == IMBREX_STATUS_OK) {
        status = DRIVER_CALL(driver, err, stream_synchronize, stream);
    }
    if (status != IMBREX_STATUS_OK) {
        (void)driver->mem_free(allocated);
        return status;
    }
    *memory = allocated;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cuda_alloc(struct device *device, const char *what, size_t num_bytes,
                                     void **memory, struct imbrex_error *err)
{
    struct device_cuda *cuda = cuda_of(device);
    CUdeviceptr allocated = 0;
    TRY(IN_CONTEXT(cuda, err, alloc_entered(cuda, what, num_bytes, &allocated, err)));
    *memory = (void *)(uintptr_t)allocated;
    return IMBREX_STATUS_OK;
}

static void cuda_free(struct device *device, void *memory)
{
    struct device_cuda *cuda = cuda_of(device);
    GIVE_BACK(cuda, mem_free, (CUdeviceptr)(uintptr_t)memory);
}

static enum imbrex_status cuda_host_register(struct device *device, void *memory, size_t num_bytes,
                                             struct imbrex_error *err)
{
    struct device_cuda *cuda = cuda_of(device);
    if (cuda->num_registered == cuda->max_registered) {
        int32_t max_registered = 2 * cuda->max_registered + 8;
        size_t ranges_bytes = (size_t)max_registered * sizeof(*cuda->registered);
        struct host_range *grown = realloc(cuda->registered, ranges_bytes);
        if (grown == NULL) {
            return error_out_of_memory(err, "registered memory", ranges_bytes);
        }
        cuda->registered = grown;
        cuda->max_registered = max_registered;
    }
    TRY(IN_CONTEXT(cuda, err,
                   DRIVER_CALL(cuda->driver, err, mem_host_register, memory, num_bytes,
                               CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP)));
    cuda->registered[cuda->num_registered++] =
        (struct host_range){.begin = (uintptr_t)memory, .end = (uintptr_t)memory + num_bytes};
    return IMBREX_STATUS_OK;
}

static bool is_registered(const struct device_cuda *cuda, const void *memory, size_t num_bytes)
{
    uintptr_t begin = (uintptr_t)memory;
    for (int32_t i = 0; i < cuda->num_registered; i++) {
        const struct host_range *range = &cuda->registered[i];
        if (begin >= range->begin && begin < range->end && num_bytes <= range->end - begin) {
            return true;
        }
    }
    return false;
}

static void cuda_host_unregister(struct device *device, void *memory)
{
    struct device_cuda *cuda = cuda_of(device);
    for (int32_t i = 0; i < cuda->num_registered; i++) {
        if (cuda->registered[i].begin == (uintptr_t)memory) {
            cuda->num_registered--;
            cuda->registered[i] = cuda->registered[cuda->num_registered];
            break;
        }
    }
    GIVE_BACK(cuda, mem_host_unregister, memory);
}

/* Only a hint: a driver that does not know is no failure. */
static int32_t cuda_host_node(struct device *device)
{
    struct device_cuda *cuda = cuda_of(device);
    int node = -1;
    if (cuda->driver->device_get_attribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID,
                                           cuda->kernels->gpu) != CUDA_SUCCESS) {
        return -1;
    }
    return node;
}

/* The status of a call without a message: why the device failed is kept. */
static enum imbrex_status tell(struct device_cuda *cuda, const struct imbrex_error *err)
{
    if (err->status == IMBREX_STATUS_DEVICE) {
        keep_failure(cuda, err);
    }
    return err->status;
}

/* Whether a kernel does the copy: a step's inputs and results would stand behind all KV blocks that
 * a copy engine has been given, and the step with them. Measured on an H200 with a link that is
 * busy: steps of 5 ms take 21 ms (bench_kv_move). */
static bool takes_kernel(const struct device_cuda *cuda, enum device_stream stream,
                         const struct device_copy *copy)
{
    uintptr_t addresses = (uintptr_t)copy->destination | (uintptr_t)copy->source;
    return cuda->reaches_host && stream == DEVICE_STREAM_STEP && copy->num_bytes > 0 &&
           copy->num_bytes <= MAX_KERNEL_COPY_BYTES && addresses % HOST_COPY_THREAD_BYTES == 0 &&
           is_registered(cuda, copy->destination, copy->num_bytes) !=
               is_registered(cuda, copy->source, copy->num_bytes);
}

/* Without programmatic overlap: whatever was given before is done, and what comes behind may take
 * what it reads for old. */
static enum imbrex_status launch_copy(struct device_cuda *cuda, CUstream stream,
                                      const struct device_copy *copy, struct imbrex_error *err)
{
    enum { CTA_BYTES = HOST_COPY_THREADS * HOST_COPY_THREAD_BYTES };
    CUfunction function = NULL;
    struct host_copy_kernel_params params = {
        .d = copy->destination, .a = copy->source, .num_bytes = (int64_t)copy->num_bytes};
    void *arguments[] = {&params};
    TRY(cuda_device_op_function(cuda->kernels, OP_KERNEL_host_copy, &function, err));
    const CUlaunchConfig config = {
        .gridDimX = (unsigned int)((copy->num_bytes + CTA_BYTES - 1) / CTA_BYTES),
        .gridDimY = 1,
        .gridDimZ = 1,
        .blockDimX = HOST_COPY_THREADS,
        .blockDimY = 1,
        .blockDimZ = 1,
        .hStream = stream,
    };
    return DRIVER_CALL(cuda->driver, err, launch_kernel_ex, &config, function, arguments, NULL);
}

static enum imbrex_status copy_entered(struct device_cuda *cuda, enum device_stream stream_idx,
                                       const struct device_copy *copies, int32_t num_copies,
                                       struct imbrex_error *err)
{
    const struct driver *driver = cuda->driver;
    CUstream stream = cuda->streams[stream_idx];
    CUdeviceptr destinations[MAX_BATCH_COPIES], sources[MAX_BATCH_COPIES];
    size_t sizes[MAX_BATCH_COPIES];
    size_t first = 0;
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
                                     .flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE};
    for (int32_t next = 0; next < num_copies;) {
        size_t count = 0;
        for (; next < num_copies && count < MAX_BATCH_COPIES; next++) {
            if (takes_kernel(cuda, stream_idx, &copies[next])) {
                TRY(launch_copy(cuda, stream, &copies[next], err));
            } else if (copies[next].num_bytes > 0) {
                destinations[count] = (CUdeviceptr)(uintptr_t)copies[next].destination;
                sources[count] = (CUdeviceptr)(uintptr_t)copies[next].source;
                sizes[count++] = copies[next].num_bytes;
            }
        }
        if (count == 1) {
            TRY(DRIVER_CALL(driver, err, memcpy_async, destinations[0], sources[0], sizes[0],
                            stream));
        } else if (count > 1) {
            TRY(DRIVER_CALL(driver, err, memcpy_batch_async, destinations, sources, sizes, count,
                            &attributes, &first, 1, stream));
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cuda_copy_batch_async(struct device *device, enum device_stream stream,
                                                const struct device_copy *copies,
                                                int32_t num_copies)
{
    struct device_cuda *cuda = cuda_of(device);
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    enum imbrex_status status =
        IN_CONTEXT(cuda, &err, copy_entered(cuda, stream, copies, num_copies, &err));
    return status == IMBREX_STATUS_OK ? status : tell(cuda, &err);
}

/* What a backend left behind about work that failed with this status. */
static const struct imbrex_error *work_error(const struct device_cuda *cuda,
                                             enum imbrex_status status)
{
    static const struct imbrex_error unknown = {.message = ""};
    const struct imbrex_error *error = &cuda->kernels->work_error;
    return error->status == status ? error : &unknown;
}

/* The work issues what it has to do in the call; what it says is the call's status. */
static enum imbrex_status cuda_run_async(struct device *device, enum device_stream stream,
                                         device_work_fn *work, void *arg)
{
    struct device_cuda *cuda = cuda_of(device);
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    enum imbrex_status status = IN_CONTEXT(cuda, &err, work(arg, cuda->streams[stream]));
    if (status != IMBREX_STATUS_OK && err.status == IMBREX_STATUS_OK && !cuda->device.has_failed) {
        cuda->device.failure = *work_error(cuda, status);
    }
    return err.status == IMBREX_STATUS_OK ? status : tell(cuda, &err);
}

static enum imbrex_status cuda_event_create(struct device *device, bool is_timed,
                                            struct device_event **event, struct imbrex_error *err)
{
    struct device_cuda *cuda = cuda_of(device);
    unsigned int flags = is_timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING;
    struct device_event *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "a device event", sizeof(*created));
    }
    enum imbrex_status status =
        IN_CONTEXT(cuda, err, DRIVER_CALL(cuda->driver, err, event_create, &created->event, flags));
    if (status != IMBREX_STATUS_OK) {
        free(created);
        return status;
    }
    *event = created;
    return IMBREX_STATUS_OK;
}

static void cuda_event_destroy(struct device *device, struct device_event *event)
{
    struct device_cuda *cuda = cuda_of(device);
    GIVE_BACK(cuda, event_destroy, event->event);
    free(event);
}

/* A call without a message: the device keeps it if it was the last. */
#define CALL_QUIETLY(cuda, field, ...)                                                \
    do {                                                                              \
        struct imbrex_error call_err = {.status = IMBREX_STATUS_OK};                  \
        if (IN_CONTEXT((cuda), &call_err,                                             \
                       DRIVER_CALL((cuda)->driver, &call_err, field, __VA_ARGS__)) != \
            IMBREX_STATUS_OK) {                                                       \
            return tell((cuda), &call_err);                                           \
        }                                                                             \
    } while (0)

static enum imbrex_status cuda_event_record(struct device *device, struct device_event *event,
                                            enum device_stream stream)
{
    struct device_cuda *cuda = cuda_of(device);
    CALL_QUIETLY(cuda, event_record, event->event, cuda->streams[stream]);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cuda_event_wait(struct device *device, struct device_event *event,
                                          enum device_stream stream)
{
    struct device_cuda *cuda = cuda_of(device);
    CALL_QUIETLY(cuda, stream_wait_event, cuda->streams[stream], event->event,
                 CU_EVENT_WAIT_DEFAULT);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cuda_event_query(struct device *device, struct device_event *event,
                                           bool *is_done)
{
    struct device_cuda *cuda = cuda_of(device);
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    if (cuda_device_enter(cuda->kernels, &err) != IMBREX_STATUS_OK) {
        return tell(cuda, &err);
    }
    CUresult result = cuda->driver->event_query(event->event);
    *is_done = result != CUDA_ERROR_NOT_READY;
    enum imbrex_status status =
        *is_done ? driver_check(cuda->driver, result, "event_query", &err) : IMBREX_STATUS_OK;
    return leave(cuda, status) == IMBREX_STATUS_OK ? IMBREX_STATUS_OK : tell(cuda, &err);
}

static enum imbrex_status cuda_event_synchronize(struct device *device, struct device_event *event)
{
    struct device_cuda *cuda = cuda_of(device);
    CALL_QUIETLY(cuda, event_synchronize, event->event);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cuda_event_elapsed(struct device *device,
                                             const struct device_event *begin,
                                             const struct device_event *end, int64_t *elapsed_ns)
{
    struct device_cuda *cuda = cuda_of(device);
    float elapsed_ms;
    CALL_QUIETLY(cuda, event_elapsed_time, &elapsed_ms, begin->event, end->event);
    *elapsed_ns = (int64_t)((double)elapsed_ms * 1e6);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status capture_entered(struct device_cuda *cuda, device_work_fn *work, void *arg,
                                          CUgraphExec *exec, struct imbrex_error *err)
{
    const struct driver *driver = cuda->driver;
    CUgraph graph = NULL;
    CUgraphExec instantiated = NULL;
    TRY(DRIVER_CALL(driver, err, stream_begin_capture, cuda->capturing,
                    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    enum imbrex_status status = work(arg, cuda->capturing);
    CUresult result = driver->stream_end_capture(cuda->capturing, &graph);
    if (status == IMBREX_STATUS_OK) {
        status = driver_check(driver, result, "stream_end_capture", err);
    } else {
        const char *reason = work_error(cuda, status)->message;
        (void)error_set(err, status, "CUDA: work that was to be captured failed%s%s",
                        reason[0] != '\0' ? ": " : "", reason);
    }
    if (status == IMBREX_STATUS_OK) {
        status = DRIVER_CALL(driver, err, graph_instantiate, &instantiated, graph, 0);
    }
    if (graph != NULL) {
        (void)driver->graph_destroy(graph);
    }
    TRY(status);
    status = DRIVER_CALL(driver, err, graph_upload, instantiated, cuda->capturing);
    if (status != IMBREX_STATUS_OK) {
        (void)driver->graph_exec_destroy(instantiated);
        return status;
    }
    *exec = instantiated;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cuda_graph_capture(struct device *device, device_work_fn *work, void *arg,
                                             struct device_graph **graph, struct imbrex_error *err)
{
    struct device_cuda *cuda = cuda_of(device);
    struct device_graph *captured = calloc(1, sizeof(*captured));
    if (captured == NULL) {
        return error_out_of_memory(err, "a device graph", sizeof(*captured));
    }
    enum imbrex_status status =
        IN_CONTEXT(cuda, err, capture_entered(cuda, work, arg, &captured->exec, err));
    if (status != IMBREX_STATUS_OK) {
        if (status == IMBREX_STATUS_DEVICE && err != NULL) {
            keep_failure(cuda, err);
        }
        free(captured);
        return status;
    }
    *graph = captured;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cuda_graph_launch(struct device *device, enum device_stream stream,
                                            struct device_graph *graph)
{
    struct device_cuda *cuda = cuda_of(device);
    CALL_QUIETLY(cuda, graph_launch, graph->exec, cuda->streams[stream]);
    return IMBREX_STATUS_OK;
}

static void cuda_graph_destroy(struct device *device, struct device_graph *graph)
{
    struct device_cuda *cuda = cuda_of(device);
    GIVE_BACK(cuda, graph_exec_destroy, graph->exec);
    free(graph);
}

static const struct device_functions device_cuda_functions = {
    .name = "cuda",
    .kind = DEVICE_KIND_CUDA,
    .is_async = true,
    .destroy = cuda_destroy,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .host_register = cuda_host_register,
    .host_unregister = cuda_host_unregister,
    .host_node = cuda_host_node,
    .copy_batch_async = cuda_copy_batch_async,
    .run_async = cuda_run_async,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_wait = cuda_event_wait,
    .event_query = cuda_event_query,
    .event_synchronize = cuda_event_synchronize,
    .event_elapsed = cuda_event_elapsed,
    .graph_capture = cuda_graph_capture,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
};

/* Whether kernels may use the host's addresses. Only a hint: a driver that does not know is no
 * failure. */
static bool ask_reaches_host(const struct device_cuda *cuda)
{
    int reaches_host = 0;
    return cuda->driver->device_get_attribute(
               &reaches_host, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
               cuda->kernels->gpu) == CUDA_SUCCESS &&
           reaches_host != 0;
}

/* The step goes ahead of everything else. */
static enum imbrex_status create_streams(struct device_cuda *cuda, struct imbrex_error *err)
{
    const struct driver *driver = cuda->driver;
    int least = 0, greatest = 0;
    TRY(DRIVER_CALL(driver, err, ctx_get_stream_priority_range, &least, &greatest));
    for (int i = 0; i < DEVICE_STREAM_COUNT; i++) {
        TRY(DRIVER_CALL(driver, err, stream_create_with_priority, &cuda->streams[i],
                        CU_STREAM_NON_BLOCKING, i == DEVICE_STREAM_STEP ? greatest : least));
    }
    return DRIVER_CALL(driver, err, stream_create_with_priority, &cuda->capturing,
                       CU_STREAM_NON_BLOCKING, greatest);
}

enum imbrex_status device_cuda_create_on(const struct driver *driver, int32_t device_idx,
                                         struct device **device, struct imbrex_error *err)
{
    struct device_cuda *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the device cuda", sizeof(*created));
    }
    created->device.functions = &device_cuda_functions;
    enum imbrex_status status =
        cuda_device_create(driver, device_idx, NULL, &created->kernels, err);
    if (status != IMBREX_STATUS_OK) {
        free(created);
        return status;
    }
    created->driver = &created->kernels->driver;
    created->reaches_host = ask_reaches_host(created);
    status = IN_CONTEXT(created, err, create_streams(created, err));
    if (status != IMBREX_STATUS_OK) {
        /* The caller keeps his table. */
        created->kernels->driver.library = NULL;
        cuda_destroy(&created->device);
        return status;
    }
    *device = &created->device;
    return IMBREX_STATUS_OK;
}

enum imbrex_status device_cuda_create(int32_t device_idx, struct device **device,
                                      struct imbrex_error *err)
{
    struct driver driver = {0};
    TRY(driver_open(&driver, err));
    enum imbrex_status status = device_cuda_create_on(&driver, device_idx, device, err);
    if (status != IMBREX_STATUS_OK) {
        driver_close(&driver);
    }
    return status;
}

enum imbrex_status device_cuda_tune(struct device *device, const struct device_choice *choice,
                                    const struct log *log, struct imbrex_error *err)
{
    return tune_load(cuda_of(device)->kernels, choice->tuned, choice->tuned_is_optional, log, err);
}

struct imbrex_device *device_cuda_kernels(struct device *device)
{
    return cuda_of(device)->kernels;
}
