/* SPDX-License-Identifier: Apache-2.0 */
/* The calls of device.h: what holds for every device is seen to here, the rest is the table's. */
#include "ops/device.h"

#include <assert.h>

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
        return error_set(err, IMBREX_STATUS_DEVICE, "device %s: it has failed and takes no more",
                         device->functions->name);
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
    return keep(device, device->functions->event_create(device, event, err));
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
