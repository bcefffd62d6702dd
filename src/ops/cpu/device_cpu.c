/* SPDX-License-Identifier: Apache-2.0 */
/* The host as a device: each call does its work before it returns, so every event is done and
 * streams have nothing to wait for. What is left to keep are failures, which events tell. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/memory.h"
#include "ops/device.h"

/* Before each piece of memory, as much as keeps it aligned: where its region is written down. */
#define ALLOCATION_HEAD_BYTES 4096

struct cpu_failure {
    enum imbrex_status status;
    int64_t number; /* counted from 1; 0: none */
};

struct device_event {
    struct device_event *previous, *next; /* of the device's */
    /* The first on each stream since the event was last recorded there. */
    struct cpu_failure failures[DEVICE_STREAM_COUNT];
    struct cpu_failure recorded; /* the latest record's */
    enum device_stream stream;   /* of the latest record */
    int64_t recorded_ns;
};

struct device_graph {
    device_work_fn *work;
    void *arg;
};

struct device_cpu {
    struct device device; /* first: the table's functions get it */
    struct device_event *events;
    struct cpu_failure failures[DEVICE_STREAM_COUNT]; /* of which the host has not been told */
    int64_t num_failures;
    int64_t num_held; /* allocations, registrations, events and graphs not given back */
};

static struct device_cpu *device_cpu_of(struct device *device)
{
    return (struct device_cpu *)(void *)device;
}

static void cpu_destroy(struct device *device)
{
    assert(device_cpu_of(device)->num_held == 0);
    free(device_cpu_of(device));
}

static enum imbrex_status cpu_alloc(struct device *device, const char *what, size_t num_bytes,
                                    void **memory, struct imbrex_error *err)
{
    struct memory_region region;
    size_t region_bytes;
    if (!size_add(num_bytes, ALLOCATION_HEAD_BYTES, &region_bytes)) {
        return error_out_of_memory(err, what, num_bytes);
    }
    TRY(memory_region_map(what, region_bytes, &region, err));
    memcpy(region.base, &region, sizeof(region));
    device_cpu_of(device)->num_held++;
    *memory = region.base + ALLOCATION_HEAD_BYTES;
    return IMBREX_STATUS_OK;
}

static void cpu_free(struct device *device, void *memory)
{
    struct memory_region region;
    memcpy(&region, (unsigned char *)memory - ALLOCATION_HEAD_BYTES, sizeof(region));
    memory_region_unmap(&region);
    device_cpu_of(device)->num_held--;
}

static enum imbrex_status cpu_host_register(struct device *device, void *memory, size_t num_bytes,
                                            struct imbrex_error *err)
{
    (void)memory, (void)num_bytes, (void)err;
    device_cpu_of(device)->num_held++;
    return IMBREX_STATUS_OK;
}

static void cpu_host_unregister(struct device *device, void *memory)
{
    (void)memory;
    device_cpu_of(device)->num_held--;
}

/* Whether the stream does nothing until the host has been told why. Then all events behind learn of
 * it. */
static bool is_stopped(struct device_cpu *cpu, enum device_stream stream)
{
    if (cpu->failures[stream].number == 0) {
        return false;
    }
    for (struct device_event *event = cpu->events; event != NULL; event = event->next) {
        if (event->failures[stream].number == 0) {
            event->failures[stream] = cpu->failures[stream];
        }
    }
    return true;
}

static enum imbrex_status cpu_copy_batch_async(struct device *device, enum device_stream stream,
                                               const struct device_copy *copies, int32_t num_copies)
{
    if (is_stopped(device_cpu_of(device), stream)) {
        return IMBREX_STATUS_OK;
    }
    for (int32_t i = 0; i < num_copies; i++) {
        if (copies[i].num_bytes > 0) {
            memcpy(copies[i].destination, copies[i].source, copies[i].num_bytes);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cpu_run_async(struct device *device, enum device_stream stream,
                                        device_work_fn *work, void *arg)
{
    struct device_cpu *cpu = device_cpu_of(device);
    if (!is_stopped(cpu, stream)) {
        enum imbrex_status status = work(arg, NULL);
        if (status != IMBREX_STATUS_OK) {
            cpu->failures[stream] =
                (struct cpu_failure){.status = status, .number = ++cpu->num_failures};
            (void)is_stopped(cpu, stream);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cpu_event_create(struct device *device, bool is_timed,
                                           struct device_event **event, struct imbrex_error *err)
{
    struct device_cpu *cpu = device_cpu_of(device);
    (void)is_timed;
    struct device_event *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "a device event", sizeof(*created));
    }
    created->next = cpu->events;
    if (cpu->events != NULL) {
        cpu->events->previous = created;
    }
    cpu->events = created;
    cpu->num_held++;
    *event = created;
    return IMBREX_STATUS_OK;
}

static void cpu_event_destroy(struct device *device, struct device_event *event)
{
    struct device_cpu *cpu = device_cpu_of(device);
    *(event->previous != NULL ? &event->previous->next : &cpu->events) = event->next;
    if (event->next != NULL) {
        event->next->previous = event->previous;
    }
    free(event);
    cpu->num_held--;
}

static enum imbrex_status cpu_event_record(struct device *device, struct device_event *event,
                                           enum device_stream stream)
{
    (void)device;
    event->recorded = event->failures[stream];
    event->failures[stream] = (struct cpu_failure){0};
    event->stream = stream;
    event->recorded_ns = clock_now_ns();
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cpu_event_wait(struct device *device, struct device_event *event,
                                         enum device_stream stream)
{
    (void)device, (void)event, (void)stream;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cpu_event_synchronize(struct device *device, struct device_event *event)
{
    struct cpu_failure *untold = &device_cpu_of(device)->failures[event->stream];
    if (event->recorded.number == untold->number) {
        *untold = (struct cpu_failure){0};
    }
    return event->recorded.status;
}

static enum imbrex_status cpu_event_elapsed(struct device *device, const struct device_event *begin,
                                            const struct device_event *end, int64_t *elapsed_ns)
{
    (void)device;
    *elapsed_ns = end->recorded_ns - begin->recorded_ns;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cpu_event_query(struct device *device, struct device_event *event,
                                          bool *is_done)
{
    *is_done = true;
    return cpu_event_synchronize(device, event);
}

static enum imbrex_status cpu_graph_capture(struct device *device, device_work_fn *work, void *arg,
                                            struct device_graph **graph, struct imbrex_error *err)
{
    struct device_graph *captured = malloc(sizeof(*captured));
    if (captured == NULL) {
        return error_out_of_memory(err, "a device graph", sizeof(*captured));
    }
    *captured = (struct device_graph){.work = work, .arg = arg};
    device_cpu_of(device)->num_held++;
    *graph = captured;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cpu_graph_launch(struct device *device, enum device_stream stream,
                                           struct device_graph *graph)
{
    return cpu_run_async(device, stream, graph->work, graph->arg);
}

static void cpu_graph_destroy(struct device *device, struct device_graph *graph)
{
    free(graph);
    device_cpu_of(device)->num_held--;
}

static const struct device_functions device_cpu_functions = {
    .name = "cpu",
    .is_async = false,
    .destroy = cpu_destroy,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .host_register = cpu_host_register,
    .host_unregister = cpu_host_unregister,
    .copy_batch_async = cpu_copy_batch_async,
    .run_async = cpu_run_async,
    .event_create = cpu_event_create,
    .event_destroy = cpu_event_destroy,
    .event_record = cpu_event_record,
    .event_elapsed = cpu_event_elapsed,
    .event_wait = cpu_event_wait,
    .event_query = cpu_event_query,
    .event_synchronize = cpu_event_synchronize,
    .graph_capture = cpu_graph_capture,
    .graph_launch = cpu_graph_launch,
    .graph_destroy = cpu_graph_destroy,
};

enum imbrex_status device_cpu_create(struct device **device, struct imbrex_error *err)
{
    struct device_cpu *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the device cpu", sizeof(*created));
    }
    created->device.functions = &device_cpu_functions;
    *device = &created->device;
    return IMBREX_STATUS_OK;
}
