/* SPDX-License-Identifier: Apache-2.0 */
/* The calls of device.h: what holds for every device is seen to here, the rest is the table's. */
#include "ops/device.h"

#include <assert.h>
#include <string.h>

/* A device that failed is not called any more, except to give back what it holds. */
#define TRY_USABLE(device)               \
    do {                                 \
        if ((device)->has_failed) {      \
            return IMBREX_STATUS_DEVICE; \
        }                                \
    } while (0)

static enum imbrex_status keep(struct device *device, enum imbrex_status status)
{
    if (status == IMBREX_STATUS_DEVICE) {
        device->has_failed = true;
    }
    return status;
}

/* TRY_USABLE for the calls that have a message. */
static enum imbrex_status check_usable(const struct device *device, struct imbrex_error *err)
{
    if (device->has_failed) {
        return error_set(err, IMBREX_STATUS_DEVICE,
                         "device %s: it has failed and takes no more%s%s", device->functions->name,
                         device->failure.message[0] != '\0' ? ": " : "", device->failure.message);
    }
    return IMBREX_STATUS_OK;
}

/* What the asserts below ask. */
__attribute__((unused)) static bool stream_is_valid(enum device_stream stream)
{
    return (unsigned)stream < DEVICE_STREAM_COUNT;
}

__attribute__((unused)) static bool copies_are_valid(const struct device_copy *copies,
                                                     int32_t num_copies)
{
    for (int32_t i = 0; i < num_copies; i++) {
        if (copies[i].num_bytes > 0 &&
            (copies[i].destination == NULL || copies[i].source == NULL)) {
            return false;
        }
    }
    return num_copies >= 0;
}

/* Digits alone, of a number that fits int32_t. */
static bool parse_idx(const char *digits, int32_t *idx)
{
    int64_t parsed = 0;
    if (*digits == '\0') {
        return false;
    }
    for (; *digits != '\0'; digits++) {
        if (*digits < '0' || *digits > '9') {
            return false;
        }
        parsed = 10 * parsed + (*digits - '0');
        if (parsed > INT32_MAX) {
            return false;
        }
    }
    *idx = (int32_t)parsed;
    return true;
}

enum imbrex_status device_parse(const char *name, struct device_choice *choice,
                                struct imbrex_error *err)
{
    struct device_choice parsed = {.kind = DEVICE_KIND_CPU};
    if (name != NULL && strcmp(name, "auto") == 0) {
        parsed.kind = DEVICE_KIND_AUTO;
    } else if (name != NULL && strncmp(name, "cuda", 4) == 0 &&
               (name[4] == '\0' || (name[4] == ':' && parse_idx(name + 5, &parsed.idx)))) {
        parsed.kind = DEVICE_KIND_CUDA;
    } else if (name != NULL && strcmp(name, "cpu") != 0) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "device",
                               ": expected \"cpu\", \"cuda\", \"cuda:N\" or \"auto\", found "
                               "\"%.64s\"",
                               name);
    }
    *choice = parsed;
    return IMBREX_STATUS_OK;
}

/* `created` is destroyed if it cannot have its plans. */
static enum imbrex_status finish_gpu(const struct device_choice *choice, const struct log *log,
                                     struct device *created, struct device **device,
                                     struct device_choice *opened, struct imbrex_error *err)
{
    enum imbrex_status status = device_cuda_tune(created, choice, log, err);
    if (status != IMBREX_STATUS_OK) {
        device_destroy(created);
        return status;
    }
    *device = created;
    *opened = *choice;
    return IMBREX_STATUS_OK;
}

enum imbrex_status device_open(const struct device_choice *choice, const struct log *log,
                               struct device **device, struct device_choice *opened,
                               struct imbrex_error *err)
{
    struct device_choice decided = *choice;
    struct device *created = NULL;
    if (choice->kind == DEVICE_KIND_AUTO) {
        struct imbrex_error reason;
        if (device_cuda_create(choice->idx, &created, &reason) == IMBREX_STATUS_OK) {
            decided.kind = DEVICE_KIND_CUDA;
            return finish_gpu(&decided, log, created, device, opened, err);
        }
        /* Where there is no GPU nobody misses it. */
        enum imbrex_log_level level =
            device_cuda_is_present() ? IMBREX_LOG_LEVEL_WARNING : IMBREX_LOG_LEVEL_INFO;
        log_write(log, level, "device auto: the model runs on the CPU: %s", reason.message);
        decided.kind = DEVICE_KIND_CPU;
    }
    if (decided.kind == DEVICE_KIND_CUDA) {
        TRY(device_cuda_create(decided.idx, &created, err));
        return finish_gpu(&decided, log, created, device, opened, err);
    }
    TRY(device_cpu_create(device, err));
    *opened = decided;
    return IMBREX_STATUS_OK;
}

void device_destroy(struct device *device)
{
    if (device != NULL) {
        device->functions->destroy(device);
    }
}

const char *device_name(const struct device *device)
{
    return device->functions->name;
}

enum device_kind device_kind(const struct device *device)
{
    return device->functions->kind;
}

bool device_is_async(const struct device *device)
{
    return device->functions->is_async;
}

enum imbrex_status device_alloc(struct device *device, const char *what, size_t num_bytes,
                                void **memory, struct imbrex_error *err)
{
    TRY(check_usable(device, err));
    if (num_bytes == 0) {
        *memory = NULL;
        return IMBREX_STATUS_OK;
    }
    return keep(device, device->functions->alloc(device, what, num_bytes, memory, err));
}

void device_free(struct device *device, void *memory)
{
    if (memory != NULL) {
        device->functions->free(device, memory);
    }
}

enum imbrex_status device_host_register(struct device *device, void *memory, size_t num_bytes,
                                        struct imbrex_error *err)
{
    assert(memory != NULL && (uintptr_t)memory % 4096 == 0 && num_bytes % 4096 == 0);
    TRY(check_usable(device, err));
    return keep(device, device->functions->host_register(device, memory, num_bytes, err));
}

void device_host_unregister(struct device *device, void *memory)
{
    if (memory != NULL) {
        device->functions->host_unregister(device, memory);
    }
}

int32_t device_host_node(struct device *device)
{
    return device->functions->host_node != NULL && !device->has_failed
               ? device->functions->host_node(device)
               : -1;
}

enum imbrex_status device_copy_batch_async(struct device *device, enum device_stream stream,
                                           const struct device_copy *copies, int32_t num_copies)
{
    assert(stream_is_valid(stream) && copies_are_valid(copies, num_copies));
    TRY_USABLE(device);
    if (num_copies == 0) {
        return IMBREX_STATUS_OK;
    }
    return keep(device, device->functions->copy_batch_async(device, stream, copies, num_copies));
}

enum imbrex_status device_run_async(struct device *device, enum device_stream stream,
                                    device_work_fn *work, void *arg)
{
    assert(stream_is_valid(stream) && work != NULL);
    TRY_USABLE(device);
    return keep(device, device->functions->run_async(device, stream, work, arg));
}

enum imbrex_status device_event_create(struct device *device, struct device_event **event,
                                       struct imbrex_error *err)
{
    TRY(check_usable(device, err));
    return keep(device, device->functions->event_create(device, false, event, err));
}

enum imbrex_status device_event_create_timed(struct device *device, struct device_event **event,
                                             struct imbrex_error *err)
{
    TRY(check_usable(device, err));
    return keep(device, device->functions->event_create(device, true, event, err));
}

void device_event_destroy(struct device *device, struct device_event *event)
{
    if (event != NULL) {
        device->functions->event_destroy(device, event);
    }
}

enum imbrex_status device_event_record(struct device *device, struct device_event *event,
                                       enum device_stream stream)
{
    assert(stream_is_valid(stream) && event != NULL);
    TRY_USABLE(device);
    return keep(device, device->functions->event_record(device, event, stream));
}

enum imbrex_status device_event_wait(struct device *device, struct device_event *event,
                                     enum device_stream stream)
{
    assert(stream_is_valid(stream) && event != NULL);
    TRY_USABLE(device);
    return keep(device, device->functions->event_wait(device, event, stream));
}

enum imbrex_status device_event_query(struct device *device, struct device_event *event,
                                      bool *is_done)
{
    assert(event != NULL);
    *is_done = true;
    TRY_USABLE(device);
    return keep(device, device->functions->event_query(device, event, is_done));
}

enum imbrex_status device_event_synchronize(struct device *device, struct device_event *event)
{
    assert(event != NULL);
    TRY_USABLE(device);
    return keep(device, device->functions->event_synchronize(device, event));
}

enum imbrex_status device_event_elapsed(struct device *device, const struct device_event *begin,
                                        const struct device_event *end, int64_t *elapsed_ns)
{
    assert(begin != NULL && end != NULL);
    TRY_USABLE(device);
    return keep(device, device->functions->event_elapsed(device, begin, end, elapsed_ns));
}

enum imbrex_status device_graph_capture(struct device *device, device_work_fn *work, void *arg,
                                        struct device_graph **graph, struct imbrex_error *err)
{
    assert(work != NULL);
    TRY(check_usable(device, err));
    return keep(device, device->functions->graph_capture(device, work, arg, graph, err));
}

enum imbrex_status device_graph_launch(struct device *device, enum device_stream stream,
                                       struct device_graph *graph)
{
    assert(stream_is_valid(stream) && graph != NULL);
    TRY_USABLE(device);
    return keep(device, device->functions->graph_launch(device, stream, graph));
}

void device_graph_destroy(struct device *device, struct device_graph *graph)
{
    if (graph != NULL) {
        device->functions->graph_destroy(device, graph);
    }
}
