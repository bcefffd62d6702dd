/* SPDX-License-Identifier: Apache-2.0 */
/* A queue for each stream, whose heads run whenever the random numbers say so. An event is a place
 * in a queue: it is done when as many items have left the queue as were given before it. Not part
 * of the library that is given away. */
#include "ops/fake/device_fake.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

#define POISON 0xa5
#define MAX_MOVES 3 /* most items that a query or a call moves on */

enum item_kind {
    ITEM_COPIES = 0,
    ITEM_WORK = 1,
    ITEM_WAIT = 2,
};

struct fake_copy {
    struct device_copy copy;
    bool is_poisoned; /* the destination */
};

struct fake_item {
    enum item_kind kind;
    struct fake_copy *copies; /* [num_copies] not done yet; NULL: `single` is the one there is */
    struct fake_copy single;  /* so that a steady step needs no memory here either */
    int32_t num_copies;
    device_work_fn *work;
    void *arg;
    enum device_stream wait_stream; /* goes on when that many of that stream's items are done */
    int64_t wait_position;
};

struct fake_failure {
    enum imbrex_status status;
    int64_t number; /* counted from 1; 0: none */
};

struct fake_queue {
    struct fake_item *items; /* [capacity] from begin to end */
    size_t capacity, begin, end;
    int64_t num_given, num_done;
    int64_t time_ns;             /* that all it was given takes, if it has a rate */
    double ns_per_byte;          /* of copies; 0: they take none */
    struct fake_failure failure; /* of which the host has not been told */
};

/* What an event knows of a stream: items [begin, position) are its latest record's there. */
struct event_window {
    int64_t begin, position;
    struct fake_failure recorded; /* the first of [begin, position) */
    struct fake_failure pending;  /* the first from `position` on */
};

struct device_event {
    struct device_event *previous, *next; /* of the device's */
    struct event_window windows[DEVICE_STREAM_COUNT];
    enum device_stream stream; /* of the latest record */
    int64_t time_ns;           /* of the stream, at it */
    bool is_recorded;
};

struct device_graph {
    device_work_fn *work;
    void *arg;
};

struct fake_allocation {
    struct memory_region region;
    struct fake_allocation *next;
};

struct fake_fault {
    int64_t countdown; /* 0: none */
    enum imbrex_status status;
};

struct device_fake {
    struct device device; /* first: the table's functions get it */
    struct fake_queue queues[DEVICE_STREAM_COUNT];
    struct device_event *events;
    struct fake_allocation *allocations;
    struct fake_fault faults[DEVICE_FAKE_FAULT_COUNT];
    enum device_stream aim; /* where they happen; DEVICE_STREAM_COUNT: anywhere */
    uint64_t random_state;
    int64_t num_failures;
    int64_t num_launches;           /* of graphs */
    int64_t num_held;               /* registrations and graphs not given back */
    int64_t num_registrations_left; /* -1: no limit */
    bool refuses_graphs;
    bool is_working; /* a piece of work runs, which must not call the device */
};

static struct device_fake *device_fake_of(struct device *device)
{
    return (struct device_fake *)(void *)device;
}

/* SplitMix64. Source: Steele et al., "Fast splittable pseudorandom number generators", 2014. */
static uint32_t random_below(struct device_fake *fake, uint32_t bound)
{
    fake->random_state += 0x9e3779b97f4a7c15u;
    uint64_t bits = fake->random_state;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    bits ^= bits >> 31;
    return (uint32_t)((bits >> 32) * bound >> 32);
}

static struct fake_copy *copies_of(struct fake_item *item)
{
    return item->copies != NULL ? item->copies : &item->single;
}

static bool is_fault_due(struct device_fake *fake, enum device_fake_fault fault,
                         enum device_stream stream, enum imbrex_status *status)
{
    struct fake_fault *armed = &fake->faults[fault];
    bool is_aimed = fake->aim == DEVICE_STREAM_COUNT || fake->aim == stream;
    if (!is_aimed || armed->countdown == 0 || --armed->countdown > 0) {
        return false;
    }
    *status = armed->status;
    return true;
}

/* Nothing that was given to a device that failed runs any more. */
static void fail_for_good(struct device_fake *fake)
{
    fake->device.has_failed = true;
    for (int32_t stream = 0; stream < DEVICE_STREAM_COUNT; stream++) {
        struct fake_queue *queue = &fake->queues[stream];
        for (size_t i = queue->begin; i < queue->end; i++) {
            free(queue->items[i].copies);
        }
        queue->begin = queue->end = 0;
        queue->num_done = queue->num_given;
    }
}

static void remove_head(struct fake_queue *queue)
{
    free(queue->items[queue->begin].copies);
    queue->begin++;
    queue->num_done++;
}

/* The stream's head counts as failed, by itself or because of what failed before it. */
static void fail_head(struct device_fake *fake, enum device_stream stream)
{
    struct fake_queue *queue = &fake->queues[stream];
    for (struct device_event *event = fake->events; event != NULL; event = event->next) {
        struct event_window *window = &event->windows[stream];
        struct fake_failure *kept =
            queue->num_done >= window->position ? &window->pending : &window->recorded;
        if (queue->num_done >= window->begin && kept->number == 0) {
            *kept = queue->failure;
        }
    }
    remove_head(queue);
}

static bool is_head_waiting(const struct device_fake *fake, enum device_stream stream,
                            enum device_stream *wait_stream)
{
    const struct fake_queue *queue = &fake->queues[stream];
    const struct fake_item *item = &queue->items[queue->begin];
    if (queue->begin == queue->end || queue->failure.number > 0 || item->kind != ITEM_WAIT ||
        fake->queues[item->wait_stream].num_done >= item->wait_position) {
        return false;
    }
    *wait_stream = item->wait_stream;
    return true;
}

/* One of the item's copies, whichever. Returns whether it was done. */
static enum imbrex_status move_copies(struct device_fake *fake, enum device_stream stream,
                                      struct fake_item *item)
{
    enum imbrex_status status = IMBREX_STATUS_OK;
    struct fake_copy *copies = copies_of(item);
    for (int32_t i = 0; i < item->num_copies; i++) {
        if (!copies[i].is_poisoned && copies[i].copy.num_bytes > 0) {
            memset(copies[i].copy.destination, POISON, copies[i].copy.num_bytes);
        }
        copies[i].is_poisoned = true;
    }
    struct fake_copy *chosen = &copies[random_below(fake, (uint32_t)item->num_copies)];
    if (!is_fault_due(fake, DEVICE_FAKE_FAULT_COPY, stream, &status) &&
        chosen->copy.num_bytes > 0) {
        memcpy(chosen->copy.destination, chosen->copy.source, chosen->copy.num_bytes);
    }
    *chosen = copies[--item->num_copies];
    return status;
}

/* Does what is at the head of the stream, or a part of it; nothing if it has to wait. */
static void move_stream(struct device_fake *fake, enum device_stream stream)
{
    struct fake_queue *queue = &fake->queues[stream];
    enum device_stream wait_stream;
    enum imbrex_status status = IMBREX_STATUS_OK;
    if (queue->begin == queue->end || is_head_waiting(fake, stream, &wait_stream)) {
        return;
    }
    if (queue->failure.number > 0) {
        fail_head(fake, stream);
        return;
    }
    struct fake_item *item = &queue->items[queue->begin];
    if (item->kind == ITEM_COPIES) {
        status = move_copies(fake, stream, item);
    } else if (item->kind == ITEM_WORK &&
               !is_fault_due(fake, DEVICE_FAKE_FAULT_WORK, stream, &status)) {
        fake->is_working = true;
        status = item->work(item->arg, NULL);
        fake->is_working = false;
    }
    if (status == IMBREX_STATUS_DEVICE) {
        fail_for_good(fake);
    } else if (status != IMBREX_STATUS_OK) {
        queue->failure = (struct fake_failure){.status = status, .number = ++fake->num_failures};
        fail_head(fake, stream);
    } else if (item->num_copies == 0) {
        remove_head(queue);
    }
}

static void move_some(struct device_fake *fake)
{
    for (uint32_t i = random_below(fake, MAX_MOVES + 1); i > 0; i--) {
        move_stream(fake, (enum device_stream)random_below(fake, DEVICE_STREAM_COUNT));
    }
}

/* Every call that gives something begins with it. */
static enum imbrex_status begin_call(struct device_fake *fake, enum device_stream stream)
{
    enum imbrex_status status;
    assert(!fake->is_working);
    if (!is_fault_due(fake, DEVICE_FAKE_FAULT_CALL, stream, &status)) {
        return IMBREX_STATUS_OK;
    }
    if (status == IMBREX_STATUS_DEVICE) {
        fail_for_good(fake);
    }
    return status;
}

/* ... and ends with it: time passes. */
static enum imbrex_status end_call(struct device_fake *fake)
{
    move_some(fake);
    return fake->device.has_failed ? IMBREX_STATUS_DEVICE : IMBREX_STATUS_OK;
}

static enum imbrex_status give(struct device_fake *fake, enum device_stream stream,
                               const struct fake_item *item)
{
    struct fake_queue *queue = &fake->queues[stream];
    if (queue->begin > 0) {
        queue->end -= queue->begin;
        memmove(queue->items, queue->items + queue->begin, queue->end * sizeof(*queue->items));
        queue->begin = 0;
    }
    if (queue->end == queue->capacity) {
        size_t capacity = queue->capacity == 0 ? 16 : 2 * queue->capacity;
        struct fake_item *items = realloc(queue->items, capacity * sizeof(*items));
        if (items == NULL) {
            return IMBREX_STATUS_OUT_OF_MEMORY;
        }
        queue->items = items;
        queue->capacity = capacity;
    }
    queue->items[queue->end++] = *item;
    queue->num_given++;
    return IMBREX_STATUS_OK;
}

static bool is_overlapping(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    uintptr_t a_begin = (uintptr_t)a, b_begin = (uintptr_t)b;
    return a_begin < b_begin + b_bytes && b_begin < a_begin + a_bytes;
}

static bool is_device_memory(const struct device_fake *fake, const void *memory)
{
    const struct fake_allocation *allocation = fake->allocations;
    while (allocation != NULL &&
           !is_overlapping(allocation->region.base, allocation->region.num_bytes, memory, 1)) {
        allocation = allocation->next;
    }
    return allocation != NULL;
}

/* Whether something that was given before may still use a destination: of host memory only copies
 * can, of device memory anything that the stream was given. Other streams can not: that would be a
 * missing event. A stream on which something failed forgets the waits that it was given, and does
 * not touch the destination either. */
static bool is_in_use(const struct device_fake *fake, enum device_stream stream,
                      const struct device_copy *copy)
{
    if (is_device_memory(fake, copy->destination)) {
        const struct fake_queue *queue = &fake->queues[stream];
        return queue->begin != queue->end || queue->failure.number > 0;
    }
    for (int32_t i = 0; i < DEVICE_STREAM_COUNT; i++) {
        const struct fake_queue *queue = &fake->queues[i];
        for (size_t item_idx = queue->begin; item_idx < queue->end; item_idx++) {
            struct fake_item *item = &queue->items[item_idx];
            for (int32_t copy_idx = 0; copy_idx < item->num_copies; copy_idx++) {
                const struct device_copy *other = &copies_of(item)[copy_idx].copy;
                if (is_overlapping(other->destination, other->num_bytes, copy->destination,
                                   copy->num_bytes) ||
                    is_overlapping(other->source, other->num_bytes, copy->destination,
                                   copy->num_bytes)) {
                    return true;
                }
            }
        }
    }
    return false;
}

/* What an assert asks: copies of a batch may run in any order. */
__attribute__((unused)) static bool copies_are_independent(const struct device_copy *copies,
                                                           int32_t num_copies)
{
    for (int32_t i = 0; i < num_copies; i++) {
        for (int32_t j = 0; j < num_copies; j++) {
            if (is_overlapping(copies[i].destination, copies[i].num_bytes, copies[j].source,
                               copies[j].num_bytes) ||
                (i != j && is_overlapping(copies[i].destination, copies[i].num_bytes,
                                          copies[j].destination, copies[j].num_bytes))) {
                return false;
            }
        }
    }
    return true;
}

static enum imbrex_status fake_copy_batch_async(struct device *device, enum device_stream stream,
                                                const struct device_copy *copies,
                                                int32_t num_copies)
{
    struct device_fake *fake = device_fake_of(device);
    struct fake_item item = {.kind = ITEM_COPIES, .num_copies = num_copies};
    assert(copies_are_independent(copies, num_copies));
    TRY(begin_call(fake, stream));
    if (num_copies > 1) {
        item.copies = malloc((size_t)num_copies * sizeof(*item.copies));
        if (item.copies == NULL) {
            return IMBREX_STATUS_OUT_OF_MEMORY;
        }
    }
    for (int32_t i = 0; i < num_copies; i++) {
        bool is_free = copies[i].num_bytes > 0 && !is_in_use(fake, stream, &copies[i]);
        copies_of(&item)[i] = (struct fake_copy){.copy = copies[i], .is_poisoned = is_free};
    }
    enum imbrex_status status = give(fake, stream, &item);
    if (status != IMBREX_STATUS_OK) {
        free(item.copies);
        return status;
    }
    struct fake_queue *queue = &fake->queues[stream];
    for (int32_t i = 0; i < num_copies; i++) {
        if (copies_of(&item)[i].is_poisoned) {
            memset(copies[i].destination, POISON, copies[i].num_bytes);
        }
        queue->time_ns += (int64_t)(queue->ns_per_byte * (double)copies[i].num_bytes);
    }
    return end_call(fake);
}

static enum imbrex_status fake_run_async(struct device *device, enum device_stream stream,
                                         device_work_fn *work, void *arg)
{
    struct device_fake *fake = device_fake_of(device);
    TRY(begin_call(fake, stream));
    TRY(give(fake, stream, &(struct fake_item){.kind = ITEM_WORK, .work = work, .arg = arg}));
    return end_call(fake);
}

static enum imbrex_status fake_event_create(struct device *device, bool is_timed,
                                            struct device_event **event, struct imbrex_error *err)
{
    struct device_fake *fake = device_fake_of(device);
    (void)is_timed;
    struct device_event *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "a device event", sizeof(*created));
    }
    for (int32_t stream = 0; stream < DEVICE_STREAM_COUNT; stream++) {
        created->windows[stream].begin = fake->queues[stream].num_given;
        created->windows[stream].position = fake->queues[stream].num_given;
    }
    created->next = fake->events;
    if (fake->events != NULL) {
        fake->events->previous = created;
    }
    fake->events = created;
    *event = created;
    return IMBREX_STATUS_OK;
}

static void fake_event_destroy(struct device *device, struct device_event *event)
{
    struct device_fake *fake = device_fake_of(device);
    *(event->previous != NULL ? &event->previous->next : &fake->events) = event->next;
    if (event->next != NULL) {
        event->next->previous = event->previous;
    }
    free(event);
}

static enum imbrex_status fake_event_record(struct device *device, struct device_event *event,
                                            enum device_stream stream)
{
    struct device_fake *fake = device_fake_of(device);
    struct event_window *window = &event->windows[stream];
    TRY(begin_call(fake, stream));
    *window = (struct event_window){.begin = window->position,
                                    .position = fake->queues[stream].num_given,
                                    .recorded = window->pending};
    event->stream = stream;
    event->time_ns = fake->queues[stream].time_ns;
    event->is_recorded = true;
    return end_call(fake);
}

static enum imbrex_status fake_event_wait(struct device *device, struct device_event *event,
                                          enum device_stream stream)
{
    struct device_fake *fake = device_fake_of(device);
    TRY(begin_call(fake, stream));
    if (event->is_recorded) {
        TRY(give(fake, stream,
                 &(struct fake_item){.kind = ITEM_WAIT,
                                     .wait_stream = event->stream,
                                     .wait_position = event->windows[event->stream].position}));
    }
    return end_call(fake);
}

static bool is_event_done(const struct device_fake *fake, const struct device_event *event)
{
    return fake->device.has_failed || !event->is_recorded ||
           fake->queues[event->stream].num_done >= event->windows[event->stream].position;
}

/* The host is told: whatever the stream was given by now has failed too. */
static enum imbrex_status event_status(struct device_fake *fake, const struct device_event *event)
{
    if (fake->device.has_failed) {
        return IMBREX_STATUS_DEVICE;
    }
    if (!event->is_recorded) {
        return IMBREX_STATUS_OK;
    }
    struct fake_queue *queue = &fake->queues[event->stream];
    struct fake_failure told = event->windows[event->stream].recorded;
    if (told.number > 0 && told.number == queue->failure.number) {
        while (queue->begin < queue->end) {
            fail_head(fake, event->stream);
        }
        queue->failure = (struct fake_failure){0};
    }
    return told.status;
}

static enum imbrex_status fake_event_query(struct device *device, struct device_event *event,
                                           bool *is_done)
{
    struct device_fake *fake = device_fake_of(device);
    assert(!fake->is_working);
    move_some(fake);
    enum imbrex_status status = event_status(fake, event);
    *is_done = is_event_done(fake, event);
    return status;
}

static enum imbrex_status fake_event_synchronize(struct device *device, struct device_event *event)
{
    struct device_fake *fake = device_fake_of(device);
    assert(!fake->is_working);
    while (!is_event_done(fake, event)) {
        /* The head that the event waits for: a wait is for items given before it, so there is no
         * way round in a circle. */
        enum device_stream stream = event->stream;
        while (is_head_waiting(fake, stream, &stream)) {
        }
        move_stream(fake, stream);
        move_some(fake);
    }
    return event_status(fake, event);
}

static enum imbrex_status fake_event_elapsed(struct device *device,
                                             const struct device_event *begin,
                                             const struct device_event *end, int64_t *elapsed_ns)
{
    (void)device;
    assert(begin->is_recorded && end->is_recorded && begin->stream == end->stream);
    assert(is_event_done(device_fake_of(device), begin) &&
           is_event_done(device_fake_of(device), end));
    *elapsed_ns = end->time_ns - begin->time_ns;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status fake_graph_capture(struct device *device, device_work_fn *work, void *arg,
                                             struct device_graph **graph, struct imbrex_error *err)
{
    if (device_fake_of(device)->refuses_graphs) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED, "the fake device takes no graphs");
    }
    struct device_graph *captured = malloc(sizeof(*captured));
    if (captured == NULL) {
        return error_out_of_memory(err, "a device graph", sizeof(*captured));
    }
    *captured = (struct device_graph){.work = work, .arg = arg};
    device_fake_of(device)->num_held++;
    *graph = captured;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status fake_graph_launch(struct device *device, enum device_stream stream,
                                            struct device_graph *graph)
{
    device_fake_of(device)->num_launches++;
    return fake_run_async(device, stream, graph->work, graph->arg);
}

static void fake_graph_destroy(struct device *device, struct device_graph *graph)
{
    free(graph);
    device_fake_of(device)->num_held--;
}

static enum imbrex_status fake_alloc(struct device *device, const char *what, size_t num_bytes,
                                     void **memory, struct imbrex_error *err)
{
    struct device_fake *fake = device_fake_of(device);
    struct fake_allocation *created = malloc(sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, what, sizeof(*created));
    }
    enum imbrex_status status = memory_region_map(what, num_bytes, &created->region, err);
    if (status != IMBREX_STATUS_OK) {
        free(created);
        return status;
    }
    created->next = fake->allocations;
    fake->allocations = created;
    *memory = created->region.base;
    return IMBREX_STATUS_OK;
}

static void fake_free(struct device *device, void *memory)
{
    struct fake_allocation **link = &device_fake_of(device)->allocations;
    while (*link != NULL && (*link)->region.base != memory) {
        link = &(*link)->next;
    }
    struct fake_allocation *freed = *link;
    assert(freed != NULL);
    *link = freed->next;
    memory_region_unmap(&freed->region);
    free(freed);
}

static enum imbrex_status fake_host_register(struct device *device, void *memory, size_t num_bytes,
                                             struct imbrex_error *err)
{
    struct device_fake *fake = device_fake_of(device);
    (void)memory, (void)num_bytes;
    if (fake->num_registrations_left == 0) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY,
                         "device fake: host memory: expected to register it, found that refused");
    }
    fake->num_registrations_left -= fake->num_registrations_left > 0;
    fake->num_held++;
    return IMBREX_STATUS_OK;
}

static int32_t fake_host_node(struct device *device)
{
    (void)device;
    return 0; /* every machine has one */
}

static void fake_host_unregister(struct device *device, void *memory)
{
    (void)memory;
    device_fake_of(device)->num_held--;
}

static void fake_destroy(struct device *device)
{
    struct device_fake *fake = device_fake_of(device);
    assert(device_fake_num_pending(device) == 0);
    assert(fake->num_held == 0 && fake->events == NULL && fake->allocations == NULL);
    for (int32_t stream = 0; stream < DEVICE_STREAM_COUNT; stream++) {
        free(fake->queues[stream].items);
    }
    free(fake);
}

static const struct device_functions device_fake_functions = {
    .name = "fake",
    .is_async = true,
    .destroy = fake_destroy,
    .alloc = fake_alloc,
    .free = fake_free,
    .host_register = fake_host_register,
    .host_unregister = fake_host_unregister,
    .host_node = fake_host_node,
    .copy_batch_async = fake_copy_batch_async,
    .run_async = fake_run_async,
    .event_create = fake_event_create,
    .event_destroy = fake_event_destroy,
    .event_record = fake_event_record,
    .event_wait = fake_event_wait,
    .event_query = fake_event_query,
    .event_elapsed = fake_event_elapsed,
    .event_synchronize = fake_event_synchronize,
    .graph_capture = fake_graph_capture,
    .graph_launch = fake_graph_launch,
    .graph_destroy = fake_graph_destroy,
};

enum imbrex_status device_fake_create(uint64_t seed, struct device **device,
                                      struct imbrex_error *err)
{
    struct device_fake *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the device fake", sizeof(*created));
    }
    created->device.functions = &device_fake_functions;
    created->random_state = seed;
    created->num_registrations_left = -1;
    created->aim = DEVICE_STREAM_COUNT;
    *device = &created->device;
    return IMBREX_STATUS_OK;
}

void device_fake_fail(struct device *device, enum device_fake_fault fault, int64_t countdown,
                      enum imbrex_status status)
{
    assert((unsigned)fault < DEVICE_FAKE_FAULT_COUNT && countdown >= 0);
    assert(status != IMBREX_STATUS_OK || countdown == 0);
    device_fake_of(device)->faults[fault] =
        (struct fake_fault){.countdown = countdown, .status = status};
}

void device_fake_set_rate(struct device *device, enum device_stream stream, double ns_per_byte)
{
    device_fake_of(device)->queues[stream].ns_per_byte = ns_per_byte;
}

int64_t device_fake_time(const struct device *device, enum device_stream stream)
{
    return ((const struct device_fake *)(const void *)device)->queues[stream].time_ns;
}

void device_fake_aim(struct device *device, enum device_stream stream)
{
    device_fake_of(device)->aim = stream;
}

int64_t device_fake_num_launches(const struct device *device)
{
    return ((const struct device_fake *)(const void *)device)->num_launches;
}

void device_fake_limit_registrations(struct device *device, int64_t num_registrations)
{
    device_fake_of(device)->num_registrations_left = num_registrations;
}

void device_fake_refuse_graphs(struct device *device)
{
    device_fake_of(device)->refuses_graphs = true;
}

int64_t device_fake_num_pending(const struct device *device)
{
    const struct device_fake *fake = (const struct device_fake *)(const void *)device;
    int64_t num_pending = 0;
    for (int32_t stream = 0; stream < DEVICE_STREAM_COUNT; stream++) {
        num_pending += fake->queues[stream].num_given - fake->queues[stream].num_done;
    }
    return num_pending;
}
