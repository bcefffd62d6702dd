/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cuda/fake_driver.h"

#include <stdio.h>
#include <string.h>

#include <sys/mman.h>

#include "ops/cuda/kernels/gemm_mma_params.h"
#include "ops/cuda/op_kernels.h"

struct fake_driver fake;

#define MAX_KERNELS 256

/* Handles are addresses of these. */
static char context_mark, library_mark, stream_mark, event_mark, graph_mark, exec_mark;
static char kernel_names[MAX_KERNELS][128];
static int num_kernels;

void fake_reset(void)
{
    memset(&fake, 0, sizeof(fake));
    fake.version = 13000;
    fake.num_gpus = 1;
    fake.compute_major = 9;
    fake.num_sms = 132;
    fake.max_shared_bytes = 232448;
    fake.params_bytes = sizeof(struct gemm_tile_params);
    fake.fail_result = CUDA_ERROR_LAUNCH_FAILED;
    fake.capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    num_kernels = 0;
}

void fake_add_range(const void *base, uint64_t num_bytes, unsigned int memory_type, int device_idx)
{
    fake.ranges[fake.num_ranges++] =
        (struct fake_range){(uint64_t)(uintptr_t)base, num_bytes, memory_type, device_idx};
}

static bool fails(const char *call)
{
    if (++fake.num_calls == fake.fail_at) {
        fake.failed_call = call;
        return true;
    }
    return false;
}

#define FAIL_IF_TOLD()               \
    do {                             \
        if (fails(__func__)) {       \
            return fake.fail_result; \
        }                            \
    } while (0)

static CUresult fake_init(unsigned int flags)
{
    (void)flags;
    FAIL_IF_TOLD();
    return fake.init_result;
}

static CUresult fake_driver_get_version(int *version)
{
    FAIL_IF_TOLD();
    *version = fake.version;
    return CUDA_SUCCESS;
}

/* Not counted: they are called to report a failure. */
static CUresult fake_get_error_name(CUresult error, const char **name)
{
    *name = error == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : NULL;
    return *name != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult fake_get_error_string(CUresult error, const char **text)
{
    (void)error;
    *text = "a fake failure";
    return CUDA_SUCCESS;
}

static CUresult fake_device_get_count(int *count)
{
    FAIL_IF_TOLD();
    *count = fake.num_gpus;
    return CUDA_SUCCESS;
}

static CUresult fake_device_get(CUdevice *device, int ordinal)
{
    FAIL_IF_TOLD();
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult fake_device_get_name(char *name, int num_bytes, CUdevice device)
{
    FAIL_IF_TOLD();
    snprintf(name, (size_t)num_bytes, "Fake GPU %d", device);
    return CUDA_SUCCESS;
}

static CUresult fake_device_get_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)device;
    FAIL_IF_TOLD();
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = fake.compute_major;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = fake.compute_minor;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = fake.num_sms;
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        *value = fake.max_shared_bytes;
        break;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
        *value = fake.host_node;
        break;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
        *value = fake.reaches_host;
        break;
    default:
        *value = 1 << 20;
        break;
    }
    return CUDA_SUCCESS;
}

static CUresult fake_device_primary_ctx_retain(CUcontext *context, CUdevice device)
{
    (void)device;
    FAIL_IF_TOLD();
    fake.num_retained++;
    *context = (CUcontext)(void *)&context_mark;
    return CUDA_SUCCESS;
}

static CUresult fake_device_primary_ctx_release(CUdevice device)
{
    (void)device;
    /* Gone, whatever the driver thinks of it. */
    fake.num_retained--;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

static CUresult fake_ctx_push_current(CUcontext context)
{
    (void)context;
    FAIL_IF_TOLD();
    fake.num_pushed++;
    return CUDA_SUCCESS;
}

static CUresult fake_ctx_pop_current(CUcontext *context)
{
    fake.num_pushed--;
    FAIL_IF_TOLD();
    *context = (CUcontext)(void *)&context_mark;
    return CUDA_SUCCESS;
}

static CUresult fake_thread_exchange_stream_capture_mode(CUstreamCaptureMode *mode)
{
    FAIL_IF_TOLD();
    CUstreamCaptureMode before = fake.capture_mode;
    fake.capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

static CUresult fake_library_load_data(CUlibrary *library, const void *code, CUjit_option *options,
                                       void **option_values, unsigned int num_options,
                                       CUlibraryOption *library_options,
                                       void **library_option_values,
                                       unsigned int num_library_options)
{
    (void)code;
    (void)options;
    (void)option_values;
    (void)num_options;
    (void)library_options;
    (void)library_option_values;
    (void)num_library_options;
    FAIL_IF_TOLD();
    fake.num_libraries++;
    fake.num_loads++;
    *library = (CUlibrary)(void *)&library_mark;
    return CUDA_SUCCESS;
}

static CUresult fake_library_unload(CUlibrary library)
{
    (void)library;
    fake.num_libraries--;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

static CUresult fake_library_get_kernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    (void)library;
    FAIL_IF_TOLD();
    snprintf(kernel_names[num_kernels], sizeof(kernel_names[0]), "%s", name);
    *kernel = (CUkernel)(void *)kernel_names[num_kernels++];
    return CUDA_SUCCESS;
}

/* Of kernels in op_kernels.h and of the portable ones what their row says, of the others what the
 * test says. */
static size_t params_bytes_of(const char *kernel)
{
    for (int i = 0; i < OP_KERNEL_COUNT; i++) {
        const struct op_kernel_row *row = op_kernel_at((enum op_kernel)i);
        if (strcmp(row->name, kernel) == 0) {
            return row->params_bytes;
        }
    }
    return strstr(kernel, "_sm80_") != NULL ? sizeof(struct gemm_mma_params) : fake.params_bytes;
}

static CUresult fake_kernel_get_param_info(CUkernel kernel, size_t param_idx, size_t *offset,
                                           size_t *num_bytes)
{
    FAIL_IF_TOLD();
    if (param_idx != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *offset = 0;
    *num_bytes = params_bytes_of((const char *)(void *)kernel);
    return CUDA_SUCCESS;
}

static CUresult fake_kernel_set_attribute(CUfunction_attribute attribute, int value,
                                          CUkernel kernel, CUdevice device)
{
    (void)attribute;
    (void)value;
    (void)kernel;
    (void)device;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

static CUresult fake_kernel_get_function(CUfunction *function, CUkernel kernel)
{
    FAIL_IF_TOLD();
    *function = (CUfunction)(void *)kernel;
    return CUDA_SUCCESS;
}

static CUresult fake_pointer_get_attributes(unsigned int num_attributes,
                                            CUpointer_attribute *attributes, void **values,
                                            CUdeviceptr pointer)
{
    const struct fake_range *found = NULL;

    FAIL_IF_TOLD();
    for (int i = 0; i < fake.num_ranges; i++) {
        if (pointer >= fake.ranges[i].base &&
            pointer - fake.ranges[i].base < fake.ranges[i].num_bytes) {
            found = &fake.ranges[i];
        }
    }
    for (unsigned int i = 0; i < num_attributes; i++) {
        switch ((int)attributes[i]) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *(unsigned int *)values[i] = found != NULL ? found->memory_type : 0;
            break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *(int *)values[i] = found != NULL ? found->device_idx : -2;
            break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
            *(unsigned int *)values[i] = 0;
            break;
        default:
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return CUDA_SUCCESS;
}

static CUresult fake_stream_is_capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)stream;
    FAIL_IF_TOLD();
    *status = fake.is_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static CUresult fake_stream_get_device(CUstream stream, CUdevice *device)
{
    (void)stream;
    FAIL_IF_TOLD();
    if (fake.is_capturing) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    *device = fake.stream_device;
    return CUDA_SUCCESS;
}

/* A descriptor that says what it was made of. */
static CUresult fake_tensor_map_encode_tiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base, const cuuint64_t *dims,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill fill)
{
    (void)type;
    (void)element_strides;
    (void)interleave;
    (void)l2_promotion;
    (void)fill;
    FAIL_IF_TOLD();
    fake.num_encoded++;
    memset(map, 0, sizeof(*map));
    map->opaque[0] = (uint64_t)(uintptr_t)base;
    map->opaque[1] = rank;
    for (cuuint32_t i = 0; i < rank; i++) {
        map->opaque[2 + i] = dims[i];
        map->opaque[6 + i] = box[i];
        if (i + 1 < rank) {
            map->opaque[10 + i] = strides[i];
        }
    }
    map->opaque[14] = swizzle;
    return CUDA_SUCCESS;
}

static CUresult fake_launch_kernel_ex(const CUlaunchConfig *config, CUfunction function,
                                      void **arguments, void **extra)
{
    (void)extra;
    FAIL_IF_TOLD();
    fake.num_launches++;
    fake.config = *config;
    for (unsigned int i = 0; i < config->numAttrs; i++) {
        fake.attributes[i] = config->attrs[i];
    }
    fake.config.attrs = fake.attributes;
    fake.kernel = (const char *)(void *)function;
    if (fake.num_launches == 1) {
        fake.first_kernel = fake.kernel;
        fake.first_shared_bytes = config->sharedMemBytes;
    }
    size_t params_bytes = params_bytes_of(fake.kernel);
    memcpy(&fake.params, arguments[0],
           params_bytes < sizeof(fake.params) ? params_bytes : sizeof(fake.params));
    return CUDA_SUCCESS;
}

/* ---- memory, streams, events, graphs: all is done in the call -------------------------------- */

/* In front of each piece of memory, how long it is; as wide as keeps what follows aligned. */
#define HEAD_BYTES ((size_t)2 << 20)

static CUresult fake_mem_get_info(size_t *num_free, size_t *num_total)
{
    FAIL_IF_TOLD();
    *num_free = 1000;
    *num_total = 2000;
    return CUDA_SUCCESS;
}

static CUresult fake_mem_alloc(CUdeviceptr *memory, size_t num_bytes)
{
    FAIL_IF_TOLD();
    if (fake.max_allocated > 0 && num_bytes > fake.max_allocated) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    unsigned char *mapped = mmap(NULL, HEAD_BYTES + num_bytes, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memcpy(mapped, &num_bytes, sizeof(num_bytes));
    memset(mapped + HEAD_BYTES, 0xa5, num_bytes);
    fake.num_allocated++;
    *memory = (CUdeviceptr)(uintptr_t)(mapped + HEAD_BYTES);
    return CUDA_SUCCESS;
}

static CUresult fake_mem_free(CUdeviceptr memory)
{
    unsigned char *mapped = (unsigned char *)(uintptr_t)memory - HEAD_BYTES;
    size_t num_bytes;
    memcpy(&num_bytes, mapped, sizeof(num_bytes));
    munmap(mapped, HEAD_BYTES + num_bytes);
    fake.num_allocated--;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

static CUresult fake_mem_host_register(void *memory, size_t num_bytes, unsigned int flags)
{
    (void)memory;
    (void)num_bytes;
    (void)flags;
    FAIL_IF_TOLD();
    fake.num_registered++;
    return CUDA_SUCCESS;
}

static CUresult fake_mem_host_unregister(void *memory)
{
    (void)memory;
    fake.num_registered--;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

static CUresult fake_memset_d8_async(CUdeviceptr memory, unsigned char value, size_t num_bytes,
                                     CUstream stream)
{
    (void)stream;
    FAIL_IF_TOLD();
    memset((void *)(uintptr_t)memory, value, num_bytes);
    return CUDA_SUCCESS;
}

static CUresult fake_memcpy_async(CUdeviceptr destination, CUdeviceptr source, size_t num_bytes,
                                  CUstream stream)
{
    (void)stream;
    FAIL_IF_TOLD();
    memcpy((void *)(uintptr_t)destination, (const void *)(uintptr_t)source, num_bytes);
    fake.num_copies++;
    return CUDA_SUCCESS;
}

static CUresult fake_memcpy_batch_async(CUdeviceptr *destinations, CUdeviceptr *sources,
                                        size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
                                        size_t *attribute_firsts, size_t num_attributes,
                                        CUstream stream)
{
    (void)attributes;
    (void)stream;
    FAIL_IF_TOLD();
    if (num_attributes != 1 || attribute_firsts[0] != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < count; i++) {
        memcpy((void *)(uintptr_t)destinations[i], (const void *)(uintptr_t)sources[i], sizes[i]);
        fake.num_copies++;
    }
    return CUDA_SUCCESS;
}

static CUresult fake_ctx_get_stream_priority_range(int *least, int *greatest)
{
    FAIL_IF_TOLD();
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

static CUresult fake_stream_create_with_priority(CUstream *stream, unsigned int flags, int priority)
{
    (void)priority;
    FAIL_IF_TOLD();
    if (flags != CU_STREAM_NON_BLOCKING) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    fake.num_streams++;
    *stream = (CUstream)(void *)&stream_mark;
    return CUDA_SUCCESS;
}

static CUresult fake_stream_destroy(CUstream stream)
{
    (void)stream;
    fake.num_streams--;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

static CUresult fake_stream_synchronize(CUstream stream)
{
    (void)stream;
    FAIL_IF_TOLD();
    fake.num_synchronized++;
    return CUDA_SUCCESS;
}

static CUresult fake_stream_wait_event(CUstream stream, CUevent event, unsigned int flags)
{
    (void)stream;
    (void)event;
    (void)flags;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

static CUresult fake_stream_begin_capture(CUstream stream, CUstreamCaptureMode mode)
{
    (void)stream;
    (void)mode;
    FAIL_IF_TOLD();
    fake.is_capturing = true;
    return CUDA_SUCCESS;
}

static CUresult fake_stream_end_capture(CUstream stream, CUgraph *graph)
{
    (void)stream;
    fake.is_capturing = false;
    FAIL_IF_TOLD();
    fake.num_graphs++;
    *graph = (CUgraph)(void *)&graph_mark;
    return CUDA_SUCCESS;
}

static CUresult fake_event_create(CUevent *event, unsigned int flags)
{
    (void)flags;
    FAIL_IF_TOLD();
    fake.num_events++;
    *event = (CUevent)(void *)&event_mark;
    return CUDA_SUCCESS;
}

static CUresult fake_event_destroy(CUevent event)
{
    (void)event;
    fake.num_events--;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

static CUresult fake_event_record(CUevent event, CUstream stream)
{
    (void)event;
    (void)stream;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

static CUresult fake_event_query(CUevent event)
{
    (void)event;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

static CUresult fake_event_synchronize(CUevent event)
{
    (void)event;
    FAIL_IF_TOLD();
    fake.num_synchronized++;
    return CUDA_SUCCESS;
}

/* 100 ns more with each call. */
static CUresult fake_event_elapsed_time(float *elapsed_ms, CUevent begin, CUevent end)
{
    (void)begin;
    (void)end;
    FAIL_IF_TOLD();
    fake.num_elapsed++;
    *elapsed_ms = 1e-4f * (float)fake.num_elapsed;
    return CUDA_SUCCESS;
}

static CUresult fake_graph_instantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    (void)graph;
    (void)flags;
    FAIL_IF_TOLD();
    fake.num_execs++;
    *exec = (CUgraphExec)(void *)&exec_mark;
    return CUDA_SUCCESS;
}

static CUresult fake_graph_upload(CUgraphExec exec, CUstream stream)
{
    (void)exec;
    (void)stream;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

static CUresult fake_graph_launch(CUgraphExec exec, CUstream stream)
{
    (void)exec;
    (void)stream;
    FAIL_IF_TOLD();
    fake.num_launches++;
    return CUDA_SUCCESS;
}

static CUresult fake_graph_exec_destroy(CUgraphExec exec)
{
    (void)exec;
    fake.num_execs--;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

static CUresult fake_graph_destroy(CUgraph graph)
{
    (void)graph;
    fake.num_graphs--;
    FAIL_IF_TOLD();
    return CUDA_SUCCESS;
}

struct driver fake_table(void)
{
    struct driver table = {.version = fake.version};
#define FAKE_FIELD(field, call) table.field = fake_##field;
    DRIVER_CALL_LIST(FAKE_FIELD)
#undef FAKE_FIELD
    return table;
}
