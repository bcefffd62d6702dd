/* SPDX-License-Identifier: Apache-2.0 */
/* Events of a request that nobody has taken yet, with copies of their text and alternatives.
 * Written by the thread that runs the engine, read by the one that polls; the caller holds the
 * engine's lock around every call. */
#ifndef IMBREX_ENGINE_EVENT_QUEUE_H
#define IMBREX_ENGINE_EVENT_QUEUE_H

#include <stdbool.h>

#include "base/status.h"

struct event_queue {
    unsigned char *bytes; /* [capacity] records in [begin, end); grows */
    size_t capacity, begin, end;
    size_t reserved_bytes; /* capacity >= end - begin + reserved_bytes */
    unsigned char *taken;  /* [taken_capacity] the record that was handed out last */
    size_t taken_capacity;
};

/* Safe on a zeroed struct, which is an empty queue. */
void event_queue_deinit(struct event_queue *queue);

/* Copies the event. False if there is no memory for it: nothing was queued then. Leaves the room
 * that was set aside alone. */
bool event_queue_push(struct event_queue *queue, const struct imbrex_token_event *event);

/* Sets room aside, beside what was before, for num_events pushes of events with up to text_bytes of
 * text each and no alternatives: so that the ends of a request are never lost. False without
 * memory. */
bool event_queue_reserve(struct event_queue *queue, int32_t num_events, size_t text_bytes);

/* Copies an event into the room that was set aside for it. Allocates nothing, cannot fail. */
void event_queue_push_reserved(struct event_queue *queue, const struct imbrex_token_event *event);

bool event_queue_is_empty(const struct event_queue *queue);

/* Moves the oldest event out of a queue that is not empty. Its pointers are valid until the next
 * call of this function, or deinit. False without memory: the event stays. */
bool event_queue_pop(struct event_queue *queue, struct imbrex_token_event *event);

#endif
