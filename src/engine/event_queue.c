/* SPDX-License-Identifier: Apache-2.0 */
/* A record is a struct event_record, its alternatives, its text, and padding to the next record.
 * The pointers inside are set when it is handed out: until then records move. */
#include "engine/event_queue.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

#define MIN_CAPACITY ((size_t)1024)

struct event_record {
    size_t num_bytes;
    struct imbrex_token_event event;
};

void event_queue_deinit(struct event_queue *queue)
{
    free(queue->bytes);
    free(queue->taken);
    *queue = (struct event_queue){0};
}

/* False if it does not fit size_t. */
static bool record_bytes(size_t num_top_logprobs, size_t text_bytes, size_t *num_bytes)
{
    const size_t alignment = _Alignof(struct event_record);
    size_t top_bytes;
    if (!size_mul(num_top_logprobs, sizeof(struct imbrex_logprob), &top_bytes) ||
        !size_add(top_bytes, sizeof(struct event_record) + alignment - 1, num_bytes) ||
        !size_add(*num_bytes, text_bytes, num_bytes)) {
        return false;
    }
    *num_bytes -= *num_bytes % alignment;
    return true;
}

/* Moves the records to the begin of `bytes`, which may be where they are. */
static void move_records(struct event_queue *queue, unsigned char *bytes)
{
    size_t num_live = queue->end - queue->begin;
    if (num_live > 0) {
        memmove(bytes, queue->bytes + queue->begin, num_live);
    }
    queue->begin = 0;
    queue->end = num_live;
}

static bool grow(struct event_queue *queue, size_t min_capacity)
{
    size_t capacity = queue->capacity;
    if (capacity > SIZE_MAX / 2 || 2 * capacity < min_capacity) {
        capacity = min_capacity > MIN_CAPACITY ? min_capacity : MIN_CAPACITY;
    } else {
        capacity = 2 * capacity;
    }
    unsigned char *bytes = malloc(capacity);
    if (bytes == NULL) {
        return false;
    }
    move_records(queue, bytes);
    free(queue->bytes);
    queue->bytes = bytes;
    queue->capacity = capacity;
    return true;
}

/* Room for num_bytes behind the records, beside what is set aside. Records move to the begin only
 * if at least as many bytes in front of them are free, else the queue grows: so each byte moves a
 * bounded number of times. */
static bool make_room(struct event_queue *queue, size_t num_bytes)
{
    size_t num_live = queue->end - queue->begin;
    size_t num_needed;
    if (!size_add(num_live + queue->reserved_bytes, num_bytes, &num_needed)) {
        return false;
    }
    bool fits = num_needed <= queue->capacity;
    bool fits_behind = fits && num_bytes <= queue->capacity - queue->end;
    if (fits_behind) {
        return true;
    }
    if ((!fits || queue->begin < num_live) && grow(queue, num_needed)) {
        return true;
    }
    if (fits) {
        move_records(queue, queue->bytes);
    }
    return fits;
}

/* Behind the records, where there is room. */
static void append(struct event_queue *queue, const struct imbrex_token_event *event,
                   size_t num_bytes)
{
    const struct event_record record = {.num_bytes = num_bytes, .event = *event};
    size_t top_bytes = (size_t)event->num_top_logprobs * sizeof(*event->top_logprobs);
    unsigned char *place = queue->bytes + queue->end;
    memcpy(place, &record, sizeof(record));
    if (top_bytes > 0) {
        memcpy(place + sizeof(record), event->top_logprobs, top_bytes);
    }
    if (event->text_bytes > 0) {
        memcpy(place + sizeof(record) + top_bytes, event->text, event->text_bytes);
    }
    queue->end += num_bytes;
}

bool event_queue_push(struct event_queue *queue, const struct imbrex_token_event *event)
{
    size_t num_bytes;
    if (!record_bytes((size_t)event->num_top_logprobs, event->text_bytes, &num_bytes) ||
        !make_room(queue, num_bytes)) {
        return false;
    }
    append(queue, event, num_bytes);
    return true;
}

bool event_queue_reserve(struct event_queue *queue, int32_t num_events, size_t text_bytes)
{
    size_t num_bytes;
    if (!record_bytes(0, text_bytes, &num_bytes) ||
        !size_mul(num_bytes, (size_t)num_events, &num_bytes) || !make_room(queue, num_bytes)) {
        return false;
    }
    queue->reserved_bytes += num_bytes;
    return true;
}

void event_queue_push_reserved(struct event_queue *queue, const struct imbrex_token_event *event)
{
    size_t num_bytes = 0;
    bool fits = record_bytes((size_t)event->num_top_logprobs, event->text_bytes, &num_bytes);
    assert(fits && num_bytes <= queue->reserved_bytes);
    (void)fits;
    queue->reserved_bytes -= num_bytes;
    if (num_bytes > queue->capacity - queue->end) {
        move_records(queue, queue->bytes);
    }
    append(queue, event, num_bytes);
}

bool event_queue_is_empty(const struct event_queue *queue)
{
    return queue->begin == queue->end;
}

bool event_queue_pop(struct event_queue *queue, struct imbrex_token_event *event)
{
    struct event_record record;
    memcpy(&record, queue->bytes + queue->begin, sizeof(record));
    if (record.num_bytes > queue->taken_capacity) {
        size_t capacity = record.num_bytes > MIN_CAPACITY ? record.num_bytes : MIN_CAPACITY;
        unsigned char *taken = malloc(capacity);
        if (taken == NULL) {
            return false;
        }
        free(queue->taken);
        queue->taken = taken;
        queue->taken_capacity = capacity;
    }
    memcpy(queue->taken, queue->bytes + queue->begin, record.num_bytes);
    queue->begin += record.num_bytes;
    if (queue->begin == queue->end) {
        queue->begin = 0;
        queue->end = 0;
    }
    unsigned char *top = queue->taken + sizeof(record);
    size_t top_bytes = (size_t)record.event.num_top_logprobs * sizeof(struct imbrex_logprob);
    record.event.top_logprobs = top_bytes > 0 ? (struct imbrex_logprob *)(void *)top : NULL;
    record.event.text = (char *)top + top_bytes;
    *event = record.event;
    return true;
}
